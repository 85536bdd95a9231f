//! Whole layers: projection, attention, projection.

use wgpu_attention::DType;
use wgpu_attention::layers::OutputGate;
use wgpu_attention::reference::MultiHeadShape;
use wgpu_attention::tuning::Algorithm;

use super::Work;
use crate::harness::layer::{LayerCase, LayerLayout, LayerSetup, Storage};
use crate::harness::layer_options::LayerOptions;
use crate::harness::{FORMS, Profile, Rules, Weights};

pub struct SmallLayer {
    pub case: LayerCase,
    pub setup: LayerSetup,
}

pub fn cases(profile: &'static Profile) -> Vec<(String, Work)> {
    let shape = MultiHeadShape { batch: 2, q_len: 19, kv_len: 33 };
    let plain = LayerOptions::new(24, 3);
    let cross = LayerOptions {
        value_dim: 5,
        key_features: 17,
        value_features: 10,
        out_features: 21,
        add_zero_attn: true,
        ..plain
    };
    let narrow = LayerOptions { narrow: true, ..plain };
    let by_channel = LayerOptions { output_gate: Some(OutputGate::Elementwise), ..plain };
    let by_head = LayerOptions { output_gate: Some(OutputGate::Headwise), ..cross };
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let kinds = [
        ("plain", plain, f32, Storage::Separate, LayerLayout::Dense, Weights::None),
        (
            "mean weights",
            plain,
            f32,
            Storage::OneBuffer { gap: 3 },
            LayerLayout::Window(3),
            Weights::Mean(f32),
        ),
        ("cross, appended keys", cross, f32, Storage::Transposed, LayerLayout::SeqFirst, Weights::None),
        ("narrow", narrow, f32, Storage::Separate, LayerLayout::Dense, Weights::PerHead(f32)),
        ("half floats", plain, f16, Storage::OneBuffer { gap: 0 }, LayerLayout::Dense, Weights::None),
        ("bf16, cross", cross, bf16, Storage::OneBuffer { gap: 3 }, LayerLayout::Window(3), Weights::None),
        ("half floats, cross", cross, f16, Storage::Separate, LayerLayout::Dense, Weights::None),
        ("gated by channel", by_channel, f32, Storage::Separate, LayerLayout::Dense, Weights::None),
        (
            "half floats, gated by head",
            by_head,
            f16,
            Storage::Separate,
            LayerLayout::Window(3),
            Weights::None,
        ),
    ];
    let of =
        |(n, (what, config, dtype, storage, layout, weights)): (usize, (&str, LayerOptions, _, _, _, _))| {
            let name = format!("layer: {what}");
            let mut case = LayerCase::random(name.clone(), config, shape, config.add_zero_attn);
            case.rules = Rules { causal: n % 2 == 0, ..Default::default() };
            if let Some(gate) = config.output_gate {
                case = case.with_gate(gate);
            }
            let form = FORMS[n % 2];
            let (weight, bias, path, lse) = (dtype, dtype, Algorithm::Auto, n % 2 == 1);
            let setup =
                LayerSetup { profile, form, path, dtype, weight, bias, layout, storage, lse, weights };
            (name, Work::Layer(Box::new(SmallLayer { case, setup })))
        };
    kinds.into_iter().enumerate().map(of).collect()
}
