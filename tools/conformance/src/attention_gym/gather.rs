//! Attention to a pool of keys and a window, and the indexer of such a pool.

use std::collections::BTreeMap;

use wgpu_attention::attention::Backward;
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::selected::{Indexer, IndexerForward, SelectedAttention, SelectedConfig};
use wgpu_attention::{Config, DType, Forward, Gpu, Scratch};

use crate::calls::{self, place};
use crate::case::Case;
use crate::outcome::{Outcome, Ran, float};
use crate::tensor::{Placed, Tensor};

/// Returns the keys of the pool, then the keys of the window, for each batch entry and head.
fn all_keys(pool: &Tensor, local: &Tensor) -> Tensor {
    let ([batch, heads, first, dim], [_, _, second, _]) = (pool.four(), local.four());
    let heads_of = pool.data.chunks_exact(first * dim).zip(local.data.chunks_exact(second * dim));
    let data = heads_of.flat_map(|(a, b)| a.iter().chain(b).copied()).collect();
    Tensor { dtype: pool.dtype, shape: vec![batch, heads, first + second, dim], data }
}

/// Returns the indices of each query's keys: those of the pool, then those of the window.
fn all_indices(listed: &Tensor, pool: usize, window: usize) -> Vec<f64> {
    let (queries, count) = (listed.shape[1], listed.shape[2]);
    let none = f64::from(u32::MAX);
    let mut indices = Vec::new();
    for (row, listed) in listed.data.chunks_exact(count).enumerate() {
        indices.extend(listed.iter().map(|n| if *n < 0.0 { none } else { *n }));
        let query = row % queries;
        indices.extend((0..window).map(|n| if n <= query { (pool + query - n) as f64 } else { none }));
    }
    indices
}

pub fn attention(gpu: &Gpu, case: &Case) -> Ran {
    let names = ["q", "pool", "local", "indices", "sinks", "d_o", "d_lse"];
    let [q, pool, local, listed, sinks, d_out, d_lse] = names.map(|name| case.input(name));
    let (q, pool, local, listed, sinks) = (q?, pool?, local?, listed?, sinks?);
    let (window, [batch, heads, queries, dim]) = (case.count("window")?, q.four());
    let [_, kv_heads, first, _] = pool.four();
    let keys = all_keys(pool, local);
    let indices = all_indices(listed, first, window);
    let count = indices.len() / batch / queries;
    let indices = Placed::new(gpu, &indices, DType::U32, [batch, 1, queries, count])?;
    let sinks = Placed::new(gpu, &sinks.data, DType::F32, [1, heads, 1, 1])?;
    let dtype = float(q)?;
    let config = SelectedConfig::new(Config::new(heads, dim).kv_heads(kv_heads).dtype(dtype)).latent(true);
    let attention = SelectedAttention::with_pipelines(gpu.pipelines(), config)?;
    let (q_at, kv) = (place(gpu, q)?, place(gpu, &keys)?);
    let out = Placed::output(gpu, dtype, q.four())?;
    let lse = Placed::output(gpu, DType::F32, [batch, heads, queries, 1])?;
    let forward = Forward::new(q_at.view(), kv.view(), kv.view(), out.view())
        .mask(DeviceMask::none().sink_logits(sinks.view()))
        .lse(lse.view());
    let d_out = place(gpu, d_out?)?;
    let d_lse = Placed::new(gpu, &d_lse?.data, DType::F32, [batch, heads, queries, 1])?;
    let d_q = Placed::output(gpu, dtype, q.four())?;
    let d_kv = Placed::output(gpu, dtype, keys.four())?;
    let d_sinks = Placed::output(gpu, DType::F32, [1, heads, 1, 1])?;
    let backward = Backward::new(forward, d_out.view())
        .d_lse(d_lse.view())
        .d_q(d_q.view())
        .d_k(d_kv.view())
        .d_sinks(d_sinks.view());
    calls::selected(gpu, &attention, (forward, backward), indices.view())?;
    let d_kv = d_kv.download(gpu)?;
    let of_heads = || d_kv.chunks_exact((first + queries) * dim);
    Ok(Outcome::Computed(BTreeMap::from([
        ("o", out.download(gpu)?),
        ("lse", lse.download(gpu)?),
        ("d_q", d_q.download(gpu)?),
        ("d_pool", of_heads().flat_map(|head| head[..first * dim].to_vec()).collect()),
        ("d_local", of_heads().flat_map(|head| head[first * dim..].to_vec()).collect()),
        ("d_sinks", d_sinks.download(gpu)?),
    ])))
}

/// Selects keys. Query `t` may select the first `(t + 1) / ratio` keys.
pub fn indexer(gpu: &Gpu, case: &Case) -> Ran {
    let [q, k, w] = ["q", "k", "w"].map(|name| case.input(name));
    let (q, k, w) = (q?, k?, w?);
    let (count, ratio) = (case.count("count")?, case.count("ratio")?);
    let ([batch, queries, heads, dim], keys) = (q.four(), k.shape[1]);
    let q = place(gpu, q)?;
    let k = Placed::new(gpu, &k.data, DType::F32, [batch, 1, keys, dim])?;
    let w = Placed::new(gpu, &w.data, DType::F32, [batch, 1, queries, heads])?;
    let ends: Vec<f64> = (0..queries).map(|t| ((t + 1) / ratio) as f64).collect();
    let ends = Placed::new(gpu, &ends, DType::U32, [1, 1, queries, 1])?;
    let indices = Placed::output(gpu, DType::U32, [batch, 1, queries, count])?;
    let mut mask = DeviceMask::none();
    if case.flag("causal") {
        mask = mask.lengths(ends.view());
    }
    let indexer = Indexer::with_pipelines(gpu.pipelines());
    let call = IndexerForward::new(q.blhd([batch, heads, queries, dim]), k.view(), w.view());
    let call = call.mask(mask).indices(indices.view());
    let mut scratch = Scratch::new(gpu.device(), indexer.scratch_size(&call)?)?;
    gpu.submit(|e| indexer.forward(e, &call, &mut scratch))?;
    let mut chosen: Vec<f64> = indices.download(gpu)?;
    for n in &mut chosen {
        if *n >= f64::from(u32::MAX) {
            *n = -1.0;
        }
    }
    for row in chosen.chunks_exact_mut(count) {
        row.sort_by(f64::total_cmp);
    }
    Ok(Outcome::Computed(BTreeMap::from([("indices", chosen)])))
}
