//! Norms of queries and keys inside `MultiHeadAttention`: reference, devices, gradients.

use wgpu_attention::layers::OutputGate;
use wgpu_attention::position::{RopeConfig, RowPositions};
use wgpu_attention::reference::compare::{compare, max_error};
use wgpu_attention::reference::{MultiHeadShape, widen};
use wgpu_attention::rows::NormConfig;

use crate::harness::gradients::LayerProblem;
use crate::harness::layer::{LayerCase, LinearData, NormData};
use crate::harness::layer_backward::{
    COUNT, LayerBackwardSetup, NAMES as GRADIENTS, run_layer_backward_async,
};
use crate::harness::layer_options::LayerOptions;
use crate::harness::rotary::RotaryData;
use crate::harness::{Expected, FORMS, Report, Rules, Vector, full};

pub const FAMILY: &str = "gates";
pub const NAMES: &[&str] = &["qk_norm_plain", "qk_norm_rope", "qk_norm_gate_rope_offset"];

/// Returns the layer of a vector. One vector also has a gate of the heads' outputs. `norm_offset`
/// is added to the stored weights of the norms.
fn vector(name: &str) -> (LayerCase, Vector) {
    let vector = Vector::load(FAMILY, name);
    let [_, batch, length, features] = vector.shape4("x");
    let offset = vector.number("norm_offset").expect("norm_offset") as f32;
    let norm = |tensor: &str| NormData {
        weight: Some(vector.f32(tensor).iter().map(|w| w + offset).collect()),
        bias: None,
    };
    let gated = vector.has("w_gate");
    let config = LayerOptions {
        kv_heads: vector.size("kv_heads"),
        head_dim: vector.size("head_dim"),
        value_dim: vector.size("head_dim"),
        scale: vector.number("scale"),
        qk_norm: Some(NormConfig::rms().eps(vector.number("eps").expect("eps"))),
        output_gate: gated.then_some(OutputGate::Elementwise),
        ..LayerOptions::new(features, vector.size("heads"))
    };
    let turned = vector.size("rotary_dim");
    let rope = || RopeConfig::new(turned).base(vector.number("base").expect("base"));
    let rotary = (turned > 0).then(|| RotaryData { rope: rope(), at: RowPositions::Start(0), tables: false });
    let x = vector.f32("x");
    assert_eq!(vector.attrs["causal"], "top_left");
    let case = LayerCase {
        name: name.into(),
        config,
        shape: MultiHeadShape { batch, q_len: length, kv_len: length },
        inputs: [x.clone(), x.clone(), x],
        one_input: true,
        linears: ["w_q", "w_k", "w_v", "w_o"].map(|t| LinearData { weight: vector.f32(t), bias: None }),
        shared: false,
        appended: None,
        norms: ["norm_q", "norm_k"].map(norm),
        gate: gated.then(|| LinearData { weight: vector.f32("w_gate"), bias: None }),
        rotary,
        rules: Rules { causal: true, ..Default::default() },
        dropout: None,
        expected: Expected { out: vector.expected("out"), ..Default::default() },
    };
    (case, vector)
}

#[test]
fn reference_matches_the_vectors() {
    for name in NAMES {
        let (case, vector) = vector(name);
        let (want, tolerance) = vector.expected("out").expect("an output");
        compare(&case.exact().out, &want, tolerance).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn devices_match_the_vectors() {
    let mut report = Report::new("norms of q and k, vectors");
    NAMES.iter().for_each(|name| report.check_layer(&vector(name).0));
    report.finish();
}

#[test]
fn gradients_match_the_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients of norms of q and k, vectors");
    for name in NAMES {
        let (case, vector) = vector(name);
        if !vector.has("dout") {
            continue;
        }
        let problem = LayerProblem { case, d_out: vector.f64("dout"), d_lse: None };
        for (form, keeps) in FORMS.into_iter().zip([true, false]) {
            let setup = LayerBackwardSetup { keeps, ..LayerBackwardSetup::plain(full(), form) };
            report.check_layer_backward(&problem, &setup);
            let got = pollster::block_on(run_layer_backward_async(&problem, &setup, |kernel_options| {
                kernel_options
            }));
            let got = got.expect("it ran for the report");
            let of = [
                ("d_query", "dx"),
                ("d_w_q", "dw_q"),
                ("d_w_k", "dw_k"),
                ("d_w_v", "dw_v"),
                ("d_w_o", "dw_o"),
                ("d_q_norm.weight", "dnorm_q"),
                ("d_k_norm.weight", "dnorm_k"),
                ("d_w_gate", "dw_gate"),
            ];
            for (own, theirs) in of.into_iter().filter(|(_, theirs)| vector.has(theirs)) {
                let n = GRADIENTS.iter().position(|name| *name == own).expect("a name");
                let (want, tolerance) = vector.expected(theirs).expect("a gradient");
                let got = got[n].as_ref().expect("it was wanted");
                compare(got, &want, tolerance).unwrap_or_else(|e| panic!("{name}: {own}: {e}"));
            }
        }
    }
    report.finish();
}

const SHAPE: MultiHeadShape = MultiHeadShape { batch: 2, q_len: 19, kv_len: 19 };

/// Both kinds of norms, with and without rotation, with grouped heads, narrow projections and
/// appended keys.
fn cases() -> Vec<LayerCase> {
    let options = LayerOptions { kv_heads: 2, head_dim: 8, value_dim: 5, ..LayerOptions::new(24, 4) };
    let rotary = |dim| {
        let rope = RopeConfig::new(dim).base(100.0);
        Some(RotaryData { rope, at: RowPositions::Start(3), tables: false })
    };
    let odd = LayerOptions { head_dim: 7, ..options };
    let kinds = [
        ("rms, rotary", NormConfig::rms(), options, rotary(8)),
        ("layer norm, partly rotary", NormConfig::layer(), options, rotary(4)),
        ("rms, appended keys", NormConfig::rms().eps(0.3), LayerOptions { add_zero_attn: true, ..odd }, None),
        (
            "rms, narrow",
            NormConfig::rms(),
            LayerOptions { narrow: true, softcap: Some(2.0), ..options },
            rotary(6),
        ),
    ];
    let case = |(n, (name, norm, options, rotary)): (usize, (&str, NormConfig, LayerOptions, _))| {
        let name = format!("norms of q and k: {name}");
        let case = LayerCase::random(name, options, SHAPE, options.add_zero_attn).with_norms(norm);
        let rules = Rules { causal: n % 2 == 0, ..Default::default() };
        LayerCase { rotary, rules, ..case }
    };
    kinds.into_iter().enumerate().map(case).collect()
}

/// Computes each stage separately: the norm comes before the rotation.
#[test]
fn reference_equals_its_stages() {
    for case in cases() {
        let staged = |norm_first: bool| {
            case.staged(|n, y, [heads, length, dim]| {
                let config = case.config.qk_norm.as_ref().expect("every case has norms");
                let norm = |y: Vec<f64>| case.norms[n].normed(&y, dim, config);
                let turn = |y: Vec<f64>| match &case.rotary {
                    Some(rotary) => rotary.turned(&y, [heads, length, dim], false),
                    None => y,
                };
                if norm_first { turn(norm(y)) } else { norm(turn(y)) }
            })
        };
        let got = case.exact().out;
        assert!(max_error(&got, &staged(true)) < 1e-12, "{}", case.name);
        if case.rotary.is_some() {
            assert!(max_error(&got, &staged(false)) > 1e-3, "{}: the order makes no difference", case.name);
        }
    }
}

#[test]
fn devices_match_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("norms of q and k");
    cases().iter().for_each(|case| report.check_layer(case));
    report.finish();
}

#[test]
fn gradients_match_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients of norms of q and k");
    // All gradients; the norms' alone; all except the norms'.
    let of_norms = GRADIENTS.map(|name| name.contains("norm"));
    report.check_layer_gradients(cases(), &[[true; COUNT], of_norms, of_norms.map(|is| !is)]);
    report.finish();
}

#[test]
fn slices_are_normalised_too() {
    for case in cases() {
        let weights = case.wide_weights::<f32>();
        let inputs = case.inputs.each_ref().map(|x| &x[..]);
        let options = case.options().weights(false);
        let got = full().gpu.multi_head(inputs, SHAPE, &case.config.config(), &weights.host(), &options);
        let off = max_error(&widen::<f64>(&got.expect("an answer").out), &case.exact().out);
        assert!(off < 1e-4, "{}: {off}", case.name);
    }
}
