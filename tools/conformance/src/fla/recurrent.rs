//! Operators with a state of constant size.

use wgpu_attention::linear_attention::{
    FeatureMap, LinearAttention, LinearBackward, LinearConfig, LinearForward,
};
use wgpu_attention::recurrent::{
    Decay, RecurrentAttention, RecurrentBackward, RecurrentConfig, RecurrentForward,
};
use wgpu_attention::{DType, Gpu, Scratch};

use super::{Rows, computed, dense, dense_output, starts};
use crate::case::Case;
use crate::outcome::{Failed, Ran, float};
use crate::tensor::Placed;

/// RetNet's logarithmic decays, `[1, heads, 1, 1]`.
fn retention_decay(gpu: &Gpu, heads: usize) -> Result<Placed, Failed> {
    let decays: Vec<f64> = (0..heads).map(|h| (-(-5.0 - h as f64).exp2()).ln_1p()).collect();
    Ok(Placed::new(gpu, &decays, DType::F32, [1, heads, 1, 1])?)
}

pub fn recurrent(gpu: &Gpu, case: &Case) -> Ran {
    let [q, k, v, d_out] = ["q", "k", "v", "d_o"].map(|name| Rows::input(gpu, case, name));
    let (q, k, v, d_out) = (q?, k?, v?, d_out?);
    let [g, beta] = ["g", "beta"].map(|name| Rows::optional(gpu, case, name));
    let (g, beta) = (g?, beta?);
    let [h0, d_ht] = ["h0", "d_ht"].map(|name| dense(gpu, case, name));
    let (h0, d_ht) = (h0?, d_ht?);
    let starts = starts(gpu, case)?;
    let heads = v.shape[1];
    let constant = (case.operator == "retention").then(|| retention_decay(gpu, heads)).transpose()?;
    let decay = match &g {
        None if constant.is_none() => Decay::None,
        Some(g) if g.shape[3] > 1 => Decay::PerChannel,
        _ => Decay::PerHead,
    };
    let config = RecurrentConfig::new(q.shape[1], q.shape[3])
        .value_heads(heads)
        .value_dim(v.shape[3])
        .dtype(float(case.input("q")?)?)
        .decay(decay)
        .delta(beta.is_some())
        .scale(case.number("scale"))
        .normalize_qk(beta.is_some().then_some(1e-6));
    let attention = RecurrentAttention::with_pipelines(gpu.pipelines(), config)?;

    let names = ["o", "d_q", "d_k", "d_v", "d_g", "d_beta"];
    let [out, d_q, d_k, d_v, d_g, d_beta] = names.map(|name| Rows::output(gpu, case, name));
    let [d_q, d_k, d_v, d_g, d_beta] = [d_q?, d_k?, d_v?, d_g?, d_beta?];
    let out = out?.ok_or_else(|| Failed("no output o".into()))?;
    let [ht, d_h0] = ["ht", "d_h0"].map(|name| dense_output(gpu, case, name));
    let (ht, d_h0) = (ht?, d_h0?);
    let call = RecurrentForward::new(q.view(), k.view(), v.view(), out.view())
        .decay(g.as_ref().map(Rows::view).or(constant.as_ref().map(Placed::view)))
        .beta(beta.as_ref().map(Rows::view))
        .packed(starts.as_ref().map(Placed::view))
        .initial_state(h0.as_ref().map(Placed::view))
        .final_state(ht.as_ref().map(Placed::view));
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|e| attention.forward(e, &call, &mut scratch))?;
    let call = RecurrentBackward::new(call, d_out.view())
        .d_final_state(d_ht.as_ref().map(Placed::view))
        .d_q(d_q.as_ref().map(Rows::view))
        .d_k(d_k.as_ref().map(Rows::view))
        .d_v(d_v.as_ref().map(Rows::view))
        .d_decay(d_g.as_ref().map(Rows::view))
        .d_beta(d_beta.as_ref().map(Rows::view))
        .d_initial_state(d_h0.as_ref().map(Placed::view));
    let mut scratch = Scratch::new(gpu.device(), attention.backward_scratch_size(&call)?)?;
    gpu.submit(|e| attention.backward(e, &call, &mut scratch))?;
    let rows = [("d_q", &d_q), ("d_k", &d_k), ("d_v", &d_v), ("d_g", &d_g), ("d_beta", &d_beta)];
    let [q, k, v, g, beta] = rows.map(|(name, rows)| (name, rows.as_ref().map(|rows| &rows.placed)));
    computed(gpu, [("o", Some(&out.placed)), ("ht", ht.as_ref()), ("d_h0", d_h0.as_ref()), q, k, v, g, beta])
}

/// Causal linear attention whose results are divided by the norm.
pub fn normalised(gpu: &Gpu, case: &Case) -> Ran {
    let [q, k, v, d_out] = ["q", "k", "v", "d_o"].map(|name| Rows::input(gpu, case, name));
    let (q, k, v, d_out) = (q?, k?, v?, d_out?);
    let [out, d_q, d_k, d_v] = ["o", "d_q", "d_k", "d_v"].map(|name| Rows::output(gpu, case, name));
    let none = || Failed("an output is missing".into());
    let [out, d_q, d_k, d_v] = [out?, d_q?, d_k?, d_v?].map(|rows| rows.ok_or_else(none));
    let (out, d_q, d_k, d_v) = (out?, d_q?, d_k?, d_v?);
    let [_, heads, _, dim] = q.shape;
    // The package divides by `scale · norm + 1e-10`, after it multiplies by `scale`.
    let config = LinearConfig::new(heads, dim)
        .feature_map(FeatureMap::Identity)
        .causal(true)
        .eps(1e-10 * (dim as f64).sqrt());
    let attention = LinearAttention::with_pipelines(gpu.pipelines(), config)?;
    let call = LinearForward::new(q.view(), k.view(), v.view(), out.view());
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|e| attention.forward(e, &call, &mut scratch))?;
    let call = LinearBackward::new(call, d_out.view()).d_q(d_q.view()).d_k(d_k.view()).d_v(d_v.view());
    let mut scratch = Scratch::new(gpu.device(), attention.backward_scratch_size(&call)?)?;
    gpu.submit(|e| attention.backward(e, &call, &mut scratch))?;
    let rows = [("o", &out), ("d_q", &d_q), ("d_k", &d_k), ("d_v", &d_v)];
    computed(gpu, rows.map(|(name, rows)| (name, Some(&rows.placed))))
}
