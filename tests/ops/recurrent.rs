//! Recurrent attention: vectors, shapes, states, gradients, and what the forms have in common.

use wgpu_attention::DType;
use wgpu_attention::recurrent::Decay;
use wgpu_attention::reference::compare::compare;
use wgpu_attention::Shape;
use wgpu_attention::tuning::Target;

use crate::harness::device::{defaults, full};
use crate::harness::recurrent::{GRADIENTS, RecurrentCase, RecurrentSetup};
use crate::harness::{FORMS, Layout, Report, Vector, rest};

pub const FAMILY: &str = "delta";
pub const NAMES: &[&str] = &[
    "delta_gated",
    "delta_gated_decode",
    "delta_gated_f16",
    "delta_gated_l200_d64",
    "delta_gated_l2_grouped",
    "delta_gated_packed",
    "delta_gated_packed_chunks",
    "delta_gated_states",
    "delta_gated_strong",
    "delta_gla",
    "delta_kda",
    "delta_kda_l130_d32",
    "delta_plain",
    "delta_plain_negative",
    "delta_retnet",
    "delta_ssd_grouped",
];

fn plain(form: Target) -> RecurrentSetup {
    RecurrentSetup {
        profile: full(),
        form,
        dtype: DType::F32,
        gradient: DType::F32,
        layout: Layout::Dense,
        accumulates: false,
    }
}

/// Returns types and layouts on both targets, with gradients in the tensors' type or in f32, written
/// or added. Some of them always run.
fn setups(name: &str) -> Vec<RecurrentSetup> {
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let mut all = Vec::new();
    for (n, form) in FORMS.into_iter().enumerate() {
        let of = |profile, dtype, gradient, layout, accumulates| RecurrentSetup {
            profile,
            form,
            dtype,
            gradient,
            layout,
            accumulates,
        };
        let every = [
            of(defaults(), f32, f32, Layout::Window(7), false),
            of(full(), f16, f16, Layout::Window(4), true),
            of(full(), bf16, f32, Layout::Blhd, false),
            of(defaults(), bf16, bf16, Layout::Window(3), false),
            of(full(), f32, f32, Layout::Window(9), true),
        ];
        for (m, setup) in every.into_iter().enumerate() {
            if m == n || rest(&format!("{name}, {setup}")) {
                all.push(setup);
            }
        }
    }
    all
}

/// A shape of value heads and heads of queries and keys.
fn shape([batch, value_heads, heads, length, head_dim, value_dim]: [usize; 6]) -> Shape {
    Shape { batch, heads: value_heads, kv_heads: heads, q_len: length, kv_len: length, head_dim, value_dim }
}

fn from_vector(vector: &Vector) -> RecurrentCase {
    let [batch, heads, length, head_dim] = vector.shape4("q");
    let [_, value_heads, _, value_dim] = vector.shape4("v");
    let decays = match vector.attrs["decay"].as_str() {
        Some("none") => Decay::None,
        Some("channel") => Decay::PerChannel,
        _ => Decay::PerHead,
    };
    let delta = vector.attrs["delta"].as_bool().expect("a rule");
    let sizes = shape([batch, value_heads, heads, length, head_dim, value_dim]);
    let mut case = RecurrentCase::random(&vector.name, sizes, decays, delta);
    let given = |tensor: &str| if vector.has(tensor) { vector.f32(tensor) } else { Vec::new() };
    (case.q, case.k, case.v) = (vector.f32("q"), vector.f32("k"), vector.f32("v"));
    (case.decay, case.beta, case.initial) = (given("g"), given("beta"), given("initial_state"));
    (case.d_out, case.d_last) = (given("dout"), given("dfinal_state"));
    case.unit_eps = vector.attrs["l2norm"].as_bool().expect("a flag").then(|| vector.number("l2norm_eps")).flatten();
    case.scale = vector.number("scale");
    if vector.has("cu_seqlens") {
        case.starts = Some(vector.integers("cu_seqlens").into_iter().map(|n| n as u32).collect());
    }
    case
}

const D_NAMES: [&str; 6] = ["dq", "dk", "dv", "dg", "dbeta", "dinitial_state"];

#[test]
fn results_match_vectors() {
    let mut report = Report::new("recurrent attention, vectors");
    for name in NAMES {
        let vector = Vector::load(FAMILY, name);
        let case = from_vector(&vector);
        // The gradient of a decay is judged with that of k: see the schema.
        let against = |tensor: &str, got: &[f64]| {
            let (want, mut tolerance) = vector.expected(tensor).expect("in the vector");
            if tensor == "dg" {
                let (_, of_keys) = vector.expected("dk").expect("in the vector");
                tolerance.absolute = tolerance.absolute.max(of_keys.absolute);
            }
            compare(got, &want, tolerance).map_err(|e| format!("{tensor}, against the vector: {e}"))
        };
        let reference = case.reference::<f64>();
        against("out", &reference.out).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
        against("final_state", &reference.last).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
        let backward = !case.d_out.is_empty();
        if backward {
            let gradients = case.gradients::<f64>();
            for (tensor, got) in D_NAMES.into_iter().zip(&gradients).filter(|(t, _)| vector.has(t)) {
                against(tensor, got).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
            }
        }
        let dtype = if vector.is_f16("q") { DType::F16 } else { DType::F32 };
        for form in FORMS {
            let setup = RecurrentSetup { dtype, ..plain(form) };
            let judged = case.forward(&setup).and_then(|ran| {
                against("out", &ran.out)?;
                against("final_state", &ran.last)?;
                if !backward {
                    return Ok(ran.ratio);
                }
                let (ratio, gradients) = case.backward(&setup)?;
                for (tensor, got) in D_NAMES.into_iter().zip(&gradients).filter(|(t, _)| vector.has(t)) {
                    against(tensor, got)?;
                }
                Ok(ran.ratio.max(ratio))
            });
            report.record(name, &setup, judged);
        }
        for setup in setups(name) {
            let case = case.stored(setup.dtype, setup.gradient);
            let judged = case.forward(&setup).and_then(|ran| {
                if backward { Ok(ran.ratio.max(case.backward(&setup)?.0)) } else { Ok(ran.ratio) }
            });
            report.record(name, &setup, judged);
        }
    }
    report.finish();
    assert_eq!(GRADIENTS.len(), D_NAMES.len());
}
