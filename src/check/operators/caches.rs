//! Lengths of a cache's sequences, and copies of their rows.

use crate::attention::{Attention, Config, Forward};
use crate::cache::{Append, Cache, CacheConfig, CacheLayout, CacheRead, Tokens};
use crate::check::bench::{Bench, Tensor, both, equal, judged};
use crate::check::data::Outcome;
use crate::gpu::Gpu;
use crate::reference::{self, Options};
use crate::tensor::{Error, Shape};

const KV_HEADS: usize = 2;
const DIM: usize = 12;

pub(super) async fn lengths(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), CacheConfig::new(1, 4, 16).batch(2))?;
    let record = |encoder: &mut wgpu::CommandEncoder| {
        cache.advance(encoder, Tokens::Each(&[7, 9]))?;
        cache.rewind(encoder, Tokens::Each(&[2, 4]))?;
        cache.advance(encoder, Tokens::Each(&[1, 3]))
    };
    bench.run("lengths of a cache", record).await?;
    let mut got = Vec::new();
    for view in [cache.lengths(), cache.starts()] {
        let stride = view.strides()[0];
        let words: Vec<u32> = gpu.download_async(view.buffer(), view.offset() + stride + 1).await?;
        got.extend(words.into_iter().skip(view.offset()).step_by(stride));
    }
    Ok(equal(&got, &[6, 8, 5, 5]))
}

/// Checks a sequence that writes into a shared page, then sequences that are exchanged in another
/// layout.
pub(super) async fn copies(gpu: &Gpu) -> Result<Outcome, Error> {
    const ROWS: usize = 5;
    let bench = Bench::new(gpu);
    let config = CacheConfig::new(KV_HEADS, DIM, 16).batch(2);
    let paged = config.layout(CacheLayout::Paged { page: 16, pages: 4 });
    let [mut paged, mut whole] =
        [Cache::with_pipelines(gpu.pipelines(), paged)?, Cache::with_pipelines(gpu.pipelines(), config)?];
    let rows = |length| [2, KV_HEADS, length, DIM];
    let (k, v) = (bench.noise(rows(ROWS), 1)?, bench.noise(rows(ROWS), 2)?);
    let next = bench.noise(rows(1), 3)?;
    let read: [Tensor; 4] = [
        bench.zeros(rows(ROWS + 1))?,
        bench.zeros(rows(ROWS + 1))?,
        bench.zeros(rows(ROWS))?,
        bench.zeros(rows(ROWS))?,
    ];
    let first = Append::new(k.view(), v.view());
    bench
        .run("copies in a cache", |encoder| {
            for cache in [&mut paged, &mut whole] {
                cache.advance(encoder, Tokens::All(ROWS))?;
                cache.append(encoder, 0, &first)?;
            }
            paged.fork(0, 1)?;
            paged.advance(encoder, Tokens::All(1))?;
            paged.append(encoder, 0, &Append::new(next.view(), next.view()))?;
            paged.read(encoder, 0, &CacheRead::new(read[0].view(), read[1].view()))?;
            whole.reorder(encoder, &[1, 0])?;
            whole.read(encoder, 0, &CacheRead::new(read[2].view(), read[3].view()))
        })
        .await?;
    let both = both!(|k, v, next| {
        let of = |x: &[_], length: usize, n: usize| x[n * length * DIM..][..length * DIM].to_vec();
        // Both sequences have the first one's rows, then one different row each.
        let forked = |x| {
            let head = |n: usize| [of(x, ROWS, n % KV_HEADS), of(next, 1, n)].concat();
            (0..2 * KV_HEADS).flat_map(head).collect()
        };
        let swapped =
            |x| (0..2 * KV_HEADS).flat_map(|n| of(x, ROWS, (n + KV_HEADS) % (2 * KV_HEADS))).collect();
        [forked(k), forked(v), swapped(k), swapped(v)]
    });
    judged(gpu, read.each_ref(), both).await
}

/// Attention to a cache whose keys and values are stored after a product with a matrix. The results
/// are those of plain tensors.
pub(super) async fn hadamard(gpu: &Gpu) -> Result<Outcome, Error> {
    const SHAPE: Shape =
        Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 3, kv_len: 9, head_dim: 64, value_dim: 32 };
    let bench = Bench::new(gpu);
    let ([q, k, v], out) = (bench.inputs(&SHAPE)?, bench.zeros(SHAPE.out())?);
    let config = CacheConfig::new(SHAPE.kv_heads, SHAPE.head_dim, 16).value_dim(SHAPE.value_dim).hadamard(32);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config)?;
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::of(&SHAPE))?;
    let (read_k, read_v) = (bench.zeros(SHAPE.k())?, bench.zeros(SHAPE.v())?);
    let first = Forward::with_cache(q.view(), &cache, out.view()).at_end();
    let mut scratch = bench.scratch(attention.scratch_size(&first)?)?;
    bench
        .run("a cache with a Walsh–Hadamard product", |encoder| {
            cache.advance(encoder, Tokens::All(SHAPE.kv_len))?;
            cache.append(encoder, 0, &Append::new(k.view(), v.view()))?;
            let call = Forward::with_cache(q.view(), &cache, out.view()).at_end();
            attention.forward(encoder, &call, &mut scratch)?;
            cache.read(encoder, 0, &CacheRead::new(read_k.view(), read_v.view()))
        })
        .await?;
    let both = both!(|q, k, v| {
        let rotated =
            |x: &[_], dim| x.chunks(dim).flat_map(|row| reference::cache::hadamard(row, 32)).collect();
        let back = |x: Vec<_>, dim| rotated(&x, dim);
        let (k, v): (Vec<_>, Vec<_>) = (rotated(k, SHAPE.head_dim), rotated(v, SHAPE.value_dim));
        let q: Vec<_> = rotated(q, SHAPE.head_dim);
        let out = reference::attention(&q, &k, &v, SHAPE, &Options::new())?.out;
        [back(out, SHAPE.value_dim), back(k, SHAPE.head_dim), back(v, SHAPE.value_dim)]
    });
    judged(gpu, [&out, &read_k, &read_v], both).await
}
