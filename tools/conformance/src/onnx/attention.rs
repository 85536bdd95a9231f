//! Attention (opset 23 to 25) and FlexAttention.

use std::collections::BTreeMap;

use wgpu_attention::attention::ScoreStage;
use wgpu_attention::cache::{Append, CacheRead, Tokens};
use wgpu_attention::mask::{DeviceMask, ScoreMod};
use wgpu_attention::{
    Alignment, Attention, Cache, CacheConfig, Config, DType, Forward, Gpu, Shape, TensorView,
};

use crate::calls::{self, Heads};
use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran, float};
use crate::tensor::{Placed, Tensor};

/// Past and new keys and values. A cache appends them, and both are read back.
fn with_past(gpu: &Gpu, case: &Case, dtype: DType, k: &Heads, v: &Heads) -> Result<[Placed; 2], Failed> {
    let past = ["past_key", "past_value"].map(|name| case.input(name).map(|t| Heads::new(gpu, t, None)));
    let [past_k, past_v] = past;
    let (past_k, past_v) = (past_k??, past_v??);
    let [batch, kv_heads, new, head_dim] = k.shape;
    let (old, value_dim) = (past_k.shape[2], v.shape[3]);
    let config = CacheConfig::new(kv_heads, head_dim, old + new)
        .batch(batch)
        .value_dim(value_dim)
        .storage(calls::storage(dtype));
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config)?;
    let all = |dim| Placed::output(gpu, dtype, [batch, kv_heads, old + new, dim]);
    let (all_k, all_v) = (all(head_dim)?, all(value_dim)?);
    gpu.submit(|e| {
        for (k, v, rows) in [(&past_k, &past_v, old), (k, v, new)] {
            cache.advance(e, Tokens::All(rows))?;
            cache.append(e, 0, &Append::new(k.view(), v.view()))?;
        }
        cache.read(e, 0, &CacheRead::new(all_k.view(), all_v.view()))
    })?;
    Ok([all_k, all_v])
}

/// A mask with the number of keys, and four axes. Keys past its end are hidden.
fn mask_tensor(gpu: &Gpu, tensor: &Tensor, kv_len: usize) -> Result<Placed, Failed> {
    let dtype = tensor.float().unwrap_or(DType::Bool);
    let hidden = if dtype == DType::Bool { 0.0 } else { f64::NEG_INFINITY };
    let [a, b, c, keys] = tensor.four();
    let rows = tensor.data.chunks_exact(keys);
    let keys = if keys == 1 { 1 } else { kv_len };
    let padded: Vec<f64> = rows
        .flat_map(|row| row.iter().copied().chain(std::iter::repeat(hidden)).take(keys).collect::<Vec<_>>())
        .collect();
    Ok(Placed::new(gpu, &padded, dtype, [a, b, c, keys])?)
}

/// Returns the share of some sequences. A tensor of one sequence is for all.
fn part(view: TensorView<'_>, first: usize, count: usize) -> TensorView<'_> {
    if view.shape()[0] == 1 { view } else { view.slice(0, first, count) }
}

pub fn attention(gpu: &Gpu, case: &Case) -> Ran {
    let q_tensor = case.input("Q")?;
    let dtype = float(q_tensor)?;
    let kv_heads = case.integer("kv_num_heads");
    let q = Heads::new(gpu, q_tensor, case.integer("q_num_heads"))?;
    let k = Heads::new(gpu, case.input("K")?, kv_heads)?;
    let v = Heads::new(gpu, case.input("V")?, kv_heads)?;
    let past = case.inputs.get("past_key").map_or(0, |past| past.shape[2]);
    let all = if past > 0 { Some(with_past(gpu, case, dtype, &k, &v)?) } else { None };
    let (k_view, v_view) = all.as_ref().map_or((k.view(), v.view()), |[k, v]| (k.view(), v.view()));
    let [batch, heads, q_len, head_dim] = q.shape;
    let shape = Shape {
        batch,
        heads,
        kv_heads: k.shape[1],
        q_len,
        kv_len: past + k.shape[2],
        head_dim,
        value_dim: v.shape[3],
    };

    let number = |data: &[f64]| Placed::new(gpu, data, DType::U32, [batch, 1, 1, 1]);
    let counts = case.inputs.get("nonpad_kv_seqlen").map(|t| &t.data);
    let lengths = counts.map(|n| number(n)).transpose()?;
    // The place of the first query of each sequence. It is negative if there are more queries than
    // keys.
    let offsets: Vec<f64> = match counts {
        Some(counts) => counts.iter().map(|n| n - q_len as f64).collect(),
        None => vec![past as f64; batch],
    };
    let window = |name| case.integer(name).and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let [left, right] = ["left_window_size", "right_window_size"].map(window);
    let given = case.inputs.get("attn_mask");
    let placed = given.map(|t| mask_tensor(gpu, t, shape.kv_len)).transpose()?;
    let mask = |first: usize, count: usize| {
        let mut mask = DeviceMask::none().aligned(Alignment::Offset(offsets[first] as i64));
        if case.integer("is_causal") == Some(1) {
            mask = mask.and_causal();
        }
        if left.min(right) < usize::MAX {
            mask = mask.window(left, right);
        }
        if let Some(lengths) = &lengths {
            mask = mask.lengths(part(lengths.view(), first, count));
        }
        match (given.and_then(Tensor::float), &placed) {
            (Some(_), Some(placed)) => mask.bias(part(placed.view(), first, count)),
            (None, Some(placed)) => mask.attn_mask(part(placed.view(), first, count)),
            (_, None) => mask,
        }
    };
    // Sequences whose queries have other places take a call each: a tensor of places has no
    // negative ones.
    let differ = offsets.iter().any(|n| *n != offsets[0]);
    let parts: Vec<_> = if differ { (0..batch).map(|b| (b, 1)).collect() } else { vec![(0, batch)] };
    let masks: Vec<_> = parts.into_iter().map(|(first, count)| (first, count, mask(first, count))).collect();
    let config = Config::of(&shape)
        .dtype(dtype)
        .scale(case.number("scale"))
        .softcap(case.number("softcap").filter(|c| *c != 0.0));
    run(gpu, case, Call { q: &q, k: k_view, v: v_view, shape, config, masks, present: all.as_ref() })
}

pub fn flex(gpu: &Gpu, case: &Case) -> Ran {
    if case.function("prob_mod").is_some() {
        return Ok(Outcome::Refused("no functions of weights after the softmax; scale the values instead"));
    }
    let [q, k, v] = ["Q", "K", "V"].map(|name| case.input(name).map(|t| Heads::new(gpu, t, None)));
    let (q, k, v) = (q??, k??, v??);
    let [batch, heads, q_len, head_dim] = q.shape;
    let [_, kv_heads, kv_len, _] = k.shape;
    let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim: v.shape[3] };
    let number = case.constant("score_mod").unwrap_or_default();
    let body = match case.function("score_mod") {
        None => None,
        Some("score_mod_bias") => Some(format!("return score + f32({number});")),
        Some("score_mod_soft_cap") => Some(format!("return tanh(score / f32({number})) * f32({number});")),
        Some("score_mod_causal_mask") => {
            Some("if at.query >= at.key { return score; } else { return neg_inf(); }".into())
        }
        Some("score_mod_relative_positional") => Some("return score + (f32(at.query) - f32(at.key));".into()),
        Some(other) => return Err(Failed(format!("the function {other} is not known"))),
    };
    let mut mask = DeviceMask::none();
    if let Some(body) = body {
        mask =
            mask.score_mod(ScoreMod::new(&format!("fn score_mod(score: f32, at: At) -> f32 {{ {body} }}"))?);
    }
    let config = Config::of(&shape).dtype(float(case.input("Q")?)?).scale(case.number("scale"));
    let masks = vec![(0, batch, mask)];
    run(gpu, case, Call { q: &q, k: k.view(), v: v.view(), shape, config, masks, present: None })
}

/// The tensors and options of a case.
struct Call<'a> {
    q: &'a Heads,
    k: TensorView<'a>,
    v: TensorView<'a>,
    shape: Shape,
    config: Config,
    /// Each range of sequences has a mask: the first sequence, their number, the mask.
    masks: Vec<(usize, usize, DeviceMask<'a>)>,
    /// Past and new keys and values together, which are outputs too.
    present: Option<&'a [Placed; 2]>,
}

/// Computes the outputs of a case.
fn run(gpu: &Gpu, case: &Case, call: Call) -> Ran {
    let Call { q, k, v, shape, config, masks, present } = call;
    let dtype = float(case.input("Q")?)?;
    let attention = Attention::with_pipelines(gpu.pipelines(), config)?;
    let out = Placed::output(gpu, dtype, shape.out())?;
    let out_view = if q.is_blhd { out.blhd(shape.out()) } else { out.view() };
    let wanted = case.output("qk_matmul_output");
    let pairs = wanted.map(|_| Placed::output(gpu, dtype, shape.weights())).transpose()?;
    for (first, count, mask) in masks {
        let mut call = Forward::new(
            part(q.view(), first, count),
            part(k, first, count),
            part(v, first, count),
            part(out_view, first, count),
        )
        .mask(mask);
        if let Some(pairs) = pairs.as_ref().map(|pairs| part(pairs.view(), first, count)) {
            call = match case.integer("qk_matmul_output_mode").unwrap_or_default() {
                0 => call.scores(pairs, ScoreStage::Scaled),
                1 => call.scores(pairs, ScoreStage::Softcapped),
                2 => call.scores(pairs, ScoreStage::Biased),
                _ => call.weights(pairs),
            };
        }
        calls::forward(gpu, &attention, &call)?;
    }
    let mut computed = BTreeMap::from([("Y", out.download(gpu)?)]);
    if let Some([k, v]) = present {
        computed.extend([("present_key", k.download(gpu)?), ("present_value", v.download(gpu)?)]);
    }
    if let Some(pairs) = &pairs {
        computed.insert("qk_matmul_output", pairs.download(gpu)?);
    }
    Ok(Outcome::Computed(computed))
}
