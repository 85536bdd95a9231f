//! The fused kernel on matrix units, in fragments of 8 × 8 and 16 × 16.

use wgpu_attention::Shape;

use crate::harness::{Case, Layout, Report, Setup, matrices};

#[test]
fn lengths() {
    let mut report = Report::new("matrix, lengths");
    for profile in matrices() {
        for q_len in [1, 15, 16, 17, 31, 33, 64, 65, 127, 130] {
            for kv_len in [1, 7, 16, 31, 32, 33, 65, 129] {
                let shape =
                    Shape { batch: 1, heads: 2, kv_heads: 1, q_len, kv_len, head_dim: 16, value_dim: 16 };
                let case = Case::random(format!("matrix {q_len} {kv_len}"), shape);
                let setup = Setup::matrix(profile, Layout::Dense);
                report.check_in(
                    &case.clone().with(|c| c.rules.causal = true),
                    &setup,
                    &mut Default::default(),
                );
                report.check_in(&case, &setup, &mut Default::default());
            }
        }
    }
    report.finish();
}
