//! Attention with a cache, and the indexer of sparse attention.

use std::collections::BTreeMap;

use wgpu_attention::cache::{Append, CacheRead, CacheStorage, Tokens};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::position::RowPositions;
use wgpu_attention::rows::{Elementwise, ElementwiseForward};
use wgpu_attention::selected::{Indexer, IndexerForward};
use wgpu_attention::{Attention, Cache, CacheConfig, Config, DType, Error, Forward, Gpu, Scratch, Shape};

use super::{is, optional, place_heads};
use crate::calls::{self, Heads, place};
use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran};
use crate::tensor::{Placed, Tensor};

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

pub fn flash_attention(gpu: &Gpu, case: &Case) -> Ran {
    let swapped = is(case, "swapped");
    let q = place_heads(gpu, case, "q", swapped)?;
    let k = place_heads(gpu, case, "k", swapped)?;
    let v = if is(case, "latent") { None } else { Some(place_heads(gpu, case, "v", swapped)?) };
    let [batch, heads, q_len, head_dim] = q.shape;
    let [_, kv_heads, kv_len, _] = k.shape;
    let value_dim = case.integer("value_dim").ok_or_else(|| Failed("no value_dim".into()))? as usize;
    let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    let kinds = ["k_type", "v_type"].map(|name| storage(case.text(name).unwrap_or_default()));
    let [Some(k_storage), Some(v_storage)] = kinds else {
        return Ok(Outcome::Refused("`CacheStorage` has no such format"));
    };
    // A view of ggml is a part of a cache. Other tensors need no cache if they are f32.
    let cached = is(case, "view") || kinds != [Some(CacheStorage::F32); 2];
    let capacity = if is(case, "view") { 2 * kv_len } else { kv_len };
    let max_bias = case.number("max_bias").unwrap_or_default();
    let bias = case.inputs.get("mask").map(|mask| bias(gpu, mask, heads, max_bias, capacity)).transpose()?;
    let sinks = optional(gpu, case, "sinks", [1, heads, 1, 1])?;
    let mut mask = DeviceMask::none();
    if let Some(bias) = &bias {
        mask = mask.bias(bias.view());
    }
    if let Some(sinks) = &sinks {
        mask = mask.sink_logits(sinks.view());
    }
    let softcap = case.number("softcap").filter(|c| *c != 0.0);
    let config = Config::of(&shape).scale(case.number("scale")).softcap(softcap);
    let attention = Attention::with_pipelines(gpu.pipelines(), config)?;
    let out = Placed::output(gpu, DType::F32, [batch, q_len, heads, value_dim])?;
    let out_view = out.blhd([batch, heads, q_len, value_dim]);
    if cached {
        let config = CacheConfig::new(kv_heads, head_dim, capacity)
            .batch(batch)
            .value_dim(value_dim)
            .storage(k_storage)
            .value_storage(v_storage)
            .latent(v.is_none());
        let cache = filled(gpu, config, &k, v.as_ref())?;
        let call = Forward::with_cache(q.view(), &cache, out_view).at_end().mask(mask);
        calls::forward(gpu, &attention, &call)?;
    } else {
        let v_view = v.as_ref().map_or(k.view().slice(3, 0, value_dim), Heads::view);
        let call = Forward::new(q.view(), k.view(), v_view, out_view).mask(mask);
        calls::forward(gpu, &attention, &call)?;
    }
    Ok(Outcome::Computed(BTreeMap::from([("out", out.download(gpu)?)])))
}

/// Makes a cache of all keys and values.
fn filled(gpu: &Gpu, config: CacheConfig, k: &Heads, v: Option<&Heads>) -> Result<Cache, Error> {
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config)?;
    let rows = v.map_or(Append::latent(k.view()), |v| Append::new(k.view(), v.view()));
    gpu.submit(|e| {
        cache.advance(e, Tokens::All(k.shape[2]))?;
        cache.append(e, 0, &rows)
    })?;
    Ok(cache)
}

/// Overwrites rows of a cache.
pub fn set_rows(gpu: &Gpu, case: &Case) -> Ran {
    let [old, new] = ["old", "new"].map(|name| place_heads(gpu, case, name, false));
    let (old, new) = (old?, new?);
    let [batch, heads, kv_len, dim] = old.shape;
    let Some(storage) = storage(case.text("type").unwrap_or_default()) else {
        return Ok(Outcome::Refused("`CacheStorage` has no such format"));
    };
    let config = CacheConfig::new(heads, dim, kv_len).batch(batch).storage(storage);
    let mut cache = filled(gpu, config, &old, Some(&old))?;
    let at = Placed::new(gpu, &case.input("at")?.data, DType::U32, [batch, 1, new.shape[2], 1])?;
    let [k, v] = [Placed::output(gpu, DType::F32, old.shape)?, Placed::output(gpu, DType::F32, old.shape)?];
    gpu.submit(|e| {
        cache.overwrite(e, 0, &Append::new(new.view(), new.view()), RowPositions::Tensor(at.view()))?;
        cache.read(e, 0, &CacheRead::new(k.view(), v.view()))
    })?;
    Ok(Outcome::Computed(BTreeMap::from([("k", k.download(gpu)?)])))
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

pub fn indexer(gpu: &Gpu, case: &Case) -> Ran {
    let q = place_heads(gpu, case, "q", true)?;
    let w = place(gpu, case.input("w")?)?;
    let k = case.input("k")?;
    let [batch, _, q_len, head_dim] = q.shape;
    let kv_len = k.shape[1];
    let shape = [batch, 1, kv_len, head_dim];
    let scales = optional(gpu, case, "k_scales", [batch, 1, kv_len, head_dim / 32])?;
    let keys = match case.text("k_type").unwrap_or_default() {
        "f32" => Placed::new(gpu, &k.data, DType::F32, shape)?,
        "f16" => Placed::new(gpu, &k.data, DType::F16, shape)?,
        "bf16" => Placed::new(gpu, &k.data, DType::BF16, shape)?,
        // Four integers of 8 bits in a word.
        _ => {
            let word = |x: &[f64]| f64::from(u32::from_le_bytes([0, 1, 2, 3].map(|n| x[n] as i8 as u8)));
            let words: Vec<f64> = k.data.chunks_exact(4).map(word).collect();
            Placed::new(gpu, &words, DType::U32, [batch, 1, kv_len, head_dim / 4])?
        }
    };
    let pairs = [batch, 1, q_len, kv_len];
    let [scores, out] = [Placed::output(gpu, DType::F32, pairs)?, Placed::output(gpu, DType::F32, pairs)?];
    let call = IndexerForward::new(q.view(), keys.view(), w.view())
        .key_scales(scales.as_ref().map(Placed::view))
        .scores(scores.view());
    let indexer = Indexer::with_pipelines(gpu.pipelines());
    let mut scratch = Scratch::new(gpu.device(), indexer.scratch_size(&call)?)?;
    // The mask of an `Indexer` has no tensor. Its numbers are added afterwards.
    let mask = place(gpu, case.input("mask")?)?;
    let masks = case.input("mask")?.shape[0];
    let elementwise = Elementwise::with_pipelines(gpu.pipelines());
    gpu.submit(|e| {
        indexer.forward(e, &call, &mut scratch)?;
        (0..batch).try_for_each(|n| {
            let [scores, out] = [&scores, &out].map(|x| x.view().slice(0, n, 1));
            let sum = ElementwiseForward::new(scores, out).residual(mask.view().slice(0, n % masks, 1));
            elementwise.forward(e, &sum)
        })
    })?;
    Ok(Outcome::Computed(BTreeMap::from([("out", out.download(gpu)?)])))
}
