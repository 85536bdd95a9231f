//! Work that is split into several dispatches gives the bits of one dispatch.

use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{DType, Shape};

use crate::harness::run::run_with;
use crate::harness::{Case, DropoutData, FORMS, HostData, Layout, Report, Setup, Weights, profiles};

/// One workgroup per dispatch, few, many. The default runs each case in one dispatch.
const LIMITS: [u64; 5] = [0, 1, 10_000, 200_000, 3_000_000];

fn cases() -> Vec<Case> {
    let shape = |batch, heads, q_len, kv_len, value_dim| Shape {
        batch,
        heads,
        kv_heads: 2,
        q_len,
        kv_len,
        head_dim: 20,
        value_dim,
    };
    let case = |name: &str, shape| Case::random(format!("splitting, {name}"), shape);
    vec![
        case("short", shape(3, 4, 3, 9, 5)),
        case("long", shape(2, 4, 131, 67, 12)),
        case("causal", shape(1, 6, 70, 70, 64)).with(|c| c.rules.causal = true),
        // More channels than one workgroup computes.
        case("wide", shape(2, 4, 37, 33, 130)),
        case("wide causal", shape(2, 2, 65, 65, 65)).with(|c| {
            c.rules.causal = true;
            c.rules.sinks = Some(HostData::new(vec![0.5, -0.25], [1, 2, 1, 1]));
            c.dropout = Some(DropoutData::Seeded { p: 0.2, seed: 7 });
        }),
    ]
}

#[test]
fn split_work_gives_same_bits() {
    crate::harness::in_turn!();
    let mut report = Report::new("splitting");
    for (n, case) in cases().iter().enumerate() {
        for (profile, form) in profiles().into_iter().flat_map(|p| FORMS.map(|t| (p, t))) {
            let layout = if n % 2 == 0 { Layout::Blhd } else { Layout::Window(n as u64) };
            let (dtype, lse, weights) = (DType::F32, true, Weights::None);
            let setup =
                Setup { profile, form, path: Algorithm::Fused, dtype, bias: dtype, layout, lse, weights };
            report.check_in(case, &setup, &mut Default::default());
            let whole = run_with(case, &setup, |kernel_options| kernel_options).expect("a run");
            for limit in LIMITS {
                let pieces = run_with(case, &setup, |kernel_options| kernel_options.work_limit(limit));
                let same = |bits: Vec<u64>| {
                    if bits == whole.bits() { Ok(0.0) } else { Err(format!("other bits, limit {limit}")) }
                };
                report.record(&case.name, &setup, pieces.and_then(|got| same(got.bits())));
            }
        }
    }
    report.finish();
}
