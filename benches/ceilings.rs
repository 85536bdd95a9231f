//! `scripts/gpu cargo bench --bench ceilings [-- --quick]`
//!
//! What the device does at best, for comparison with what kernels reach.

use common::bed::Bed;

fn main() {
    let Some(bed) = Bed::open() else { return };
    bed.ceilings().append_rows(&bed.gpu);
}
