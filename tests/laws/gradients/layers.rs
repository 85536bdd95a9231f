//! A layer's gradients, compared with differences.

use wgpu_attention::layers::OutputGate;
use wgpu_attention::reference::MultiHeadShape;
use wgpu_attention::rows::NormConfig;

use super::attention::{dropout, smooth};
use crate::harness::Rng;
use crate::harness::gradients::{Compared, LayerProblem};
use crate::harness::layer::LayerCase;
use crate::harness::layer_options::LayerOptions;
use crate::laws::property::MaskDraw;

fn random(seed: u64) -> LayerProblem {
    let rng = &mut Rng::new(seed ^ 0x1a7e6);
    let kv_heads = rng.between(1, 2);
    let heads = kv_heads * rng.between(1, 2);
    let narrow = rng.chance(0.35);
    let mut features = |heads: usize| if narrow { heads * rng.between(1, 3) } else { rng.between(1, 5) };
    let [query_features, key_features, value_features] = [heads, kv_heads, kv_heads].map(&mut features);
    let config = LayerOptions {
        kv_heads,
        head_dim: rng.between(1, 3),
        value_dim: rng.between(1, 3),
        query_features,
        key_features,
        value_features,
        out_features: rng.between(1, 4),
        narrow,
        add_zero_attn: rng.chance(0.3),
        scale: rng.chance(0.2).then_some(0.5),
        softcap: rng.chance(0.2).then_some(1.25),
        ..LayerOptions::new(heads, heads)
    };
    let shape =
        MultiHeadShape { batch: rng.between(1, 2), q_len: rng.between(1, 4), kv_len: rng.between(1, 5) };
    let mut case = LayerCase::random(format!("gradients, layer {seed}"), config, shape, rng.chance(0.4));
    for linear in &mut case.linears {
        linear.bias = linear.bias.take().filter(|_| rng.chance(0.7));
    }
    let attention = case.attention();
    case.rules = MaskDraw::random(rng, shape.kv_len).rules(rng, &attention, case.appended_len());
    smooth(&mut case.rules);
    case.dropout = rng.chance(0.3).then(|| dropout(rng, rng.clone().chance(0.5), attention.weights()));
    let d_lse = rng.chance(0.5);
    let rng = &mut Rng::new(seed ^ 0x9b42);
    if rng.chance(0.4) {
        let norm = rng.pick(&[NormConfig::rms(), NormConfig::layer()]);
        case = case.with_norms(norm.eps(0.1));
    }
    let rng = &mut Rng::new(seed ^ 0x6a7e);
    if rng.chance(0.4) {
        case = case.with_gate(rng.pick(&[OutputGate::Elementwise, OutputGate::Headwise]));
        case.gate.iter_mut().for_each(|gate| gate.bias = gate.bias.take().filter(|_| rng.chance(0.7)));
    }
    LayerProblem::new(case, d_lse)
}

#[test]
fn random_layer_gradients_match_differences() {
    let mut compared = Compared::new();
    (0..600).for_each(|seed| random(seed).check(3, &mut compared));
    let inputs = ["query", "key", "value", "w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o"];
    let norms = ["q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"];
    for name in inputs
        .into_iter()
        .chain(norms)
        .chain(["w_gate", "b_gate"])
        .chain(["bias_k", "bias_v", "bias", "slopes", "relative", "sinks"])
    {
        assert!(compared.get(name).is_some_and(|n| *n >= 20), "{name}: {compared:?}");
    }
}
