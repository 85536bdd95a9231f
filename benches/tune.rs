//! Prints the plans that `Pipelines::tune` finds on this device for typical calls. It compares
//! their times with the rules' plans, interleaved.
//!
//! `scripts/gpu cargo bench -p benches --bench tune`; `WGPU_ATTENTION_BENCH=quick` checks that it
//! runs.

fn main() {
    common::tuning::print();
}
