//! `patterns`: attention patterns as dense masks, and by the builder's own rules where it has them.

use wgpu_attention::Alignment;

use crate::harness::{Case, Report, Vector};
use crate::sdpa::{check_reference, plain};

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

/// The pattern as the dense mask that the vector holds.
fn dense(vector: &Vector) -> Case {
    plain(vector).with(|case| case.rules.keep = Some(vector.bools("mask")))
}

/// The pattern as the builder's rules.
fn ruled(vector: &Vector) -> Option<Case> {
    let mut case = plain(vector);
    case.name += ", by rules";
    let rules = &mut case.rules;
    rules.alignment = Alignment::TopLeft;
    match vector.attrs["kind"].as_str() {
        Some("exclude_self") => rules.exclude_self = true,
        Some("exclude_self_causal") => (rules.exclude_self, rules.causal) = (true, true),
        Some("sliding") => rules.window = Some([vector.size("half_window"); 2]),
        _ => return None,
    }
    Some(case)
}

fn cases() -> impl Iterator<Item = Case> {
    NAMES.iter().map(|name| Vector::load(FAMILY, name)).flat_map(|v| [Some(dense(&v)), ruled(&v)]).flatten()
}

#[test]
fn the_reference_gives_the_vectors() {
    cases().for_each(|case| check_reference(&case));
}

#[test]
fn every_device_gives_the_vectors() {
    let mut report = Report::new("patterns");
    cases().for_each(|case| report.check(&case));
    report.finish();
    assert_eq!(cases().count(), NAMES.len() + 4, "four vectors are rules of the builder too");
}
