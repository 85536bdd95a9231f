//! Sums with sinusoids and with learned tables, compared with the reference.

use wgpu_attention::DType;
use wgpu_attention::position::MAX_POSITION;

use crate::harness::Report;
use crate::harness::positions::{Setup, normals, places};

#[test]
fn sums_equal_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("positions, add");
    let table = normals("a learned table", [1, 1, 9, 7]);
    for setup in Setup::all() {
        // An odd width ends with a sine.
        let x = normals("add", [2, 2, 5, 7]);
        for (n, at) in places(MAX_POSITION).iter().enumerate() {
            let judged = setup.add_sinusoid(&x, 10_000.0, at, 2.5);
            report.record(&format!("sinusoid at {n}"), &setup.named(), judged);
        }
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (n, at) in places(8).iter().enumerate() {
                let judged = setup.add_learned(&x, (&table, dtype), at, -0.5);
                report.record(&format!("{dtype:?} table at {n}"), &setup.named(), judged);
            }
        }
    }
    report.finish();
}
