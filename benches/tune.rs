//! What `Pipelines::tune` finds on this device for typical calls, and what each then takes beside
//! the rules' own plan, interleaved.
//!
//! `scripts/gpu cargo bench -p benches --bench tune`; `WGPU_ATTENTION_BENCH=quick` checks that it
//! runs.

fn main() {
    common::tuning::print();
}
