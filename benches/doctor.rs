//! Prints the page of `cargo run --example doctor`, for the folder of `scripts/gpu-report`.

fn main() {
    common::doctor::print();
}
