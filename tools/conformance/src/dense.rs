//! Attention to tensors `[batch, length, heads, dim]`, and its gradients.

use std::collections::BTreeMap;

use wgpu_attention::mask::{Blocks, DeviceMask};
use wgpu_attention::{Attention, Backward, DType, Dropout, Forward, Gpu, Shape, TensorView};

use crate::calls::{self, Heads};
use crate::case::Case;
use crate::mods;
use crate::outcome::{Failed, Outcome, Ran, float};
use crate::tables::Tables;
use crate::tensor::Placed;

/// Queries and keys of a block of a map.
const BLOCK: usize = 128;

/// Returns queries, keys and values, of which some may be packed in one tensor.
fn views(tensors: &[Heads]) -> Option<[TensorView<'_>; 3]> {
    Some(match tensors {
        [q, k, v] => [q.view(), k.view(), v.view()],
        [q, kv] => [q.view(), kv.part(0, 2), kv.part(1, 2)],
        [qkv] => [qkv.part(0, 3), qkv.part(1, 3), qkv.part(2, 3)],
        _ => return None,
    })
}

fn mask<'a>(case: &Case, tables: &'a Tables, shape: &Shape) -> Result<DeviceMask<'a>, Failed> {
    let mut mask = tables.mask(case);
    if let Some(map) = tables.view("block_mask") {
        let [_, _, rows, columns] = map.shape();
        mask = mask.blocks(Blocks::new(map, [shape.q_len / rows, shape.kv_len / columns]));
    }
    if let (Some(q), Some(k)) = (tables.view("cu_seqlens_q"), tables.view("cu_seqlens_k")) {
        mask = mask.packed(q, k);
    }
    if let Some(documents) = tables.view("documents") {
        let keys = documents.slice(2, 0, shape.kv_len).transposed(2, 3);
        mask = mask.documents(documents.slice(2, 0, shape.q_len), keys);
    }
    if let Some(name) = case.text("mask_mod") {
        mask = mods::masked(mask, name, tables)?;
    }
    if let Some(name) = case.text("score_mod") {
        mask = mask.score_mod(mods::score(name, tables)?);
    }
    Ok(mask)
}

fn dropout<'a>(case: &Case, tables: &'a Tables) -> Option<Dropout<TensorView<'a>>> {
    let p = case.number("dropout")?;
    Some(match tables.view("keep") {
        Some(keep) => Dropout::Given { p, keep },
        None => Dropout::Seeded { p, seed: case.integer("seed").unwrap_or_default() as u64 },
    })
}

/// Makes the block map of a mask on the device, if the case has the attribute `blocks`.
fn block_map(
    gpu: &Gpu,
    case: &Case,
    attention: &Attention,
    mask: &DeviceMask,
    shape: &Shape,
) -> Result<Option<Placed>, Failed> {
    if case.integer("blocks") != Some(1) {
        return Ok(None);
    }
    let Shape { batch, heads, q_len, kv_len, .. } = *shape;
    let axes = [batch, heads, q_len.div_ceil(BLOCK), kv_len.div_ceil(BLOCK)];
    let map = Placed::new(gpu, &vec![0.0; axes.iter().product()], DType::U32, axes)?;
    let blocks = Blocks::new(map.view(), [BLOCK, BLOCK]);
    gpu.submit(|e| attention.classify(e, mask, [batch, q_len, kv_len], &blocks))?;
    Ok(Some(map))
}

pub fn attend(gpu: &Gpu, case: &Case) -> Ran {
    let names = ["qkv", "q", "kv", "k", "v"];
    let found = names.iter().filter_map(|name| case.inputs.get(*name));
    let tensors = found.map(|t| Heads::blhd(gpu, t)).collect::<Result<Vec<_>, _>>()?;
    let [q, k, v] = views(&tensors).ok_or_else(|| Failed("other tensors".into()))?;
    let ([batch, heads, q_len, head_dim], [_, kv_heads, kv_len, _]) = (q.shape(), k.shape());
    let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim: v.shape()[3] };
    let attention = Attention::with_pipelines(gpu.pipelines(), calls::config(case, &shape, q.dtype()))?;
    let tables = Tables::new(gpu, case)?;
    let mut mask = mask(case, &tables, &shape)?;
    let map = block_map(gpu, case, &attention, &mask, &shape)?;
    if let Some(map) = &map {
        mask = mask.blocks(Blocks::new(map.view(), [BLOCK, BLOCK]));
    }
    let out = Heads::output(gpu, q.dtype(), shape.out())?;
    let lse = Placed::output(gpu, DType::F32, [batch, heads, q_len, 1])?;
    let call = Forward::new(q, k, v, out.view()).lse(lse.view()).mask(mask).dropout(dropout(case, &tables));
    calls::forward(gpu, &attention, &call)?;
    let mut computed = BTreeMap::from([("out", out.placed.download(gpu)?), ("lse", lse.download(gpu)?)]);
    if case.output("d_q").is_some() {
        let gradients = gradients(gpu, case, &attention, call)?;
        let is_same = case.integer("deterministic") != Some(1)
            || gradients == self::gradients(gpu, case, &attention, call)?;
        if !is_same {
            return Err(Failed("a second backward pass has other bits".into()));
        }
        computed.extend(gradients);
    }
    Ok(Outcome::Computed(computed))
}

fn gradients(
    gpu: &Gpu,
    case: &Case,
    attention: &Attention,
    call: Forward,
) -> Result<BTreeMap<&'static str, Vec<f64>>, Failed> {
    let d_out = Heads::blhd(gpu, case.input("d_out")?)?;
    let d_lse = case.inputs.get("d_lse");
    let d_lse = d_lse.map(|t| Placed::new(gpu, &t.data, DType::F32, [t.shape[0], t.shape[1], t.shape[2], 1]));
    let d_lse = d_lse.transpose()?;
    let like = |name: &str| {
        let output = case.output(name).ok_or_else(|| format!("no output {name}"))?;
        Heads::like(gpu, &output.expected)
    };
    let (d_q, d_k, d_v) = (like("d_q")?, like("d_k")?, like("d_v")?);
    let sinks = case.output("d_sink").map(|output| &output.expected);
    let d_sink = sinks.map(|t| Placed::output(gpu, float(t)?, [1, t.data.len(), 1, 1]).map_err(Failed::from));
    let d_sink = d_sink.transpose()?;
    let backward = Backward::new(call, d_out.view())
        .d_lse(d_lse.as_ref().map(Placed::view))
        .d_q(d_q.view())
        .d_k(d_k.view())
        .d_v(d_v.view())
        .d_sinks(d_sink.as_ref().map(Placed::view));
    calls::backward(gpu, attention, &backward)?;
    let mut computed = BTreeMap::new();
    for (name, gradient) in [("d_q", &d_q), ("d_k", &d_k), ("d_v", &d_v)] {
        computed.insert(name, gradient.placed.download(gpu)?);
    }
    if let Some(d_sink) = &d_sink {
        computed.insert("d_sink", d_sink.download(gpu)?);
    }
    Ok(computed)
}
