//! `sdpa`: PyTorch's scaled dot-product attention, compared with the reference and the GPU.

use wgpu_attention::Alignment;
use wgpu_attention::reference::compare::compare;

use crate::harness::{Case, DropoutData, Expected, Report, Rules, Vector};

pub const FAMILY: &str = "sdpa";
pub const NAMES: &[&str] = &[
    "sdpa_bool_mask",
    "sdpa_bwd_bias",
    "sdpa_bwd_causal",
    "sdpa_bwd_cross",
    "sdpa_bwd_gqa",
    "sdpa_bwd_mask",
    "sdpa_bwd_masked_rows",
    "sdpa_bwd_plain",
    "sdpa_causal",
    "sdpa_causal_bottom_right",
    "sdpa_causal_rect",
    "sdpa_cross",
    "sdpa_decode",
    "sdpa_dropout",
    "sdpa_dropout_bwd",
    "sdpa_dv",
    "sdpa_f16",
    "sdpa_float_bias",
    "sdpa_gqa",
    "sdpa_key_padding",
    "sdpa_large_logits",
    "sdpa_mask_and_bias",
    "sdpa_masked_rows",
    "sdpa_mqa",
    "sdpa_plain",
    "sdpa_scale",
    "sdpa_tile_edge",
    "sdpa_tiny",
];

/// The part of a `bhld` vector that all families share: q, k, v, scale and expected results.
pub fn plain(vector: &Vector) -> Case {
    let [batch, heads, q_len, head_dim] = vector.shape4("q");
    let [_, kv_heads, kv_len, _] = vector.shape4("k");
    let value_dim = vector.shape4("v")[3];
    let shape = wgpu_attention::Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    let mut case = Case::random(&vector.name, shape);
    (case.q, case.k, case.v) = (vector.f32("q"), vector.f32("k"), vector.f32("v"));
    // The default is exact in f64, but the vector's scale is rounded to f32.
    let default = 1.0 / (head_dim as f64).sqrt();
    case.scale = vector.number("scale").filter(|s| (s - default).abs() > 1e-9);
    case.expected = Expected {
        out: vector.expected("out"),
        lse: vector.expected("lse"),
        weights: vector.expected("weights"),
        mean_weights: None,
    };
    case
}

/// Checks that the reference in f64 gives the vector's results, by the vectors' pass rule.
pub fn check_reference(case: &Case) {
    let got = case.reference::<f64>();
    let weights = got.weights.as_ref().expect("asked for");
    let all = [
        ("out", &got.out, &case.expected.out),
        ("lse", &got.lse, &case.expected.lse),
        ("weights", weights, &case.expected.weights),
    ];
    assert!(case.expected.out.is_some(), "{}: nothing to compare with", case.name);
    for (what, got, expected) in all {
        if let Some((want, tolerance)) = expected {
            compare(got, want, *tolerance)
                .unwrap_or_else(|e| panic!("{}: the reference's {what}: {e}", case.name));
        }
    }
}

/// `rules` with the vector's dense mask and bias.
pub fn masked(vector: &Vector, rules: Rules) -> Rules {
    Rules {
        attn_mask: vector.has("mask").then(|| vector.bools("mask")),
        bias: vector.has("bias").then(|| vector.floats("bias")),
        ..rules
    }
}

pub fn case(name: &str) -> Case {
    let vector = Vector::load(FAMILY, name);
    let mut case = plain(&vector);
    match vector.attrs["causal"].as_str() {
        Some("top_left") => (case.rules.causal, case.rules.alignment) = (true, Alignment::TopLeft),
        Some("bottom_right") => case.rules.causal = true,
        Some(other) => panic!("{name}: causal {other}"),
        None => {}
    }
    case.rules = masked(&vector, case.rules);
    if vector.has("keep") {
        let p = vector.number("p").expect("p");
        case.dropout = Some(DropoutData::Given { p, keep: vector.bools("keep") });
    }
    case
}

#[test]
fn reference_matches_vectors() {
    NAMES.iter().for_each(|name| check_reference(&case(name)));
}

#[test]
fn every_device_matches_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("sdpa");
    NAMES.iter().for_each(|name| report.check(&case(name)));
    report.finish();
}
