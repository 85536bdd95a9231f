//! `mha`: PyTorch's `nn.MultiheadAttention`, compared with the reference and the GPU.

use wgpu_attention::DType;
use wgpu_attention::reference::MultiHeadShape;
use wgpu_attention::reference::average_heads;
use wgpu_attention::reference::compare::compare;
use wgpu_attention::tuning::{Algorithm, MatrixUnits, Target};

use crate::harness::layer::{LayerCase, LayerLayout, LayerSetup, LinearData, Storage, run_layer_with};
use crate::harness::layer_options::LayerOptions;
use crate::harness::{Expected, HostData, Report, Rules, Vector, Weights, full, rest};

pub const FAMILY: &str = "mha";
pub const NAMES: &[&str] = &[
    "mha_bias_kv",
    "mha_bwd_cross",
    "mha_bwd_self",
    "mha_causal",
    "mha_cross",
    "mha_float_mask",
    "mha_kdim_vdim",
    "mha_key_mask",
    "mha_mask_and_key_mask",
    "mha_mask_per_head",
    "mha_masked_row_zero",
    "mha_one_head",
    "mha_per_head_weights",
    "mha_self",
    "mha_self_no_bias",
    "mha_seq_first",
    "mha_zero_attn",
];

/// One row of this vector sees no key. PyTorch gives NaN there if it returns weights. Here such a
/// query has weights and context of zero, so its output is the bias.
const DEAD_ROW: &str = "mha_mask_and_key_mask";

/// Exchanges two axes of `[a, b, features]`.
fn swapped<T: Copy>(x: &[T], [a, b, features]: [usize; 3]) -> Vec<T> {
    (0..b)
        .flat_map(|n| (0..a).flat_map(move |m| (0..features).map(move |f| x[(m * b + n) * features + f])))
        .collect()
}

pub fn case(name: &str) -> LayerCase {
    let vector = Vector::load(FAMILY, name);
    let heads = vector.size("num_heads");
    let mut config = LayerOptions::new(vector.size("embed_dim"), heads);
    config.key_features = vector.size("kdim");
    config.value_features = vector.size("vdim");
    config.add_zero_attn = vector.attrs["add_zero_attn"] == true;
    let length_first = vector.attrs["layout"] == "lbe";
    // Cases are [batch, length, features]. The layout `SeqFirst` places them with the length first.
    let sequence = |tensor: &str| {
        let [_, a, b, features] = vector.shape4(tensor);
        let x = vector.f32(tensor);
        if length_first { ([b, a], swapped(&x, [a, b, features])) } else { ([a, b], x) }
    };
    let ([batch, q_len], q) = sequence("q");
    let ([_, kv_len], k) = sequence("k");
    let (_, v) = sequence("v");
    let linear = |side: &str| LinearData {
        weight: vector.f32(&format!("w_{side}")),
        bias: vector.has(&format!("b_{side}")).then(|| vector.f32(&format!("b_{side}"))),
    };
    let mut out = vector.expected("out").map(|(want, tolerance)| {
        let shape = [q_len, batch, config.out_features];
        (if length_first { swapped(&want, shape) } else { want }, tolerance)
    });
    let mut weights = vector.expected("weights");
    if name == DEAD_ROW {
        let bias = vector.f64("b_o");
        for (n, x) in out.iter_mut().flat_map(|(want, _)| want).enumerate().filter(|(_, x)| x.is_nan()) {
            *x = bias[n % bias.len()];
        }
        weights.iter_mut().flat_map(|(want, _)| want).filter(|x| x.is_nan()).for_each(|x| *x = 0.0);
    }
    let known = out.iter().chain(&weights).flat_map(|(want, _)| want).all(|x| x.is_finite());
    assert!(known, "{name}: NaN in the vector");
    let (weights, mean_weights) =
        if vector.attrs["weights"] == "per_head" { (weights, None) } else { (None, weights) };
    LayerCase {
        name: name.to_string(),
        config,
        shape: MultiHeadShape { batch, q_len, kv_len },
        one_input: q == k && q == v,
        inputs: [q, k, v],
        linears: ["q", "k", "v", "o"].map(linear),
        shared: false,
        appended: vector.has("bias_k").then(|| ["bias_k", "bias_v"].map(|t| vector.f32(t))),
        norms: Default::default(),
        gate: None,
        rotary: None,
        rules: Rules {
            attn_mask: vector.has("mask").then(|| vector.bools("mask")),
            key_padding_mask: vector
                .has("key_mask")
                .then(|| HostData::new(vector.bools("key_mask").data, [batch, 1, 1, kv_len])),
            bias: vector.has("bias").then(|| vector.floats("bias")),
            ..Default::default()
        },
        dropout: None,
        expected: Expected { out, lse: None, weights, mean_weights },
    }
}

#[test]
fn reference_matches_vectors() {
    for case in NAMES.iter().map(|name| case(name)) {
        let got = case.exact();
        let weights = got.weights.expect("asked for");
        let means = average_heads(&weights, case.shape.batch, case.config.heads).expect("it fits");
        let expected = &case.expected;
        assert!(expected.out.is_some(), "{}: nothing to compare with", case.name);
        let all = [
            ("out", &got.out, &expected.out),
            ("weights", &weights, &expected.weights),
            ("mean weights", &means, &expected.mean_weights),
        ];
        for (what, got, expected) in all {
            if let Some((want, tolerance)) = expected {
                compare(got, want, *tolerance)
                    .unwrap_or_else(|e| panic!("{}: the reference's {what}: {e}", case.name));
            }
        }
    }
}

#[test]
fn every_device_matches_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("mha");
    NAMES.iter().for_each(|name| report.check_layer(&case(name)));
    report.finish();
}

/// The layer passes its choice on to its projections.
#[test]
fn matrix_units_match_vectors() {
    crate::harness::in_turn!();
    let case = case("mha_self");
    let on = |profile| LayerSetup {
        profile,
        form: Target::Auto,
        path: Algorithm::Auto,
        dtype: DType::F16,
        weight: DType::F16,
        bias: DType::F16,
        layout: LayerLayout::Dense,
        storage: Storage::Separate,
        lse: true,
        weights: Weights::None,
    };
    Report::on_matrix_units("mha on matrix units", |report, profile| {
        if !profile.compiles_fast() && !rest("mha on matrix units") {
            return;
        }
        let setup = on(profile);
        let stored = case.stored(&setup);
        let got = run_layer_with(&stored, &setup, |kernel_options| {
            kernel_options.matrix_units(MatrixUnits::Always)
        });
        report.record(&case.name, &setup, got.and_then(|got| stored.truth(&setup).out.judge(&got.out)));
    });
    // On a device without matrix units, `Always` is refused.
    let setup = on(full());
    let refused =
        run_layer_with(&case, &setup, |kernel_options| kernel_options.matrix_units(MatrixUnits::Always));
    assert!(refused.is_err_and(|why| why.contains("matrix units")), "refused by name");
}
