//! Recurrent attention and its convolution.

use std::collections::BTreeMap;

use wgpu_attention::matmul::Activation;
use wgpu_attention::recurrent::{Decay, RecurrentAttention, RecurrentConfig, RecurrentForward};
use wgpu_attention::rows::{CausalConv, CausalConvForward};
use wgpu_attention::{DType, Gpu, Scratch, TensorView};

use super::{is, optional, place_heads};
use crate::calls::place;
use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran};
use crate::tensor::{Placed, Tensor};

/// The states after each token, or after the last one. Memory has their values before their keys.
struct States {
    placed: Placed,
    batch: usize,
    /// The states of a sequence, of which the case has the last ones.
    rows: usize,
    wanted: usize,
}

impl States {
    fn new(gpu: &Gpu, case: &Case, batch: usize, tokens: usize) -> Result<Self, Failed> {
        let output = case.output("states").ok_or_else(|| Failed("no states".into()))?;
        let [wanted, _, heads, values, keys] = output.expected.shape[..] else {
            return Err(Failed("other axes".into()));
        };
        let rows = if wanted > 1 { tokens } else { 1 };
        let placed = Placed::output(gpu, DType::F32, [batch * rows, heads, values, keys])?;
        Ok(States { placed, batch, rows, wanted })
    }

    /// Adds some heads to the outputs of a call.
    fn of<'a>(&'a self, call: RecurrentForward<'a>, first_head: usize, heads: usize) -> RecurrentForward<'a> {
        let view = self.placed.view().transposed(2, 3).slice(1, first_head, heads);
        if self.wanted > 1 { call.states(view) } else { call.final_state(view) }
    }

    /// Returns the wanted states, the last one first.
    fn download(&self, gpu: &Gpu) -> Result<Vec<f64>, Failed> {
        let all = self.placed.download(gpu)?;
        let size = all.len() / (self.batch * self.rows);
        let mut found = Vec::new();
        for n in 0..self.wanted {
            for sequence in all.chunks_exact(size * self.rows) {
                found.extend(&sequence[(self.rows - 1 - n) * size..][..size]);
            }
        }
        Ok(found)
    }
}

pub fn gated_delta(gpu: &Gpu, case: &Case) -> Ran {
    let rows_first = !is(case, "swapped");
    let [q, k, v] = ["q", "k", "v"].map(|name| place_heads(gpu, case, name, rows_first));
    let (q, k, v) = (q?, k?, v?);
    let [g, beta] = ["g", "beta"].map(|name| place_heads(gpu, case, name, true));
    let (g, beta) = (g?, beta?);
    let [batch, heads, tokens, dim] = q.shape;
    let value_heads = v.shape[1];
    let decay = if g.shape[3] == 1 { Decay::PerHead } else { Decay::PerChannel };
    let config = RecurrentConfig::new(heads, dim).delta(true).decay(decay);
    let attention = RecurrentAttention::with_pipelines(gpu.pipelines(), config)?;
    let out = Placed::output(gpu, DType::F32, [batch, tokens, value_heads, dim])?;
    let first = place(gpu, case.input("state")?)?;
    let states = States::new(gpu, case, batch, tokens)?;
    // Value head h reads query and key head h % heads: a call for each `heads` value heads.
    for first_head in (0..value_heads).step_by(heads) {
        let part = |view| TensorView::slice(view, 1, first_head, heads);
        let out = part(out.blhd([batch, value_heads, tokens, dim]));
        let call = RecurrentForward::new(q.view(), k.view(), part(v.view()), out)
            .decay(part(g.view()))
            .beta(part(beta.view()))
            .initial_state(part(first.view().transposed(2, 3)));
        let call = states.of(call, first_head, heads);
        let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
        gpu.submit(|e| attention.forward(e, &call, &mut scratch))?;
    }
    Ok(Outcome::Computed(BTreeMap::from([("out", out.download(gpu)?), ("states", states.download(gpu)?)])))
}

pub fn linear_attention(gpu: &Gpu, case: &Case) -> Ran {
    let [q, k, v] = ["q", "k", "v"].map(|name| place_heads(gpu, case, name, true));
    let (q, k, v) = (q?, k?, v?);
    let [batch, heads, tokens, dim] = q.shape;
    let config = RecurrentConfig::new(heads, dim).decay(Decay::PerChannel);
    let attention = RecurrentAttention::with_pipelines(gpu.pipelines(), config)?;
    // ggml's decay is a factor, and not a logarithm.
    let decay: Vec<f64> = case.input("g")?.data.iter().map(|g| g.ln()).collect();
    let decay = Placed::new(gpu, &decay, DType::F32, [batch, tokens, heads, dim])?;
    let state = place(gpu, case.input("state")?)?;
    let out = Placed::output(gpu, DType::F32, [batch, tokens, heads, dim])?;
    let call = RecurrentForward::new(q.view(), k.view(), v.view(), out.blhd(q.shape))
        .decay(decay.blhd(q.shape))
        .state(state.view());
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|e| attention.forward(e, &call, &mut scratch))?;
    Ok(Outcome::Computed(BTreeMap::from([("out", out.download(gpu)?), ("state", state.download(gpu)?)])))
}

/// Mamba: C, B and Δ · x are queries, keys and values, and the decay is Δ · A.
pub fn selective_scan(gpu: &Gpu, case: &Case) -> Ran {
    let [b, c] = ["b", "c"].map(|name| place_heads(gpu, case, name, true));
    let (b, c) = (b?, c?);
    let (x, a) = (case.input("x")?, case.input("a")?);
    let [batch, tokens, heads, value_dim] = x.four();
    let [_, groups, _, dim] = b.shape;
    let channels = a.shape[1];
    let steps: Vec<f64> = case.input("dt")?.data.iter().map(|x| x.exp().ln_1p()).collect();
    let scaled = |rows: &Tensor, columns: usize| {
        let rows = rows.data.chunks_exact(columns).cycle();
        let data: Vec<f64> =
            steps.iter().zip(rows).flat_map(|(step, row)| row.iter().map(move |x| step * x)).collect();
        Placed::new(gpu, &data, DType::F32, [batch, tokens, heads, columns])
    };
    let (v, decay) = (scaled(x, value_dim)?, scaled(a, channels)?);
    let out = Placed::output(gpu, DType::F32, x.four())?;
    let first = place(gpu, case.input("state")?)?;
    let slots = Placed::new(gpu, &case.input("slots")?.data, DType::U32, [batch, 1, 1, 1])?;
    let states = States::new(gpu, case, batch, tokens)?;
    let config = RecurrentConfig::new(groups, dim)
        .value_heads(heads)
        .value_dim(value_dim)
        .decay(if channels == 1 { Decay::PerHead } else { Decay::PerChannel })
        .scale(1.0);
    let attention = RecurrentAttention::with_pipelines(gpu.pipelines(), config)?;
    let shape = [batch, heads, tokens, value_dim];
    let call = RecurrentForward::new(c.view(), b.view(), v.blhd(shape), out.blhd(shape))
        .decay(decay.blhd([batch, heads, tokens, channels]))
        .initial_state(first.view().transposed(2, 3))
        .initial_slots(slots.view());
    let call = states.of(call, 0, heads);
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|e| attention.forward(e, &call, &mut scratch))?;
    Ok(Outcome::Computed(BTreeMap::from([("out", out.download(gpu)?), ("states", states.download(gpu)?)])))
}

/// The first columns of the input are the state of the convolution.
pub fn short_convolution(gpu: &Gpu, case: &Case) -> Ran {
    let [x, weight] = ["x", "weight"].map(|name| case.input(name));
    let (x, weight) = (x?, weight?);
    let ([batch, channels, columns], width) = (three(x)?, weight.shape[1]);
    if width > 8 {
        return Ok(Outcome::Refused("`CausalConv` has filters of at most 8 columns"));
    }
    let tokens = columns + 1 - width;
    let x_at = Placed::new(gpu, &x.data, DType::F32, [batch, 1, channels, columns])?;
    let weight_at = place(gpu, weight)?;
    let bias = optional(gpu, case, "bias", [1, 1, 1, channels])?;
    let out = Placed::output(gpu, DType::F32, [batch, 1, tokens, channels])?;
    let part = |first, count| x_at.view().slice(3, first, count).transposed(2, 3);
    let call = CausalConvForward::new(part(width - 1, tokens), weight_at.view(), out.view())
        .bias(bias.as_ref().map(Placed::view))
        .activation(is(case, "silu").then_some(Activation::Silu))
        .initial_state(part(0, width - 1));
    gpu.submit(|e| CausalConv::with_pipelines(gpu.pipelines()).forward(e, &call))?;
    Ok(Outcome::Computed(BTreeMap::from([("out", out.download(gpu)?)])))
}

fn three(tensor: &Tensor) -> Result<[usize; 3], Failed> {
    tensor.shape.clone().try_into().map_err(|_| Failed("other axes".into()))
}
