//! Cases of ggml. Shapes are ggml's in reverse: the last axis is its first.

use std::collections::BTreeMap;

use wgpu_attention::cache::{Append, CacheStorage, Tokens};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::recurrent::{Decay, RecurrentAttention, RecurrentConfig, RecurrentForward};
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Error, Forward, Gpu, Scratch, Shape, TensorView,
};

use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran};
use crate::tensor::{Placed, Tensor};

/// Runs a case on a device.
pub fn run(gpu: &Gpu, case: &Case) -> Ran {
    match case.operator.as_str() {
        "FLASH_ATTN_EXT" => flash_attention(gpu, case),
        "GATED_DELTA_NET" => gated_delta(gpu, case),
        other => Err(Failed(format!("the operator {other} is not known"))),
    }
}

fn is(case: &Case, attribute: &str) -> bool {
    case.integer(attribute) == Some(1)
}

/// Uploads a tensor in its type.
fn place(gpu: &Gpu, tensor: &Tensor) -> Result<Placed, Error> {
    Placed::new(gpu, &tensor.data, tensor.float().unwrap_or(DType::F32), tensor.four())
}

/// Rows of heads. Memory has heads before rows, or rows before heads.
struct Heads {
    placed: Placed,
    /// Batch, heads, rows, channels.
    shape: [usize; 4],
    rows_first: bool,
}

impl Heads {
    fn new(gpu: &Gpu, case: &Case, name: &str, rows_first: bool) -> Result<Self, Failed> {
        let tensor = case.input(name)?;
        let mut shape = tensor.four();
        if rows_first {
            shape.swap(1, 2);
        }
        Ok(Heads { placed: place(gpu, tensor)?, shape, rows_first })
    }

    fn view(&self) -> TensorView<'_> {
        if self.rows_first { self.placed.blhd(self.shape) } else { self.placed.viewed(self.shape) }
    }
}

/// Returns the storage of a type of ggml, if the library has it.
fn storage(kind: &str) -> Option<CacheStorage> {
    Some(match kind {
        "f32" => CacheStorage::F32,
        "f16" => CacheStorage::F16,
        "bf16" => CacheStorage::BF16,
        "q8_0" => CacheStorage::Q8_0,
        "q4_0" => CacheStorage::Q4_0,
        _ => return None,
    })
}

fn flash_attention(gpu: &Gpu, case: &Case) -> Ran {
    let swapped = is(case, "swapped");
    let q = Heads::new(gpu, case, "q", swapped)?;
    let k = Heads::new(gpu, case, "k", swapped)?;
    let v = if is(case, "latent") { None } else { Some(Heads::new(gpu, case, "v", swapped)?) };
    let [batch, heads, q_len, head_dim] = q.shape;
    let [_, kv_heads, kv_len, _] = k.shape;
    let value_dim = case.integer("value_dim").ok_or_else(|| Failed("no value_dim".into()))? as usize;
    let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    let kinds = ["k_type", "v_type"].map(|name| storage(case.text(name).unwrap_or_default()));
    let [Some(k_storage), Some(v_storage)] = kinds else {
        return Ok(Outcome::Refused("`CacheStorage` has no such format"));
    };
    // A view of ggml is a part of a cache. Tensors that are not views need no cache if they are f32.
    let cached = is(case, "view") || kinds != [Some(CacheStorage::F32); 2];
    let capacity = if is(case, "view") { 2 * kv_len } else { kv_len };
    let bias = case.inputs.get("mask").map(|mask| {
        let keys = if cached { capacity } else { kv_len };
        bias(gpu, mask, heads, case.number("max_bias").unwrap_or_default(), keys)
    });
    let (bias, sinks) = (bias.transpose()?, case.inputs.get("sinks").map(|t| place(gpu, t)).transpose()?);
    let mut mask = DeviceMask::none();
    if let Some(bias) = &bias {
        mask = mask.bias(bias.view());
    }
    if let Some(sinks) = &sinks {
        mask = mask.sink_logits(sinks.viewed([1, heads, 1, 1]));
    }
    let softcap = case.number("softcap").filter(|c| *c != 0.0);
    let config = Config::of(&shape).scale(case.number("scale")).softcap(softcap);
    let attention = Attention::with_pipelines(gpu.pipelines(), config)?;
    let out = Placed::output(gpu, DType::F32, [batch, q_len, heads, value_dim])?;
    let out_view = out.blhd([batch, heads, q_len, value_dim]);
    let run = |call: Forward| {
        let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
        gpu.submit(|e| attention.forward(e, &call, &mut scratch))
    };
    if cached {
        let config = CacheConfig::new(kv_heads, head_dim, capacity)
            .batch(batch)
            .value_dim(value_dim)
            .storage(k_storage)
            .value_storage(v_storage)
            .latent(v.is_none());
        let mut cache = Cache::with_pipelines(gpu.pipelines(), config)?;
        let rows = v.as_ref().map_or(Append::latent(k.view()), |v| Append::new(k.view(), v.view()));
        gpu.submit(|e| {
            cache.advance(e, Tokens::All(kv_len))?;
            cache.append(e, 0, &rows)
        })?;
        run(Forward::with_cache(q.view(), &cache, out_view).at_end().mask(mask))?;
    } else {
        let v_view = v.as_ref().map_or(k.view().slice(3, 0, value_dim), Heads::view);
        run(Forward::new(q.view(), k.view(), v_view, out_view).mask(mask))?;
    }
    Ok(Outcome::Computed(BTreeMap::from([("out", out.download(gpu)?)])))
}

/// Returns the mask of `keys` keys as a bias. With `max_bias`, ggml multiplies it by a slope of
/// each head.
fn bias(gpu: &Gpu, mask: &Tensor, heads: usize, max_bias: f64, keys: usize) -> Result<Placed, Error> {
    let [batch, _, rows, len] = mask.four();
    let slopes = if max_bias > 0.0 { slopes(heads, max_bias) } else { vec![1.0] };
    let mut data = Vec::new();
    for sequence in mask.data.chunks_exact(rows * len) {
        for slope in &slopes {
            for row in sequence.chunks_exact(len) {
                data.extend(row.iter().map(|x| slope * x));
                data.resize(data.len() + keys - len, 0.0);
            }
        }
    }
    let dtype = if max_bias > 0.0 { DType::F32 } else { DType::F16 };
    Placed::new(gpu, &data, dtype, [batch, slopes.len(), rows, keys])
}

/// Returns ggml's slopes of ALiBi: the paper's, also where the number of heads is no power of two.
fn slopes(heads: usize, max_bias: f64) -> Vec<f64> {
    let power = 1 << heads.ilog2();
    let slope = |head: usize| {
        let steps = if head < power { (head + 1) as f64 } else { (head - power) as f64 + 0.5 };
        (-max_bias * steps / power as f64).exp2()
    };
    (0..heads).map(slope).collect()
}

fn gated_delta(gpu: &Gpu, case: &Case) -> Ran {
    let swapped = is(case, "swapped");
    let [q, k, v] = ["q", "k", "v"].map(|name| Heads::new(gpu, case, name, !swapped));
    let (q, k, v) = (q?, k?, v?);
    let [g, beta] = ["g", "beta"].map(|name| Heads::new(gpu, case, name, true));
    let (g, beta) = (g?, beta?);
    let [batch, heads, tokens, dim] = q.shape;
    let value_heads = v.shape[1];
    let decay = if g.shape[3] == 1 { Decay::PerHead } else { Decay::PerChannel };
    let config = RecurrentConfig::new(heads, dim).delta(true).decay(decay);
    let attention = RecurrentAttention::with_pipelines(gpu.pipelines(), config)?;
    let out = Placed::output(gpu, DType::F32, [batch, tokens, value_heads, dim])?;
    let first = place(gpu, case.input("state")?)?;
    let expected = case.output("states").ok_or_else(|| Failed("no states".into()))?;
    let snapshots = expected.expected.shape[0];
    // The states after all tokens, or the last one.
    let rows = if snapshots > 1 { batch * tokens } else { batch };
    let states = Placed::output(gpu, DType::F32, [rows, value_heads, dim, dim])?;
    // Value head h reads query and key head h % heads: a call for each `heads` value heads.
    for first_head in (0..value_heads).step_by(heads) {
        let part = |view| TensorView::slice(view, 1, first_head, heads);
        let out = part(out.blhd([batch, value_heads, tokens, dim]));
        let [first, states] = [&first, &states].map(|x| part(x.view().transposed(2, 3)));
        let mut call = RecurrentForward::new(q.view(), k.view(), part(v.view()), out)
            .decay(part(g.view()))
            .beta(part(beta.view()))
            .initial_state(first);
        call = if snapshots > 1 { call.states(states) } else { call.final_state(states) };
        let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
        gpu.submit(|e| attention.forward(e, &call, &mut scratch))?;
    }
    let all = states.download(gpu)?;
    let size = value_heads * dim * dim;
    // The last state comes first.
    let of = |row: usize| &all[row * size..][..size];
    let last = (0..snapshots).flat_map(|n| (0..batch).map(move |b| (b + 1) * (rows / batch) - 1 - n));
    let last = last.flat_map(|row| of(row).iter().copied()).collect();
    Ok(Outcome::Computed(BTreeMap::from([("out", out.download(gpu)?), ("states", last)])))
}
