//! `patterns`: attention patterns as dense masks, and by the builder's rules where it has them.

use wgpu_attention::Alignment;
use wgpu_attention::mask::block_map::big_bird;
use wgpu_attention::mask::{Pattern, PatternPart};

use crate::harness::{Case, HostData, Report, Vector};
use crate::peers::sdpa::{check_reference, plain};

pub const FAMILY: &str = "patterns";
pub const NAMES: &[&str] = &[
    "pattern_bigbird",
    "pattern_bwd_sliding",
    "pattern_exclude_self",
    "pattern_exclude_self_causal",
    "pattern_fixed",
    "pattern_fixed_heads",
    "pattern_longformer",
    "pattern_sliding",
    "pattern_strided",
    "pattern_strided_heads",
];

/// Returns the pattern as the dense mask in the vector.
pub fn dense(vector: &Vector) -> Case {
    plain(vector).with(|case| case.rules.attn_mask = Some(vector.bools("mask")))
}

/// Returns the numbers of an attribute.
fn list(value: &serde_json::Value) -> Vec<usize> {
    let numbers = value.as_array().expect("a list").iter();
    numbers.map(|n| n.as_u64().expect("a number") as usize).collect()
}

/// Returns the pattern as the builder's rules.
pub fn ruled(vector: &Vector) -> Case {
    let mut case = plain(vector);
    case.name += ", by rules";
    let kv_len = case.shape.kv_len;
    let rules = &mut case.rules;
    rules.alignment = Alignment::TopLeft;
    let kind = vector.attrs["kind"].as_str().expect("kind");
    let part = if kind.ends_with("heads") { PatternPart::ByHead } else { PatternPart::Both };
    match kind {
        "exclude_self" => rules.exclude_self = true,
        "exclude_self_causal" => (rules.exclude_self, rules.causal) = (true, true),
        "sliding" => rules.window = Some([vector.size("half_window"); 2]),
        "strided_merged" | "strided_heads" => {
            rules.causal = true;
            rules.pattern = Some(Pattern::Strided { stride: vector.size("stride"), part });
        }
        "fixed_merged" | "fixed_heads" => {
            rules.causal = true;
            let (stride, summary) = (vector.size("stride"), vector.size("c"));
            rules.pattern = Some(Pattern::Fixed { stride, summary, part });
        }
        "longformer" => {
            rules.window = Some([vector.size("half_window"); 2]);
            let global = list(&vector.attrs["global"]);
            rules.globals = Some(HostData::of([1, 1, 1, kv_len], |[.., j]| global.contains(&j)));
        }
        "bigbird" => {
            let block = vector.size("block");
            let n = kv_len / block;
            let random: Vec<_> =
                vector.attrs["random_blocks"].as_array().expect("rows").iter().map(list).collect();
            let globals: Vec<usize> = (0..vector.size("global_blocks")).collect();
            let map = big_bird(n, vector.size("window_blocks"), &globals, &random).expect("it fits");
            rules.blocks = Some((HostData::new(map, [1, 1, n, n]), [block; 2]));
        }
        other => panic!("{}: kind {other}", vector.name),
    }
    case
}

fn cases() -> impl Iterator<Item = Case> {
    NAMES.iter().map(|name| Vector::load(FAMILY, name)).flat_map(|v| [dense(&v), ruled(&v)])
}

#[test]
fn reference_matches_vectors() {
    cases().for_each(|case| check_reference(&case));
}

#[test]
fn every_device_matches_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("patterns");
    cases().for_each(|case| report.check(&case));
    report.finish();
    assert_eq!(cases().count(), 2 * NAMES.len(), "every vector is rules of the builder too");
}
