//! A step with a cache: the rows that it holds, new rows, queries.

use std::collections::BTreeMap;

use wgpu_attention::cache::{Append, CacheLayout, CacheRead, Tokens};
use wgpu_attention::position::{Positions, Rope, RopeConfig, RopeOrder, Rotate, Rotation, RowPositions};
use wgpu_attention::{Attention, Cache, CacheConfig, DType, Error, Forward, Gpu, Shape, TensorView};

use crate::calls::{self, Heads};
use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran, float};
use crate::tables::Tables;
use crate::tensor::{Placed, Tensor};

/// The sequences of a cache, and the sequences of the call among them.
struct Sequences {
    stored: usize,
    chosen: Vec<usize>,
}

impl Sequences {
    /// Puts the rows of the call's sequences where they are in the cache.
    fn spread(&self, tensor: &Tensor) -> Tensor {
        let row = tensor.data.len() / self.chosen.len();
        let mut data = vec![0.0; self.stored * row];
        for (from, to) in tensor.data.chunks_exact(row).zip(&self.chosen) {
            data[to * row..][..row].copy_from_slice(from);
        }
        let mut shape = tensor.shape.clone();
        shape[0] = self.stored;
        Tensor { dtype: tensor.dtype, shape, data }
    }

    /// Takes the rows of the call's sequences.
    fn gather(&self, data: &[f64]) -> Vec<f64> {
        let row = data.len() / self.stored;
        self.chosen.iter().flat_map(|n| data[n * row..][..row].iter().copied()).collect()
    }

    /// Returns `count` for the call's sequences, and 0 for the rest.
    fn counts(&self, count: usize) -> Vec<usize> {
        (0..self.stored).map(|n| if self.chosen.contains(&n) { count } else { 0 }).collect()
    }
}

fn counts(case: &Case, name: &str) -> Option<Vec<usize>> {
    Some(case.inputs.get(name)?.data.iter().map(|x| *x as usize).collect())
}

/// Rotations of queries and new keys. The positions are those of the first new rows.
struct Turn<'a> {
    rotation: Rotation<'a>,
    starts: &'a [usize],
}

impl Turn<'_> {
    /// Rotates rows in place. They follow each other, or all have the first position.
    fn apply(&self, gpu: &Gpu, x: &Heads, ordered: bool) -> Result<(), Error> {
        let rows = x.shape[2];
        let step = usize::from(ordered);
        let positions =
            self.starts.iter().flat_map(|start| (0..rows).map(move |n| (start + step * n) as f64));
        let shape = [x.shape[0], 1, rows, 1];
        let positions = Placed::new(gpu, &positions.collect::<Vec<_>>(), DType::U32, shape)?;
        let call = Rotate::new(x.view(), self.rotation, RowPositions::Tensor(positions.view()));
        gpu.submit(|e| Positions::with_pipelines(gpu.pipelines()).rotate(e, &call))
    }
}

/// Places rows of keys or values, `[batch, length, heads, dim]` or with the attribute `HND`
/// `[batch, heads, length, dim]`.
fn rows(gpu: &Gpu, case: &Case, tensor: &Tensor) -> Result<Heads, Failed> {
    if case.text("layout") == Some("HND") { Heads::new(gpu, tensor, None) } else { Heads::blhd(gpu, tensor) }
}

fn appended<'a>(k: TensorView<'a>, v: Option<TensorView<'a>>, rope: Option<&'a Rope>) -> Append<'a> {
    v.map_or(Append::latent(k), |v| Append::new(k, v)).rope(rope)
}

/// Returns the cache of `k` and `v`. Without `v`, values are the first channels of the keys.
pub fn config(case: &Case, k: &Heads, v: Option<&Heads>, dtype: DType) -> CacheConfig {
    let [batch, kv_heads, capacity, head_dim] = k.shape;
    let latent_dim = case.integer("latent_dim").unwrap_or_default() as usize;
    let config = CacheConfig::new(kv_heads, head_dim, capacity)
        .batch(batch)
        .value_dim(v.map_or(latent_dim, |v| v.shape[3]))
        .latent(v.is_none())
        .storage(calls::storage(dtype));
    match page(case) {
        0 => config,
        page => config.layout(CacheLayout::Paged { page, pages: batch * capacity.div_ceil(page) }),
    }
}

/// Returns the tokens of a page, or 0 without pages.
fn page(case: &Case) -> usize {
    case.integer("page").unwrap_or_default() as usize
}

pub fn step(gpu: &Gpu, case: &Case) -> Ran {
    if ![0, 16, 32, 64, 128, 256].contains(&page(case)) {
        return Ok(Outcome::Refused("pages have 16 to 256 tokens, a power of two"));
    }
    let k_cache = rows(gpu, case, case.input("k_cache")?)?;
    let v_cache = case.inputs.get("v_cache").map(|t| rows(gpu, case, t)).transpose()?;
    let [stored, kv_heads, capacity, head_dim] = k_cache.shape;
    let chosen = counts(case, "cache_batch_idx").unwrap_or_else(|| (0..stored).collect());
    let sequences = Sequences { stored, chosen };
    let lengths = counts(case, "cache_seqlens").ok_or_else(|| Failed("no lengths".into()))?;
    let q = Heads::blhd(gpu, &sequences.spread(case.input("q")?))?;
    let dtype = float(case.input("q")?)?;
    let value_dim =
        v_cache.as_ref().map_or(case.integer("latent_dim").unwrap_or_default() as usize, |v| v.shape[3]);
    let config = config(case, &k_cache, v_cache.as_ref(), dtype);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config)?;
    let rope = match case.integer("rope") {
        Some(1) => Some(Rope::new(gpu.device(), RopeConfig::new(head_dim))?),
        _ => None,
    };
    let most = lengths.iter().copied().max().unwrap_or_default();
    if most > 0 {
        gpu.submit(|e| {
            cache.advance(e, Tokens::Each(&lengths))?;
            let k = k_cache.view().slice(2, 0, most);
            let v = v_cache.as_ref().map(|v| v.view().slice(2, 0, most));
            cache.append(e, 0, &appended(k, v, rope.as_ref()))
        })?;
    }
    extend(gpu, case, &mut cache, (&sequences, &lengths), &q)?;
    if let Some(rope) = &rope {
        // The last query is at the last key.
        let starts: Vec<usize> = lengths.iter().map(|n| n - q.shape[2]).collect();
        Turn { rotation: rope.into(), starts: &starts }.apply(gpu, &q, true)?;
    }
    attend(gpu, case, &cache, (&sequences, &q), [kv_heads, capacity, value_dim])
}

/// Rotates the queries and the new rows, and appends the rows.
fn extend(
    gpu: &Gpu,
    case: &Case,
    cache: &mut Cache,
    (sequences, lengths): (&Sequences, &[usize]),
    q: &Heads,
) -> Result<(), Failed> {
    let Some(new) = case.inputs.get("k") else { return Ok(()) };
    let k = Heads::blhd(gpu, &sequences.spread(new))?;
    let v = Heads::blhd(gpu, &sequences.spread(case.input("v")?))?;
    if let (Some(cos), Some(sin)) = (case.inputs.get("cos"), case.inputs.get("sin")) {
        let table = |t: &Tensor| Placed::new(gpu, &t.data, float(t)?, t.four()).map_err(Failed::from);
        let (cos, sin) = (table(cos)?, table(sin)?);
        let order =
            if case.integer("interleaved") == Some(1) { RopeOrder::Interleaved } else { RopeOrder::Half };
        let rotation = Rotation::CosSin { cos: cos.view(), sin: sin.view(), order };
        let turn = Turn { rotation, starts: lengths };
        turn.apply(gpu, &k, true)?;
        turn.apply(gpu, q, case.integer("ordered") == Some(1))?;
    }
    gpu.submit(|e| {
        cache.advance(e, Tokens::Each(&sequences.counts(k.shape[2])))?;
        cache.append(e, 0, &Append::new(k.view(), v.view()))
    })?;
    Ok(())
}

/// Attends to the cache, and reads it back.
fn attend(
    gpu: &Gpu,
    case: &Case,
    cache: &Cache,
    (sequences, q): (&Sequences, &Heads),
    [kv_heads, kv_len, value_dim]: [usize; 3],
) -> Ran {
    let [stored, heads, q_len, head_dim] = q.shape;
    let dtype = float(case.input("q")?)?;
    let shape = Shape { batch: stored, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    let attention = Attention::with_pipelines(gpu.pipelines(), calls::config(case, &shape, dtype))?;
    let mut tables = Tables::new(gpu, case)?;
    if let Some(slopes) = case.inputs.get("alibi_slopes") {
        tables.insert(gpu, "alibi_slopes", &sequences.spread(slopes))?;
    }
    let padding = counts(case, "cache_leftpad").map(|padding| {
        let seen = padding.iter().flat_map(|n| (0..kv_len).map(move |j| f64::from(j >= *n)));
        Placed::new(gpu, &seen.collect::<Vec<_>>(), DType::Bool, [stored, 1, 1, kv_len])
    });
    let padding = padding.transpose()?;
    let mut mask = tables.mask(case);
    if let Some(padding) = &padding {
        mask = mask.key_padding_mask(padding.view());
    }
    let out = Heads::output(gpu, dtype, shape.out())?;
    let lse = Placed::output(gpu, DType::F32, [stored, heads, q_len, 1])?;
    let mut call = Forward::with_cache(q.view(), cache, out.view()).at_end().mask(mask);
    if case.output("lse").is_some() {
        call = call.lse(lse.view());
    }
    calls::forward(gpu, &attention, &call)?;
    let mut computed = BTreeMap::from([
        ("out", sequences.gather(&out.placed.download(gpu)?)),
        ("lse", sequences.gather(&lse.download(gpu)?)),
    ]);
    if case.output("k_cache").is_some() {
        let all = |dim| Heads::output(gpu, dtype, [stored, kv_heads, kv_len, dim]);
        let (k, v) = (all(head_dim)?, all(value_dim)?);
        gpu.submit(|e| cache.read(e, 0, &CacheRead::new(k.view(), v.view())))?;
        computed.extend([("k_cache", k.placed.download(gpu)?), ("v_cache", v.placed.download(gpu)?)]);
    }
    Ok(Outcome::Computed(computed))
}
