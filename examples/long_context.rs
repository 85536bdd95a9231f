//! Generates tokens after a context of 131,072 tokens, with attention to selected keys.
//!
//! The keys and values are in a paged cache. For each token, an indexer scores all keys with a few
//! small heads and selects 512 of them. Attention then reads these keys and the last 64. The
//! program prints tokens per second, compared with attention to all keys. It also prints the
//! difference of the results.
//!
//! Keys, values and queries are random. Each query resembles one earlier key, as in a model that
//! recalls a token of its context.
//!
//! `scripts/gpu cargo run --release --example long_context [-- --quick]`

use std::time::{Duration, Instant};

use wgpu_attention::cache::{Append, CacheLayout, CacheStorage, Tokens};
use wgpu_attention::selected::{Indexer, IndexerForward, SelectedAttention, SelectedConfig, SelectedForward};
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Error, Forward, Gpu, Mask, Scratch, TensorView, wgpu,
};

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const INDEX_HEADS: usize = 4;
const INDEX_DIM: usize = 32;
const SELECTED: usize = 512;
const WINDOW: usize = 64;
const PAGE: usize = 64;
/// Tokens of the context that are appended at a time.
const CHUNK: usize = 4096;
/// SplitMix64 (Steele et al. 2014), as normally distributed numbers.
struct Rng(u64);

impl Rng {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn normal(&mut self) -> f32 {
        let unit = |word: u64| ((word >> 40) + 1) as f32 / (1u64 << 24) as f32;
        let (a, b) = (unit(self.word()), unit(self.word()));
        (-2.0 * a.ln()).sqrt() * (std::f32::consts::TAU * b).cos()
    }

    fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }
}

/// The keys of the context on the host, `[tokens, DIM]`: all heads have the same.
struct Context {
    rng: Rng,
    keys: Vec<f32>,
}

impl Context {
    /// Adds tokens. Returns their keys and values, `[1, KV_HEADS, count, DIM]`, and the index keys.
    fn grow(&mut self, count: usize) -> [Vec<f32>; 3] {
        let keys = self.rng.normals(count * DIM);
        let values = self.rng.normals(KV_HEADS * count * DIM);
        let index = keys.chunks(DIM).flat_map(|key| key[..INDEX_DIM].to_vec()).collect();
        self.keys.extend(&keys);
        [keys.repeat(KV_HEADS), values, index]
    }

    /// Returns the queries of all heads, `[1, HEADS, 1, DIM]`, and of the indexer.
    fn query(&mut self) -> [Vec<f32>; 2] {
        let token = self.rng.word() as usize % (self.keys.len() / DIM);
        let wanted: Vec<f32> = self.keys[token * DIM..][..DIM].iter().map(|x| 4.0 * x).collect();
        [wanted.repeat(HEADS), wanted[..INDEX_DIM].repeat(INDEX_HEADS)]
    }
}

fn main() -> Result<(), Error> {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let (context, steps): (usize, usize) = if quick { (8192, 4) } else { (131_072, 32) };
    let gpu = Gpu::new()?;
    println!("device: {}", gpu.device().adapter_info().name);
    let pipelines = gpu.pipelines();
    let most = context + steps;

    let layout = CacheLayout::Paged { page: PAGE, pages: most.div_ceil(PAGE) };
    let config = CacheConfig::new(KV_HEADS, DIM, most).storage(CacheStorage::F16).layout(layout);
    let mut cache = Cache::with_pipelines(pipelines, config)?;
    cache.reserve(0, most)?;
    let attention = Config::new(HEADS, DIM).kv_heads(KV_HEADS);
    let dense = Attention::with_pipelines(pipelines, attention)?;
    let selected =
        SelectedAttention::with_pipelines(pipelines, SelectedConfig::new(attention).window(WINDOW))?;
    let indexer = Indexer::with_pipelines(pipelines);

    let mut tokens = Context { rng: Rng(1), keys: Vec::new() };
    let rows = |count| [1, KV_HEADS, count, DIM];
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    let index_keys = gpu.buffer(4 * most * INDEX_DIM)?;
    let chunk = || gpu.buffer(4 * KV_HEADS * CHUNK * DIM);
    let (chunk_k, chunk_v) = (&chunk()?, &chunk()?);
    let append = |cache: &mut Cache, tokens: &mut Context, count: usize, first: usize| {
        let [k, v, index] = tokens.grow(count);
        let write = |buffer: &wgpu::Buffer, at: usize, x: &[f32]| {
            gpu.queue().write_buffer(buffer, 4 * at as u64, bytemuck::cast_slice(x));
        };
        write(chunk_k, 0, &k);
        write(chunk_v, 0, &v);
        write(&index_keys, first * INDEX_DIM, &index);
        gpu.submit(|encoder| {
            cache.advance(encoder, Tokens::All(count))?;
            cache.append(encoder, 0, &Append::new(view(chunk_k, rows(count)), view(chunk_v, rows(count))))
        })
    };
    for first in (0..context).step_by(CHUNK) {
        append(&mut cache, &mut tokens, CHUNK, first)?;
    }

    let of_query = [1, HEADS, 1, DIM];
    let buffer = || gpu.buffer(4 * HEADS * DIM);
    let (q, out, all_out) = (buffer()?, buffer()?, buffer()?);
    let index_q = gpu.buffer(4 * INDEX_HEADS * INDEX_DIM)?;
    let weights = gpu.upload(&[1.0f32; INDEX_HEADS])?;
    let indices = gpu.buffer(4 * SELECTED)?;
    let indices = TensorView::new(&indices, DType::U32, [1, 1, 1, SELECTED]);

    // The first step compiles kernels, and does not count.
    let mut times = [Duration::ZERO; 2];
    let mut worst = 0f32;
    let index = |length| {
        let of_query = view(&index_q, [1, INDEX_HEADS, 1, INDEX_DIM]);
        let of_keys = view(&index_keys, [1, 1, most, INDEX_DIM]).slice(2, 0, length);
        IndexerForward::new(of_query, of_keys, view(&weights, [1, 1, 1, INDEX_HEADS])).indices(indices)
    };
    fn attend<'a>(cache: &'a Cache, q: TensorView<'a>, out: TensorView<'a>) -> Forward<'a> {
        Forward::with_cache(q, cache, out).mask(Mask::causal())
    }
    let (q_view, out_view, all_view) = (view(&q, of_query), view(&out, of_query), view(&all_out, of_query));
    let few = SelectedForward::new(attend(&cache, q_view, out_view).at_end(), indices);
    let all = attend(&cache, q_view, all_view).at_end();
    let size = selected.scratch_size(&few)?.max(indexer.scratch_size(&index(most))?);
    let mut scratch = Scratch::new(gpu.device(), size.max(dense.scratch_size(&all)?))?;
    for step in 0..steps {
        append(&mut cache, &mut tokens, 1, context + step)?;
        let [query, index_query] = tokens.query();
        gpu.queue().write_buffer(&q, 0, bytemuck::cast_slice(&query));
        gpu.queue().write_buffer(&index_q, 0, bytemuck::cast_slice(&index_query));
        let of_index = index(context + step + 1);
        let few = SelectedForward::new(attend(&cache, q_view, out_view), indices);
        let all = attend(&cache, q_view, all_view);
        let start = Instant::now();
        gpu.submit(|encoder| {
            indexer.forward(encoder, &of_index, &mut scratch)?;
            selected.forward(encoder, &few, &mut scratch)
        })?;
        let of_few: Vec<f32> = gpu.download(&out, HEADS * DIM)?;
        let middle = Instant::now();
        gpu.submit(|encoder| dense.forward(encoder, &all, &mut scratch))?;
        let of_all: Vec<f32> = gpu.download(&all_out, HEADS * DIM)?;
        if step > 0 {
            times[0] += middle - start;
            times[1] += middle.elapsed();
        }
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
        let difference = norm(&mut of_few.iter().zip(&of_all).map(|(a, b)| a - b));
        worst = worst.max(difference / norm(&mut of_all.iter().copied()));
    }
    let [few, all] = times.map(|time| (steps - 1) as f64 / time.as_secs_f64());
    println!("context of {context} tokens, {steps} steps");
    println!("  indexer, {SELECTED} selected keys and a window of {WINDOW}: {few:.1} tokens per second");
    println!("  attention to all keys:  {all:.1} tokens per second");
    println!("  ratio {:.2}, largest difference {:.1} % of the result's length", few / all, 100.0 * worst);
    assert!(worst < 0.05, "the selected keys miss a part of the attention");
    Ok(())
}
