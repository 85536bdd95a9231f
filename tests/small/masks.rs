//! Every part of a mask on the fused path, and combinations of parts on the staged path.

use wgpu_attention::mask::block_map::state;
use wgpu_attention::mask::{Pattern, PatternPart};
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{Alignment, DType};

use super::Work;
use super::attention::{SHAPE, setup};
use crate::harness::{Case, DropoutData, FORMS, HostData, Layout, Profile, Rules, Setup, Weights};

/// Every part alone. If a part can hide all keys, some queries see none.
pub fn single() -> Vec<(&'static str, Rules)> {
    let [b, h, i, j] = SHAPE.weights();
    let none = Rules::default;
    let causal = Rules { causal: true, ..none() };
    let numbers = |data: &[u32], shape| Some(HostData::new(data.to_vec(), shape));
    let document = |[_, _, i, j]: [usize; 4]| (i + j) as u32 / 15;
    let quarter = |[_, h, _, n]: [usize; 4]| 0.25 * h as f32 - 0.5 * (n % 5) as f32;
    let strided = Pattern::Strided { stride: 9, part: PatternPart::ByHead };
    let bias = |[_, h, i, j]: [usize; 4]| match (i + 2 * j) % 7 {
        _ if i == 3 => f32::NEG_INFINITY,
        0 => f32::NEG_INFINITY,
        n => 0.25 * n as f32 - 0.5 * h as f32,
    };
    // Hidden, mixed and full blocks, with a mask that full blocks do not evaluate.
    let map = HostData::of([1, h, i.div_ceil(16), j.div_ceil(16)], |[_, h, m, n]| match (m + n + h) % 3 {
        0 => state::HIDDEN,
        1 => state::MIXED,
        _ => state::FULL,
    });
    let keep = |[.., i, j]: [usize; 4]| i != 5 && (i * 7 + j * 3) % 5 != 0;
    vec![
        ("causal, window", Rules { window: Some([20, 0]), ..causal.clone() }),
        ("no self", Rules { exclude_self: true, alignment: Alignment::TopLeft, ..causal.clone() }),
        ("strided", Rules { pattern: Some(strided), ..causal.clone() }),
        ("local", Rules { pattern: Some(Pattern::Local { block: 16 }), ..none() }),
        (
            "globals",
            Rules {
                window: Some([4, 4]),
                globals: Some(HostData::of([1, 1, 1, j], |[.., j]| j % 33 == 1)),
                ..none()
            },
        ),
        ("lengths", Rules { lengths: numbers(&[0, 41], [b, 1, 1, 1]), ..none() }),
        ("prefix", Rules { prefix: numbers(&[45, 3], [b, 1, 1, 1]), ..causal.clone() }),
        ("query offsets", Rules { query_offsets: numbers(&[2, 31], [b, 1, 1, 1]), ..causal.clone() }),
        (
            "packed",
            Rules {
                packed: numbers(&[0, 5, 5, 30, 36], [1, 1, 1, 5])
                    .zip(numbers(&[1, 7, 20, 66, 66], [1, 1, 1, 5]))
                    .map(Into::into),
                ..causal.clone()
            },
        ),
        (
            "documents",
            Rules {
                documents: Some([HostData::of([1, 1, i, 1], document), HostData::of([b, 1, 1, j], document)]),
                ..none()
            },
        ),
        ("keep", Rules { attn_mask: Some(HostData::of([b, 1, i, j], keep)), ..none() }),
        (
            "keys",
            Rules {
                key_padding_mask: Some(HostData::of([b, 1, 1, j], |[b, _, _, j]| j < 33 + 20 * b)),
                ..none()
            },
        ),
        (
            "tree",
            Rules {
                tree: Some(HostData::of([1, 1, i, i], |[.., i, j]| j == i || j < i && i % (j + 2) == 0)),
                ..none()
            },
        ),
        ("bias", Rules { bias: Some(HostData::of([1, h, i, j], bias)), ..none() }),
        ("alibi", Rules { slopes: Some(HostData::of([1, h, 1, 1], quarter)), ..causal.clone() }),
        (
            "symmetric alibi",
            Rules { slopes: Some(HostData::of([1, h, 1, 1], quarter)), symmetric: true, ..none() },
        ),
        ("relative", Rules { relative: Some(HostData::of([1, h, 1, 31], quarter)), ..none() }),
        ("sink_logits", Rules { sinks: Some(HostData::of([1, h, 1, 1], quarter)), ..causal }),
        (
            "blocks",
            Rules {
                blocks: Some((map, [16, 16])),
                attn_mask: Some(HostData::of([1, 1, i, j], keep)),
                ..none()
            },
        ),
    ]
}

pub fn cases(profile: &'static Profile) -> Vec<(String, Work)> {
    let single = single();
    let part = |name: &str| single.iter().find(|(n, _)| *n == name).expect("a mask of that name").1.clone();
    let mut all = Vec::new();
    let mut add = |what: &str, setup: Setup, rules: Rules, dropout: Option<DropoutData>| {
        let Setup { path, form, dtype, .. } = setup;
        let name = format!("{what}, {path:?}, {form:?}, {dtype:?}");
        let case = Case::random(name.clone(), SHAPE).with(|c| (c.rules, c.dropout) = (rules, dropout));
        all.push((name, Work::Attention(Box::new(case), setup, None)));
    };
    for (n, (name, rules)) in single.iter().enumerate() {
        // Some of the parts that run in f32 below also run in f16. Tensors added to scores have the
        // dtype of the inputs.
        let half = ["strided", "lengths", "keep", "bias", "relative", "blocks"].contains(name);
        let dtype = if half { DType::F16 } else { DType::F32 };
        let fused = setup(profile, Algorithm::Fused, FORMS[n % 2], dtype);
        add(name, Setup { bias: dtype, ..fused }, rules.clone(), None);
    }
    let staged = |n: usize| setup(profile, Algorithm::Staged, FORMS[n % 2], DType::F32);
    let weights = Weights::PerHead(DType::F32);
    let sums = Rules { bias: part("bias").bias, sinks: part("sink_logits").sinks, ..part("causal, window") };
    add("causal, window, bias, sinks", Setup { weights, ..staged(0) }, sums, None);
    let rules = Rules { slopes: part("alibi").slopes, ..part("packed") };
    let mean = Setup { weights: Weights::Mean(DType::F32), layout: Layout::Blhd, ..staged(1) };
    add("packed, alibi", mean, rules, None);
    let rules = Rules {
        key_padding_mask: part("keys").key_padding_mask,
        lengths: part("lengths").lengths,
        exclude_self: true,
        ..part("keep")
    };
    add("keep, keys, lengths, no self", Setup { layout: Layout::Window(9), ..staged(0) }, rules, None);
    let rules = Rules { relative: part("relative").relative, ..part("blocks") };
    add("blocks, relative, dropout", staged(1), rules, Some(DropoutData::Seeded { p: 0.5, seed: 3 }));
    let rules = Rules { globals: part("globals").globals, prefix: part("prefix").prefix, ..part("strided") };
    add("strided, globals, prefix", staged(0), rules, None);
    let rules = Rules { documents: part("documents").documents, ..part("tree") };
    add("tree, documents", staged(1), rules, None);
    all
}
