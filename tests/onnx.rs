//! `onnx`: the operator `Attention` of ONNX opset 23, from the ONNX backend suite.

use wgpu_attention::reference::split_heads;
use wgpu_attention::{Alignment, Shape};

use crate::harness::{Case, Report, Vector};
use crate::sdpa::{check_reference, plain};

pub const FAMILY: &str = "onnx";
pub const NAMES: &[&str] = &[
    "onnx_attention_3d",
    "onnx_attention_4d",
    "onnx_attention_4d_attn_mask",
    "onnx_attention_4d_attn_mask_bool",
    "onnx_attention_4d_causal",
    "onnx_attention_4d_gqa",
    "onnx_attention_4d_scaled",
    "onnx_attention_4d_with_past_and_present",
];

/// `[batch, length, heads · dim]` as heads; the layout `Blhd` lays it out as the vector has it.
fn from_3d(vector: &Vector) -> Case {
    let [_, batch, q_len, width] = vector.shape4("q");
    let kv_len = vector.shape4("k")[2];
    let (heads, kv_heads) = (vector.size("q_num_heads"), vector.size("kv_num_heads"));
    let (head_dim, value_dim) = (width / heads, vector.shape4("v")[3] / kv_heads);
    let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    let mut case = Case::random(&vector.name, shape);
    case.q = split_heads(&vector.f32("q"), q_len, heads, head_dim);
    case.k = split_heads(&vector.f32("k"), kv_len, kv_heads, head_dim);
    case.v = split_heads(&vector.f32("v"), kv_len, kv_heads, value_dim);
    case.expected.out = vector.expected("out").map(|(want, tolerance)| {
        let heads = split_heads(&want, q_len, heads, value_dim);
        (heads, tolerance)
    });
    case
}

/// The past's rows before the new ones: what the operator calls `present`.
fn joined(vector: &Vector, past: &str, new: &str) -> Vec<f32> {
    let ([.., rows, dim], [.., more, _]) = (vector.shape4(past), vector.shape4(new));
    let (past, new) = (vector.f32(past), vector.f32(new));
    past.chunks_exact(rows * dim)
        .zip(new.chunks_exact(more * dim))
        .flat_map(|(p, n)| [p, n].concat())
        .collect()
}

fn case(name: &str) -> Case {
    let vector = Vector::load(FAMILY, name);
    let mut case = if vector.shape("q").len() == 3 { from_3d(&vector) } else { plain(&vector) };
    if vector.has("past_k") {
        (case.k, case.v) = (joined(&vector, "past_k", "k"), joined(&vector, "past_v", "v"));
        assert_eq!((&case.k, &case.v), (&vector.f32("present_k"), &vector.f32("present_v")));
        case.shape.kv_len += vector.shape4("past_k")[2];
    }
    if vector.number("is_causal") == Some(1.0) {
        (case.rules.causal, case.rules.alignment) = (true, Alignment::TopLeft);
    }
    if vector.has("mask") {
        case.rules.keep = Some(vector.bools("mask"));
    }
    if vector.has("bias") {
        case.rules.bias = Some(vector.floats("bias"));
    }
    case
}

#[test]
fn the_reference_gives_the_vectors() {
    NAMES.iter().for_each(|name| check_reference(&case(name)));
}

#[test]
fn every_device_gives_the_vectors() {
    let mut report = Report::new("onnx");
    NAMES.iter().for_each(|name| report.check(&case(name)));
    report.finish();
}
