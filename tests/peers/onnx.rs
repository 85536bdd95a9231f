//! `onnx`: the operator `Attention` of ONNX opset 23, from the ONNX backend suite.

use wgpu_attention::cache::{Append, CacheLayout, Tokens};
use wgpu_attention::reference::compare::compare;
use wgpu_attention::reference::split_heads;
use wgpu_attention::{
    Alignment, Attention, Cache, CacheConfig, Config, DType, Forward, KernelOptions, Scratch, Shape,
};

use crate::harness::run::{Placed, PlacedRules};
use crate::harness::{Case, FORMS, Layout, Place, Report, Values, Vector, Weights, profiles};
use crate::peers::sdpa::{check_reference, masked, plain};

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

/// `[batch, length, heads · dim]` as heads. The layout `Blhd` places it as in the vector.
fn from_3d(vector: &Vector) -> Case {
    let [_, batch, q_len, width] = vector.shape4("q");
    let kv_len = vector.shape4("k")[2];
    let (heads, kv_heads) = (vector.size("q_num_heads"), vector.size("kv_num_heads"));
    let (head_dim, value_dim) = (width / heads, vector.shape4("v")[3] / kv_heads);
    let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    let mut case = Case::random(&vector.name, shape);
    case.q = split_heads(&vector.f32("q"), q_len, heads, head_dim).expect("it fits");
    case.k = split_heads(&vector.f32("k"), kv_len, kv_heads, head_dim).expect("it fits");
    case.v = split_heads(&vector.f32("v"), kv_len, kv_heads, value_dim).expect("it fits");
    case.expected.out = vector.expected("out").map(|(want, tolerance)| {
        let heads = split_heads(&want, q_len, heads, value_dim).expect("it fits");
        (heads, tolerance)
    });
    case
}

/// The past rows, then the new rows: the operator's `present`.
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
    case.rules = masked(&vector, case.rules);
    case
}

#[test]
fn reference_matches_vectors() {
    NAMES.iter().for_each(|name| check_reference(&case(name)));
}

#[test]
fn every_device_matches_vectors() {
    let mut report = Report::new("onnx");
    NAMES.iter().for_each(|name| report.check(&case(name)));
    report.finish();
}

/// The cache appends past and new keys and values. It then holds the operator's `present`.
#[test]
fn cache_with_past_matches_vector() {
    crate::harness::in_turn!();
    let name = "onnx_attention_4d_with_past_and_present";
    let (vector, case) = (Vector::load(FAMILY, name), case(name));
    let shape = case.shape;
    let truth = case.truth(DType::F32, Weights::None);
    let (want, tolerance) = vector.expected("out").expect("an output");
    for profile in profiles() {
        for form in FORMS {
            for layout in [CacheLayout::Contiguous, CacheLayout::Paged { page: 16, pages: 4 }] {
                let gpu = &profile.gpu;
                let config = CacheConfig::new(shape.kv_heads, shape.head_dim, shape.kv_len)
                    .batch(shape.batch)
                    .value_dim(shape.value_dim)
                    .layout(layout);
                let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
                let config = Config::of(&shape).kernel_options(KernelOptions::new().target(form));
                let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
                let place = |x: &[f32], shape| {
                    Placed::input(profile, Values::Floats(x), DType::F32, Place::dense(shape))
                };
                let of = |name: &str| place(&vector.f32(name), vector.shape4(name));
                let q = place(&case.q, shape.q());
                let out = Placed::output(profile, DType::F32, Place::dense(shape.out()));
                let rules = PlacedRules::new(profile, &case.rules, DType::F32, Layout::Dense);
                let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("scratch");
                gpu.submit(|e| {
                    for [k, v] in [["past_k", "past_v"], ["k", "v"]] {
                        let (k, v) = (of(k), of(v));
                        cache.advance(e, Tokens::All(k.view().shape()[2]))?;
                        cache.append(e, 0, &Append::new(k.view(), v.view()))?;
                    }
                    // There are fewer queries than new keys.
                    let call = Forward::with_cache(q.view(), &cache, out.view()).at_end().mask(rules.mask());
                    attention.forward(e, &call, &mut scratch)
                })
                .expect("two steps");
                let got = pollster::block_on(out.download_async("out", profile)).expect("an output");
                let context = format!("{}, {form:?}, {layout:?}", profile.name);
                truth.out.judge(&got).unwrap_or_else(|e| panic!("{context}: {e}"));
                compare(&got, &want, tolerance).unwrap_or_else(|e| panic!("{context}, the vector: {e}"));
            }
        }
    }
}
