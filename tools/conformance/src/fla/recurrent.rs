//! Operators with a state of constant size.

use wgpu_attention::linear_attention::{
    FeatureMap, LinearAttention, LinearBackward, LinearConfig, LinearForward,
};
use wgpu_attention::recurrent::{
    Decay, RecurrentAttention, RecurrentBackward, RecurrentConfig, RecurrentForward,
};
use wgpu_attention::{DType, Gpu, Scratch};

use super::{computed, dense, dense_output, input, optional, output, starts};
use crate::calls::Heads;
use crate::case::Case;
use crate::outcome::{Failed, Ran, float};
use crate::tensor::Placed;

/// RetNet's logarithmic decays, `[1, heads, 1, 1]`.
fn retention_decay(gpu: &Gpu, heads: usize) -> Result<Placed, Failed> {
    let decays: Vec<f64> = (0..heads).map(|h| (-(-5.0 - h as f64).exp2()).ln_1p()).collect();
    Ok(Placed::new(gpu, &decays, DType::F32, [1, heads, 1, 1])?)
}

/// The tensors for the gradients that a case has.
struct Gradients {
    rows: [(&'static str, Option<Heads>); 5],
    h0: Option<Placed>,
}

impl Gradients {
    fn new(gpu: &Gpu, case: &Case) -> Result<Self, Failed> {
        let mut rows = ["d_q", "d_k", "d_v", "d_g", "d_beta"].map(|name| (name, None));
        for (name, rows) in &mut rows {
            *rows = output(gpu, case, name)?;
        }
        Ok(Gradients { rows, h0: dense_output(gpu, case, "d_h0")? })
    }

    fn call<'a>(&'a self, call: RecurrentForward<'a>, d_out: &'a Heads) -> RecurrentBackward<'a> {
        let [d_q, d_k, d_v, d_g, d_beta] =
            self.rows.each_ref().map(|(_, rows)| rows.as_ref().map(Heads::view));
        RecurrentBackward::new(call, d_out.view())
            .d_q(d_q)
            .d_k(d_k)
            .d_v(d_v)
            .d_decay(d_g)
            .d_beta(d_beta)
            .d_initial_state(self.h0.as_ref().map(Placed::view))
    }
}

fn config(case: &Case, q: &Heads, v: &Heads, decay: Decay) -> Result<RecurrentConfig, Failed> {
    let delta = case.inputs.contains_key("beta");
    Ok(RecurrentConfig::new(q.shape[1], q.shape[3])
        .value_heads(v.shape[1])
        .value_dim(v.shape[3])
        .dtype(float(case.input("q")?)?)
        .decay(decay)
        .delta(delta)
        .scale(case.number("scale"))
        .normalize_qk(delta.then_some(1e-6)))
}

pub fn recurrent(gpu: &Gpu, case: &Case) -> Ran {
    let [q, k, v, d_out] = ["q", "k", "v", "d_o"].map(|name| input(gpu, case, name));
    let (q, k, v, d_out) = (q?, k?, v?, d_out?);
    let [g, beta] = ["g", "beta"].map(|name| optional(gpu, case, name));
    let (g, beta) = (g?, beta?);
    let [h0, d_ht] = ["h0", "d_ht"].map(|name| dense(gpu, case, name));
    let (h0, d_ht) = (h0?, d_ht?);
    let starts = starts(gpu, case)?;
    let constant = (case.operator == "retention").then(|| retention_decay(gpu, v.shape[1])).transpose()?;
    let decay = match &g {
        None if constant.is_none() => Decay::None,
        Some(g) if g.shape[3] > 1 => Decay::PerChannel,
        _ => Decay::PerHead,
    };
    let attention = RecurrentAttention::with_pipelines(gpu.pipelines(), config(case, &q, &v, decay)?)?;
    let out = output(gpu, case, "o")?.ok_or_else(|| Failed("no output o".into()))?;
    let ht = dense_output(gpu, case, "ht")?;
    let call = RecurrentForward::new(q.view(), k.view(), v.view(), out.view())
        .decay(g.as_ref().map(Heads::view).or(constant.as_ref().map(Placed::view)))
        .beta(beta.as_ref().map(Heads::view))
        .packed(starts.as_ref().map(Placed::view))
        .initial_state(h0.as_ref().map(Placed::view))
        .final_state(ht.as_ref().map(Placed::view));
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|e| attention.forward(e, &call, &mut scratch))?;
    let gradients = Gradients::new(gpu, case)?;
    let call = gradients.call(call, &d_out).d_final_state(d_ht.as_ref().map(Placed::view));
    let mut scratch = Scratch::new(gpu.device(), attention.backward_scratch_size(&call)?)?;
    gpu.submit(|e| attention.backward(e, &call, &mut scratch))?;
    let rows = gradients.rows.each_ref().map(|(name, rows)| (*name, rows.as_ref().map(|rows| &rows.placed)));
    let [q, k, v, g, beta] = rows;
    let states = [("ht", ht.as_ref()), ("d_h0", gradients.h0.as_ref())];
    computed(gpu, [("o", Some(&out.placed)), states[0], states[1], q, k, v, g, beta])
}

/// Causal linear attention whose results are divided by the norm.
pub fn normalised(gpu: &Gpu, case: &Case) -> Ran {
    let [q, k, v, d_out] = ["q", "k", "v", "d_o"].map(|name| input(gpu, case, name));
    let (q, k, v, d_out) = (q?, k?, v?, d_out?);
    let [out, d_q, d_k, d_v] = ["o", "d_q", "d_k", "d_v"].map(|name| output(gpu, case, name));
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
