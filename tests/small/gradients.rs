//! Gradients on every target and in every type, with some parts of a mask.

use wgpu_attention::layers::OutputGate;
use wgpu_attention::reference::MultiHeadShape;
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, HostTensor, Shape, presets};

use super::Work;
use super::attention::{SHAPE, score_vector};
use super::masks::single;
use crate::harness::backward::BackwardSetup;
use crate::harness::gradients::{LayerProblem, Problem};
use crate::harness::layer::{LayerCase, LayerLayout, LayerSetup};
use crate::harness::layer_backward::LayerBackwardSetup;
use crate::harness::layer_options::LayerOptions;
use crate::harness::mods::{Capture, Text, pairs, readings, winding};
use crate::harness::{Case, DropoutData, FORMS, HostData, Layout, Profile, Rng};

pub fn cases(profile: &'static Profile) -> Vec<(String, Work)> {
    let mut all = Vec::new();
    let mut add = |what: &str, shape: Shape, setup: BackwardSetup, change: &dyn Fn(&mut Case)| {
        let BackwardSetup { form, dtype, layout, .. } = setup;
        let name = format!("gradients: {what}, {form:?}, {dtype:?}, {layout:?}");
        let problem = Problem::new(Case::random(name.clone(), shape).with(change), 0, true);
        all.push((name, Work::Gradients(Box::new(problem), setup)));
    };
    for (n, form) in FORMS.into_iter().enumerate() {
        let plain = BackwardSetup::plain(profile, form);
        let in_window = BackwardSetup { layout: Layout::Window(2 * n as u64 + 1), ..plain };
        let [f16, bf16] = [DType::F16, DType::BF16];
        add("grouped heads", SHAPE, plain, &|_| ());
        let added = BackwardSetup { layout: Layout::Blhd, dtype: f16, accumulates: true, ..plain };
        add("added to f32", SHAPE, added, &|_| ());
        let halves = BackwardSetup { dtype: [f16, bf16][n], gradient: [f16, bf16][n], ..in_window };
        add("halves", Shape { head_dim: 13, value_dim: 7, ..SHAPE }, halves, &|_| ());
        let keys = BackwardSetup { wanted: [false, true, false], ..plain };
        add("of keys alone, seeded dropout, softcap", SHAPE, keys, &|c| {
            c.softcap = Some(1.5);
            c.dropout = Some(DropoutData::Seeded { p: 0.25, seed: 11 });
        });
        let values = BackwardSetup { wanted: [false, false, true], ..plain };
        add("of values alone, causal", SHAPE, values, &|c| c.rules.causal = true);
        // The lse cannot represent these weights.
        let large = Shape { q_len: 9, ..SHAPE };
        add("large scores", large, plain, &|c| c.q.iter_mut().for_each(|x| *x *= 3000.0));
    }
    for form in FORMS {
        let plain = BackwardSetup::plain(profile, form);
        let accumulates = form == Target::Gpu;
        add("additive", SHAPE, BackwardSetup { accumulates, ..plain }, &|c| {
            c.score_vector = Some(score_vector(c));
            c.rules.causal = true;
        });
    }
    // Score functions, forward and backward.
    let plain = BackwardSetup::plain(profile, Target::Gpu);
    add("mods", SHAPE, plain, &|c| {
        let table = HostData::new(vec![0.5, -1.0, 0.25], [1, 1, 1, 3]);
        let shows = Text::new(
            "fn mask_mod(at: At) -> bool { return table_at(0u, 0u, 0u, (at.key + at.query) % 3u) > -0.5; }",
        );
        let shows = shows.captures("table", Capture::Float(table, DType::F32));
        c.rules.mask_mod = Some(pairs(shows, |at| (at.key + at.query) % 3 != 1));
        c.rules.score_mod = Some(winding());
    });
    // The image has more pixels than there are keys.
    let natten = presets::natten([9, 8], [5, 3], [1, 1]).expect("a mask");
    let table: Vec<f32> = (0..4 * 8).map(|n| (n % 7) as f32 * 0.3 - 1.0).collect();
    let t5 = presets::t5(HostTensor::new(&table, [1, 4, 1, 8]), 16, true).expect("a score function");
    for form in FORMS {
        let plain = BackwardSetup::plain(profile, form);
        let reads = BackwardSetup { added: [false, false, false, false, true], ..plain };
        let own = readings(Rng::named("what mods read").normals(28));
        add("what mods read", SHAPE, reads, &|c| c.rules.score_mod = Some(own.clone()));
        add("presets", SHAPE, plain, &|c| {
            c.rules.mask_mod = Some(natten.clone().into());
            c.rules.score_mod = Some(t5.clone().into());
        });
    }
    // `backward::masks` runs every part.
    for (n, (what, rules)) in
        single().into_iter().enumerate().filter(|(n, (what, _))| n % 4 == 0 || *what == "keep")
    {
        let form = FORMS[n / 4 % 2];
        add(what, SHAPE, BackwardSetup::plain(profile, form), &|c| c.rules = rules.clone());
    }
    all.extend(layers(profile));
    all
}

/// Layers with every option, in f32 and f16, with and without saved activations.
fn layers(profile: &'static Profile) -> Vec<(String, Work)> {
    let shape = MultiHeadShape { batch: 2, q_len: 9, kv_len: 14 };
    let cross = LayerOptions {
        kv_heads: 1,
        value_dim: 5,
        key_features: 17,
        value_features: 10,
        out_features: 7,
        add_zero_attn: true,
        ..LayerOptions::new(16, 2)
    };
    let narrow = LayerOptions { narrow: true, ..LayerOptions::new(16, 2) };
    let by_head = LayerOptions { output_gate: Some(OutputGate::Headwise), ..cross };
    let by_channel = LayerOptions { output_gate: Some(OutputGate::Elementwise), ..narrow };
    let kinds = [
        ("cross, appended keys", cross, DType::F32, LayerLayout::SeqFirst, true),
        ("narrow, added to", narrow, DType::F32, LayerLayout::Window(3), false),
        ("half floats", cross, DType::F16, LayerLayout::Dense, false),
        ("bf16", narrow, DType::BF16, LayerLayout::Dense, true),
        ("half floats, gated by head", by_head, DType::F16, LayerLayout::Window(3), false),
        ("bf16, gated by channel", by_channel, DType::BF16, LayerLayout::Dense, true),
    ];
    let of = |(n, (what, config, dtype, layout, keeps)): (usize, (&str, LayerOptions, _, _, bool))| {
        let name = format!("gradients of a layer: {what}");
        let mut case = LayerCase::random(name.clone(), config, shape, config.add_zero_attn);
        if let Some(gate) = config.output_gate {
            case = case.with_gate(gate);
        }
        case.rules.causal = true;
        case.rules.slopes = Some(HostData::new(vec![0.5, 0.25], [1, 2, 1, 1]));
        let plain = LayerBackwardSetup::plain(profile, FORMS[n % 2]);
        let layer = LayerSetup { dtype, weight: dtype, layout, ..plain.layer };
        let setup = LayerBackwardSetup { layer, accumulates: !keeps, keeps, ..plain };
        (name, Work::MultiHeadGradients(Box::new(LayerProblem::new(case, keeps)), setup))
    };
    kinds.into_iter().enumerate().map(of).collect()
}
