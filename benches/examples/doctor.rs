//! `cargo run --release --example doctor [-- --quick] [> PAGE.md]`
//!
//! What this device is, which of its features help, which families of kernels are right on it, which kernels typical calls get,
//! and how near those come to what the device can do: a page of Markdown, to attach to an issue. Where no GPU driver is
//! installed, `scripts/gpu` in front gets one in software. `--quick` leaves out the times of calls and the rates of the device.

fn main() {
    common::doctor::print();
}
