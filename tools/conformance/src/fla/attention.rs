//! Attention, with sinks and with forget gates, and attention to selected keys.

use wgpu_attention::mask::{Captured, DeviceMask, ScoreMod};
use wgpu_attention::selected::{Indexer, IndexerForward, SelectedAttention, SelectedConfig};
use wgpu_attention::{Attention, DType, Gpu, Scratch, TensorView};

use super::input;
use crate::calls::{self, CallTensors};
use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran, float};
use crate::tensor::{Placed, Tensor};

fn tensors(gpu: &Gpu, case: &Case) -> Result<CallTensors, Failed> {
    let [q, k, v, d_out] = ["q", "k", "v", "d_o"].map(|name| input(gpu, case, name));
    Ok(CallTensors::new(gpu, [q?, k?, v?, d_out?])?)
}

/// The sums of the forget gates up to each token, `[batch, heads, 1, length]`.
fn sums(gpu: &Gpu, gates: &Tensor) -> Result<Placed, Failed> {
    let [batch, length, heads] = gates.shape[..] else { return Err(Failed("other axes".into())) };
    let mut sums = vec![0.0; gates.data.len()];
    for sequence in 0..batch * heads {
        let (b, h) = (sequence / heads, sequence % heads);
        let mut sum = 0.0;
        for t in 0..length {
            sum += gates.data[(b * length + t) * heads + h];
            sums[sequence * length + t] = sum;
        }
    }
    Ok(Placed::new(gpu, &sums, DType::F32, [batch, heads, 1, length])?)
}

/// The gradients of the gates, from those of their sums.
fn d_gates(d_sums: &[f64], [batch, length, heads]: [usize; 3]) -> Vec<f64> {
    let mut d_gates = vec![0.0; d_sums.len()];
    for sequence in 0..batch * heads {
        let (b, h) = (sequence / heads, sequence % heads);
        let mut sum = 0.0;
        for t in (0..length).rev() {
            sum += d_sums[sequence * length + t];
            d_gates[(b * length + t) * heads + h] = sum;
        }
    }
    d_gates
}

const FORGET: &str = "fn score_mod(score: f32, at: At) -> f32 {
    return score + (sums_at(at.batch, at.head, 0u, at.query) - sums_at(at.batch, at.head, 0u, at.key));
}";

pub fn attention(gpu: &Gpu, case: &Case) -> Ran {
    let tensors = tensors(gpu, case)?;
    let ([batch, heads, length, _], dtype) = (tensors.q.shape, float(case.input("q")?)?);
    let sinks = case.inputs.get("sinks");
    let sinks = sinks
        .map(|t| Ok::<_, Failed>(Placed::new(gpu, &t.data, float(t)?, [1, heads, 1, 1])?))
        .transpose()?;
    let d_sinks = sinks.as_ref().map(|_| Placed::output(gpu, dtype, [1, heads, 1, 1])).transpose()?;
    let sums = case.inputs.get("g").map(|gates| sums(gpu, gates)).transpose()?;
    let d_sums =
        sums.as_ref().map(|_| Placed::output(gpu, DType::F32, [batch, heads, 1, length])).transpose()?;
    let mut mask = DeviceMask::causal();
    if let Some(window) = case.integer("window").filter(|n| *n > 0) {
        mask = mask.window(window as usize - 1, 0);
    }
    if let Some(sinks) = &sinks {
        mask = mask.sink_logits(sinks.view());
    }
    if let Some(sums) = &sums {
        mask = mask.score_mod(ScoreMod::capturing(FORGET, &[Captured::float("sums")])?.with(&[sums.view()]));
    }
    let attention = Attention::with_pipelines(gpu.pipelines(), tensors.config().scale(case.number("scale")))?;
    let forward = tensors.forward(mask);
    calls::forward(gpu, &attention, &forward)?;
    let mut backward = tensors.backward(forward).d_sinks(d_sinks.as_ref().map(Placed::view));
    if let Some(d_sums) = &d_sums {
        backward = backward.d_captured(&[Some(d_sums.view())]);
    }
    calls::backward(gpu, &attention, &backward)?;
    let mut outputs = tensors.results(gpu)?;
    if let Some(d_sinks) = &d_sinks {
        outputs.insert("d_sinks", d_sinks.download(gpu)?);
    }
    if let Some(d_sums) = &d_sums {
        outputs.insert("d_g", d_gates(&d_sums.download(gpu)?, [batch, length, heads]));
    }
    Ok(Outcome::Computed(outputs))
}

/// Attention to listed blocks of keys.
pub fn selection(gpu: &Gpu, case: &Case) -> Ran {
    let t = case.input("indices")?;
    let [batch, length, heads, count] = t.four();
    // −1 names no key.
    let listed: Vec<f64> = t.data.iter().map(|n| if *n < 0.0 { u32::MAX.into() } else { *n }).collect();
    let indices = Placed::new(gpu, &listed, DType::U32, t.four())?;
    let block = case.integer("block").map(|n| n as usize);
    attend(gpu, case, indices.blhd([batch, heads, length, count]), block)
}

/// Attention to the keys that an indexer selects.
pub fn indexed(gpu: &Gpu, case: &Case) -> Ran {
    let q = input(gpu, case, "q_idx")?;
    let [batch, _, length, dim] = q.shape;
    let [k, w] = ["k_idx", "w_idx"].map(|name| case.input(name));
    let (k, w) = (k?, w?);
    let k = Placed::new(gpu, &k.data, float(k)?, [batch, 1, length, dim])?;
    let w = Placed::new(gpu, &w.data, float(w)?, [batch, 1, length, q.shape[1]])?;
    let count = case.integer("count").unwrap_or(2048) as usize;
    let indices = Placed::output(gpu, DType::U32, [batch, 1, length, count])?;
    let indexer = Indexer::with_pipelines(gpu.pipelines());
    let call = IndexerForward::new(q.view(), k.view(), w.view()).mask(DeviceMask::causal());
    let call = call.indices(indices.view());
    let mut scratch = Scratch::new(gpu.device(), indexer.scratch_size(&call)?)?;
    gpu.submit(|e| indexer.forward(e, &call, &mut scratch))?;
    attend(gpu, case, indices.view(), None)
}

/// Causal attention to listed keys, or blocks of keys, and its gradients.
fn attend(gpu: &Gpu, case: &Case, indices: TensorView, block: Option<usize>) -> Ran {
    let tensors = tensors(gpu, case)?;
    let mut config = SelectedConfig::new(tensors.config().scale(case.number("scale")));
    if let Some(block) = block {
        config = config.block(block);
    }
    let attention = SelectedAttention::with_pipelines(gpu.pipelines(), config)?;
    let forward = tensors.forward(DeviceMask::causal());
    calls::selected(gpu, &attention, (forward, tensors.backward(forward)), indices)?;
    Ok(Outcome::Computed(tensors.results(gpu)?))
}
