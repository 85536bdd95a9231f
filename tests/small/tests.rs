//! The table of small cases on the machine's adapter.

use std::collections::HashSet;

use wgpu_attention::DType;
use wgpu_attention::tuning::Algorithm;

use super::{Small, Work, masks, one_buffer, table};
use crate::harness::device::device;
use crate::harness::{Profile, Report, defaults, due, full};

/// Cases that always run on the device with all features, because only slow tests run their kernels
/// besides (docs/notebook/coverage.md). Every mask on the fused path always runs, too.
const ALWAYS: [&str; 13] = [
    "attentional vector",
    "bf16, Staged, Software, BF16, Window(3)",
    "cache: contiguous, BF16 with a Walsh-Hadamard product, bf16 tensors",
    "gradients: keep, Gpu, F32, Dense",
    "indexer",
    "indexer, thousands of keys",
    "linear attention, packed random features",
    "linear attention, packed sequences",
    "lsh attention",
    "means of rows",
    "merge",
    "quantised products, many rows",
    "thousands of largest",
];

fn all(name: &'static str, profile: &'static Profile, of: fn(&Work) -> bool) {
    let mut report = Report::new(name);
    let single: Vec<_> = masks::single().iter().map(|(mask, _)| format!("{mask}, Fused")).collect();
    let is_mask = |name: &str| single.iter().any(|mask| name.starts_with(mask));
    let always = |case: &Small| {
        profile.name == "full" && (ALWAYS.contains(&case.name.as_str()) || is_mask(&case.name))
    };
    let due = |case: &&Small| of(&case.work) && (always(case) || due(&case.name));
    for case in table(profile).iter().filter(due) {
        pollster::block_on(case.run(&mut report));
    }
    report.finish();
}

#[test]
fn attention() {
    all("small, attention", full(), |work| matches!(work, Work::Attention(..)));
}

#[test]
fn attention_by_defaults() {
    all("small, attention by defaults", defaults(), |work| matches!(work, Work::Attention(..)));
}

#[test]
fn gradients() {
    all("small, gradients", full(), |work| {
        matches!(work, Work::Gradients(..) | Work::MultiHeadGradients(..))
    });
}

#[test]
fn caches() {
    all("small, caches", full(), |work| matches!(work, Work::Cache(..)));
}

#[test]
fn layers_and_others() {
    all("small, layers and others", full(), |work| match work {
        Work::Layer(..) => true,
        Work::Other(other) => !other.is_of_models(),
        _ => false,
    });
}

#[test]
fn parts_of_models() {
    all("small, parts of models", full(), |work| matches!(work, Work::Other(other) if other.is_of_models()));
}

#[test]
fn others_by_defaults() {
    all("small, others by defaults", defaults(), |work| !matches!(work, Work::Attention(..)));
}

/// A device with a limit of one workgroup per axis splits every grid into all its parts.
/// `errors::calls` tests attention.
#[test]
fn grids_in_parts() {
    let gpu = device(|limits| limits.max_compute_workgroups_per_dimension = 1);
    let profile = Box::leak(Box::new(Profile { name: "one workgroup", gpu, matrix: false }));
    all("small, grids in parts", profile, |work| !matches!(work, Work::Attention(..)));
}

#[test]
fn case_names_are_unique() {
    let names: Vec<_> = table(full()).into_iter().map(|case| case.name).collect();
    assert!(ALWAYS.iter().all(|name| names.iter().any(|other| other == name)), "{names:?}");
    assert_eq!(names.len(), names.iter().collect::<HashSet<_>>().len(), "{names:?}");
}

#[test]
fn one_buffer_gives_same_bits() {
    for profile in [full(), defaults()] {
        for (path, dtype) in
            [(Algorithm::Fused, DType::F32), (Algorithm::Staged, DType::F32), (Algorithm::Fused, DType::BF16)]
        {
            let same = pollster::block_on(one_buffer::same_bits(profile, path, dtype));
            assert_eq!(same, Ok(0.0), "{path:?}, {dtype:?}");
        }
    }
}
