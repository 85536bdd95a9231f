//! The small cases as a program for browsers and for Dawn in Node, one call per case.
//! `scripts/browser` builds and runs it. A native build does nothing.

#[cfg(target_arch = "wasm32")]
#[path = "../harness/mod.rs"]
mod harness;
#[cfg(target_arch = "wasm32")]
mod program;
#[cfg(target_arch = "wasm32")]
#[path = "../small/mod.rs"]
mod small;

fn main() {}
