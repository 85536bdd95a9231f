//! `flex`: PyTorch's flex attention; score changes and block masks by the builder, or as tensors.

use wgpu_attention::{Alignment, Shape};

use crate::harness::{Case, Part, Report, Vector};
use crate::sdpa::{check_reference, plain};

pub const FAMILY: &str = "flex";
pub const NAMES: &[&str] = &[
    "flex_alibi",
    "flex_alibi_causal",
    "flex_bwd_softcap",
    "flex_causal",
    "flex_causal_gqa",
    "flex_dilated",
    "flex_document",
    "flex_document_causal",
    "flex_noop",
    "flex_prefix_lm",
    "flex_relative_table",
    "flex_sliding_window",
    "flex_softcap",
    "flex_softcap_causal",
];

fn case(name: &str) -> Case {
    let vector = Vector::load(FAMILY, name);
    let mut case = plain(&vector);
    let Shape { batch, heads, q_len, kv_len, .. } = case.shape;
    let rules = &mut case.rules;
    rules.alignment = Alignment::TopLeft;
    let kind = vector.attrs["kind"].as_str().expect("kind");
    // Every formula that ends in `causal` allows i ≥ j.
    rules.causal = kind.ends_with("causal");
    let keep_all_heads = |keep: &dyn Fn(usize, usize, usize) -> bool| {
        Some(Part::of([batch, 1, q_len, kv_len], |[b, _, i, j]| keep(b, i, j)))
    };
    match kind.trim_end_matches("_causal") {
        "noop" | "causal" => {}
        "softcap" => case.softcap = Some(vector.number("cap").expect("cap") as f32),
        "sliding" => rules.window = Some([vector.size("window"), kv_len]),
        "alibi" => {
            let slopes = vector.f32("slopes");
            let bias = |[_, h, i, j]: [usize; 4]| slopes[h] * (j as f32 - i as f32);
            rules.bias = Some(Part::of([1, heads, q_len, kv_len], bias));
        }
        "rel_bias" => {
            let table = vector.f32("table");
            let most = vector.size("max_dist") as i64;
            let bias = |[_, h, i, j]: [usize; 4]| {
                let distance = (i as i64 - j as i64).clamp(-most, most) + most;
                table[h * (2 * most as usize + 1) + distance as usize]
            };
            rules.bias = Some(Part::of([1, heads, q_len, kv_len], bias));
        }
        "document" => {
            let doc = vector.integers("doc_id");
            rules.keep = keep_all_heads(&|b, i, j| doc[b * q_len + i] == doc[b * q_len + j]);
        }
        "prefix_lm" => {
            let prefix = vector.integers("prefix");
            rules.keep = keep_all_heads(&|b, i, j| i >= j || j < prefix[b]);
        }
        "dilated" => {
            let (window, dilation) = (vector.size("window"), vector.size("dilation"));
            rules.keep = keep_all_heads(&|_, i, j| {
                i.abs_diff(j) <= window * dilation && i.abs_diff(j).is_multiple_of(dilation)
            });
        }
        other => panic!("{name}: kind {other}"),
    }
    case
}

#[test]
fn the_reference_gives_the_vectors() {
    NAMES.iter().for_each(|name| check_reference(&case(name)));
}

#[test]
fn every_device_gives_the_vectors() {
    let mut report = Report::new("flex");
    NAMES.iter().for_each(|name| report.check(&case(name)));
    report.finish();
}
