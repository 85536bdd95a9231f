//! `flex`: PyTorch's flex attention, with score changes and block masks by the builder, or as
//! tensors.

use wgpu_attention::mask::Pattern;
use wgpu_attention::{Alignment, Shape};

use crate::harness::{Case, HostData, Report, Vector};
use crate::peers::sdpa::{check_reference, plain};

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

pub fn case(name: &str) -> Case {
    let vector = Vector::load(FAMILY, name);
    let mut case = plain(&vector);
    let Shape { batch, heads, q_len, kv_len, .. } = case.shape;
    let rules = &mut case.rules;
    rules.alignment = Alignment::TopLeft;
    let kind = vector.attrs["kind"].as_str().expect("kind");
    // Every formula that ends in `causal` allows i ≥ j.
    rules.causal = kind.ends_with("causal");
    let keep_all_heads = |keep: &dyn Fn(usize, usize, usize) -> bool| {
        Some(HostData::of([batch, 1, q_len, kv_len], |[b, _, i, j]| keep(b, i, j)))
    };
    match kind.trim_end_matches("_causal") {
        "noop" | "causal" => {}
        "softcap" => case.softcap = vector.number("cap"),
        "sliding" => rules.window = Some([vector.size("window"), kv_len]),
        "alibi" => {
            let slopes = vector.f32("slopes");
            let bias = |[_, h, i, j]: [usize; 4]| slopes[h] * (j as f32 - i as f32);
            rules.bias = Some(HostData::of([1, heads, q_len, kv_len], bias));
        }
        "rel_bias" => {
            let table = vector.f32("table");
            let most = vector.size("max_dist") as i64;
            let bias = |[_, h, i, j]: [usize; 4]| {
                let distance = (i as i64 - j as i64).clamp(-most, most) + most;
                table[h * (2 * most as usize + 1) + distance as usize]
            };
            rules.bias = Some(HostData::of([1, heads, q_len, kv_len], bias));
        }
        "document" => {
            let doc = vector.integers("doc_id");
            rules.attn_mask = keep_all_heads(&|b, i, j| doc[b * q_len + i] == doc[b * q_len + j]);
        }
        "prefix_lm" => {
            let prefix = vector.integers("prefix");
            rules.attn_mask = keep_all_heads(&|b, i, j| i >= j || j < prefix[b]);
        }
        "dilated" => {
            let (window, dilation) = (vector.size("window"), vector.size("dilation"));
            rules.attn_mask = keep_all_heads(&|_, i, j| {
                i.abs_diff(j) <= window * dilation && i.abs_diff(j).is_multiple_of(dilation)
            });
        }
        other => panic!("{name}: kind {other}"),
    }
    case
}

/// Returns the same case by the builder's rules, where `case` needs dense tensors.
fn ruled(name: &str) -> Option<Case> {
    let vector = Vector::load(FAMILY, name);
    let mut case = plain(&vector);
    case.name += ", by rules";
    let Shape { batch, heads, q_len, kv_len, .. } = case.shape;
    let rules = &mut case.rules;
    rules.alignment = Alignment::TopLeft;
    let kind = vector.attrs["kind"].as_str().expect("kind");
    rules.causal = kind.ends_with("causal");
    let numbers = |tensor| vector.integers(tensor).into_iter().map(|n| n as u32).collect::<Vec<_>>();
    match kind.trim_end_matches("_causal") {
        "alibi" => rules.slopes = Some(HostData::new(vector.f32("slopes"), [1, heads, 1, 1])),
        "rel_bias" => {
            // The vector counts distances from the key, the builder from the query.
            let distances = 2 * vector.size("max_dist") + 1;
            let table = vector.f32("table");
            let reversed = table.chunks_exact(distances).flat_map(|row| row.iter().rev().copied()).collect();
            rules.relative = Some(HostData::new(reversed, [1, heads, 1, distances]));
        }
        "document" => {
            let (queries, keys) = ([batch, 1, q_len, 1], [batch, 1, 1, kv_len]);
            rules.documents = Some([queries, keys].map(|shape| HostData::new(numbers("doc_id"), shape)));
        }
        "prefix_lm" => {
            rules.causal = true;
            rules.prefix = Some(HostData::new(numbers("prefix"), [batch, 1, 1, 1]));
        }
        "dilated" => {
            let dilation = vector.size("dilation");
            rules.window = Some([vector.size("window") * dilation; 2]);
            rules.pattern = Some(Pattern::Dilated { dilation });
        }
        _ => return None,
    }
    Some(case)
}

/// Adjacent documents are packed sequences too.
fn packed(name: &str) -> Option<Case> {
    let vector = Vector::load(FAMILY, name);
    let mut case = ruled(name).filter(|case| case.rules.documents.is_some())?;
    case.name += ", packed";
    let documents = vector.attrs["docs"].as_array().expect("a list per batch entry");
    let lengths = |list: &serde_json::Value| list.as_array().expect("lengths").clone();
    let most = documents.iter().map(|list| lengths(list).len()).max().expect("documents");
    let starts = documents.iter().flat_map(|list| {
        // A batch entry with fewer documents has empty ones at the end.
        let lengths = lengths(list).into_iter().map(|n| n.as_u64().expect("a length") as u32);
        let ends = lengths.chain(std::iter::repeat(0)).take(most);
        std::iter::once(0)
            .chain(ends)
            .scan(0, |at, n| {
                *at += n;
                Some(*at)
            })
            .collect::<Vec<u32>>()
    });
    let starts: Vec<_> = starts.collect();
    let shape = [documents.len(), 1, 1, most + 1];
    case.rules.documents = None;
    case.rules.packed = Some([(); 2].map(|()| HostData::new(starts.clone(), shape)));
    Some(case)
}

fn cases() -> impl Iterator<Item = Case> {
    NAMES.iter().flat_map(|name| [Some(case(name)), ruled(name), packed(name)]).flatten()
}

#[test]
fn reference_matches_vectors() {
    cases().for_each(|case| check_reference(&case));
}

#[test]
fn every_device_matches_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("flex");
    cases().for_each(|case| report.check(&case));
    report.finish();
    assert_eq!(cases().count(), NAMES.len() + 7 + 2, "seven are rules of the builder too, two packed");
}
