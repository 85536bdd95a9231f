//! The tests of the crate, in one binary. Run as `scripts/gpu cargo test --release`.

mod harness;
mod laws;
mod ops;
mod peers;
mod small;
