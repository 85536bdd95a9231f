//! `scripts/gpu cargo bench -p benches --bench ceilings [-- --quick]`
//!
//! Measures the highest rates of the device, to compare kernels with.

use common::bed::Bed;

fn main() {
    let Some(bed) = Bed::open() else { return };
    bed.ceilings().append_rows(&bed.gpu);
}
