//! `scripts/gpu cargo bench --bench decode [-- ROUNDS]`
//!
//! One query of 32 heads on 8 against 4096 keys, 128 wide, from tensors and from caches of every storage and layout: time on the
//! device, medians of rounds that take turns, beside a kernel that only copies as many bytes. Then how the time
//! grows with the length, and what an append costs. Every result is compared with the reference first.

mod common;

use std::time::Duration;

use common::copy::{Copy, CopyForm};
use common::device;
use common::timer::{Timer, noise};
use wgpu_attention::reference::{self, Options, compare::max_error, widen};
use wgpu_attention::{
    Append, Attention, Cache, CacheConfig, CacheLayout, CacheStorage, CachedForward, Config, DType, Forward,
    Gpu, Mask, ScaleGroup, Scratch, ScratchSize, Shape, TensorView, Tokens,
};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;

/// Something to time: what it is called, the bytes it must read, and its pass.
struct Subject<'a> {
    name: String,
    bytes: f64,
    record: Box<dyn FnMut(&mut wgpu::ComputePass) + 'a>,
}

/// Medians of `rounds`, in which all take turns.
fn medians(timer: &Timer, subjects: &mut [Subject], rounds: usize) -> Vec<Duration> {
    let mut times = vec![Vec::new(); subjects.len()];
    for _ in 0..rounds {
        for (subject, times) in subjects.iter_mut().zip(&mut times) {
            times.push(timer.time(&mut subject.record));
        }
    }
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    times.into_iter().map(median).collect()
}

/// Keys and values of one sequence, `[kv_heads, length, dim]`.
struct Data {
    length: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Data {
    fn new(length: usize) -> Self {
        let rows = noise(2 * KV_HEADS * length * DIM, 7);
        let (k, v) = rows.split_at(KV_HEADS * length * DIM);
        Data { length, q: noise(HEADS * DIM, 3), k: k.to_vec(), v: v.to_vec() }
    }

    fn shape(&self) -> Shape {
        Shape { kv_heads: KV_HEADS, q_len: 1, ..Shape::new(1, HEADS, self.length, DIM) }
    }

    /// A wrong kernel has no time. Of a device that rounds to other levels than the reference one or two differ.
    fn validate(&self, what: &str, stored: impl Fn(&[f32]) -> Vec<f32>, got: &[f32], tolerance: f64) {
        let rows = |x: &[f32]| -> Vec<f64> { widen(&x.chunks(DIM).flat_map(&stored).collect::<Vec<_>>()) };
        let q: Vec<f32> = stored_as(&self.q, tolerance);
        let want = reference::attention::<f64>(
            &widen(&q),
            &rows(&self.k),
            &rows(&self.v),
            &self.shape(),
            &Options::default(),
        );
        let error = max_error(&widen::<f64>(got), &want.expect("a shape").out);
        assert!(error < tolerance, "{what}: off by {error:e}");
    }
}

/// Queries as an f16 call has them, which the tolerance tells.
fn stored_as(q: &[f32], tolerance: f64) -> Vec<f32> {
    if tolerance == F16_TOLERANCE { reference::cache::stored(CacheStorage::F16, q) } else { q.to_vec() }
}

const F32_TOLERANCE: f64 = 1e-5;
const F16_TOLERANCE: f64 = 1e-3;
const LEVELS_TOLERANCE: f64 = 2e-3;

fn halves(gpu: &Gpu, x: &[f32]) -> wgpu::Buffer {
    let halves: Vec<u16> = x.iter().map(|x| half::f16::from_f32(*x).to_bits()).collect();
    gpu.upload(&halves).expect("upload")
}

/// A call on tensors.
fn tensors<'a>(gpu: &'a Gpu, data: &Data, dtype: DType) -> Subject<'a> {
    let shape = data.shape();
    let upload =
        |x: &[f32]| if dtype == DType::F16 { halves(gpu, x) } else { gpu.upload(x).expect("upload") };
    let [q, k, v] = [&data.q, &data.k, &data.v].map(|x| upload(x));
    let out = gpu.buffer(HEADS * DIM * 4).expect("out");
    let config = Config::new(HEADS, DIM).kv_heads(KV_HEADS).dtype(dtype);
    let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("config");
    let mut scratch = None;
    let mut record = {
        let out = out.clone();
        move |pass: &mut wgpu::ComputePass| {
            let view = |buffer, shape| TensorView::new(buffer, dtype, shape);
            let call = Forward::new(
                view(&q, shape.q()),
                view(&k, shape.k()),
                view(&v, shape.v()),
                view(&out, shape.out()),
            );
            let scratch = scratch.get_or_insert_with(|| {
                Scratch::new(attention.pipelines().device(), attention.scratch_size(&call).expect("size"))
                    .expect("scratch")
            });
            attention.forward_in_pass(pass, &call, scratch).expect("forward");
        }
    };
    run(gpu, &mut record);
    let name = format!("tensors {dtype:?}");
    if dtype == DType::F16 {
        let got: Vec<u16> = gpu.download(&out, HEADS * DIM).expect("out");
        let got: Vec<f32> = got.into_iter().map(|x| half::f16::from_bits(x).to_f32()).collect();
        data.validate(&name, |row| reference::cache::stored(CacheStorage::F16, row), &got, F16_TOLERANCE);
    } else {
        let got: Vec<f32> = gpu.download(&out, HEADS * DIM).expect("out");
        data.validate(&name, <[f32]>::to_vec, &got, F32_TOLERANCE);
    }
    let bytes = ((data.k.len() + data.v.len()) * dtype.bytes()) as f64;
    Subject { name, bytes, record: Box::new(record) }
}

fn run(gpu: &Gpu, record: impl FnOnce(&mut wgpu::ComputePass)) {
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    record(&mut encoder.begin_compute_pass(&Default::default()));
    gpu.queue().submit([encoder.finish()]);
    gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("a device");
}

/// A cache that holds `data`.
fn filled(gpu: &Gpu, data: &Data, config: CacheConfig) -> Cache {
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
    let [k, v] = [&data.k, &data.v].map(|x| gpu.upload(x).expect("upload"));
    let view = |buffer| TensorView::new(buffer, DType::F32, [1, KV_HEADS, data.length, DIM]);
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    gpu.submit(|encoder| {
        cache.advance(encoder, Tokens::All(data.length), &mut scratch)?;
        cache.append(encoder, 0, &Append::new(view(&k), view(&v)), &mut scratch)
    })
    .expect("an append");
    cache
}

/// A call on a cache.
fn cached<'a>(
    gpu: &'a Gpu,
    data: &Data,
    config: CacheConfig,
    name: String,
    storage: CacheStorage,
) -> Subject<'a> {
    let cache = filled(gpu, data, config);
    let q = gpu.upload(&data.q).expect("q");
    let out = gpu.buffer(HEADS * DIM * 4).expect("out");
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(HEADS, DIM).kv_heads(KV_HEADS))
        .expect("config");
    let bytes = (config.token_bytes() * data.length) as f64;
    let mut scratch = None;
    let mut record = {
        let out = out.clone();
        move |pass: &mut wgpu::ComputePass| {
            let view = |buffer| TensorView::new(buffer, DType::F32, [1, HEADS, 1, DIM]);
            let call = CachedForward::new(view(&q), &cache, view(&out)).not_advanced().mask(Mask::causal());
            let scratch = scratch.get_or_insert_with(|| {
                let size = attention.scratch_size_cached(&call).expect("size");
                Scratch::new(attention.pipelines().device(), size).expect("scratch")
            });
            attention.forward_cached_in_pass(pass, &call, scratch).expect("forward");
        }
    };
    run(gpu, &mut record);
    let got: Vec<f32> = gpu.download(&out, HEADS * DIM).expect("out");
    let tolerance = if storage == CacheStorage::F32 { F32_TOLERANCE } else { LEVELS_TOLERANCE };
    data.validate(&name, |row| reference::cache::stored(storage, row), &got, tolerance);
    Subject { name, bytes, record: Box::new(record) }
}

fn print(title: &str, subjects: &[Subject], times: &[Duration], copy: f64) {
    println!("\n{title}\n{:38} {:>9} {:>8} {:>8} {:>8}", "", "ms", "MB read", "GB/s", "of copy");
    for (subject, time) in subjects.iter().zip(times) {
        let rate = subject.bytes / time.as_secs_f64() / 1e9;
        let (name, ms, mb) = (&subject.name, time.as_secs_f64() * 1e3, subject.bytes / 1e6);
        println!("{name:38} {ms:9.3} {mb:8.2} {rate:8.2} {:8.2}", rate / copy);
    }
}

fn main() {
    let rounds = std::env::args().skip(1).find_map(|a| a.parse().ok()).unwrap_or(15);
    let gpu = device::open().gpu;
    let timer = Timer::new(&gpu).expect("timestamp queries");
    println!("{}, medians of {rounds} rounds", gpu.device().adapter_info().name);
    let config = |capacity| CacheConfig::new(KV_HEADS, DIM, capacity);

    // As many bytes as keys and values in f32.
    let words = 2 * KV_HEADS * 4096 * DIM;
    let copy = |form: CopyForm| {
        let copy = Copy::new(&gpu, form, words);
        run(&gpu, |pass| copy.record(pass));
        copy.validate(&gpu);
        let (name, bytes) = (format!("copy, {form}"), copy.bytes());
        Subject { name, bytes, record: Box::new(move |pass| copy.record(pass)) }
    };
    let mut subjects: Vec<Subject> = CopyForm::ALL.map(copy).into();
    let data = Data::new(4096);
    subjects.push(tensors(&gpu, &data, DType::F32));
    if gpu.device().features().contains(wgpu::Features::SHADER_F16) {
        subjects.push(tensors(&gpu, &data, DType::F16));
    }
    let group = ScaleGroup::Of(32);
    for storage in [
        CacheStorage::F32,
        CacheStorage::F16,
        CacheStorage::Q8(group),
        CacheStorage::Q8(ScaleGroup::Row),
        CacheStorage::Q4(group),
    ] {
        let name = format!("cache {storage:?}");
        subjects.push(cached(&gpu, &data, config(4096).storage(storage), name, storage));
    }
    for layout in [
        CacheLayout::Ring { sinks: 4 },
        CacheLayout::Paged { page: 16, pages: 256 },
        CacheLayout::Paged { page: 256, pages: 16 },
    ] {
        let storage = CacheStorage::Q8(group);
        let config = config(4096).storage(storage).layout(layout);
        subjects.push(cached(&gpu, &data, config, format!("cache {storage:?} {layout:?}"), storage));
    }
    let times = medians(&timer, &mut subjects, rounds);
    let copied = (0..CopyForm::ALL.len())
        .map(|n| subjects[n].bytes / times[n].as_secs_f64() / 1e9)
        .fold(0.0, f64::max);
    print("1 query, 32 heads on 8, 4096 keys, 128 wide", &subjects, &times, copied);
    drop(subjects);

    let mut subjects = Vec::new();
    for (length, capacity) in
        [(16, 16384), (256, 16384), (1024, 16384), (1024, 1024), (4096, 16384), (16384, 16384)]
    {
        let storage = CacheStorage::Q8(group);
        let name = format!("{length} keys, capacity {capacity}");
        subjects.push(cached(&gpu, &Data::new(length), config(capacity).storage(storage), name, storage));
    }
    let times = medians(&timer, &mut subjects, rounds);
    print("how it grows, Q8", &subjects, &times, copied);
    drop(subjects);

    // Two tokens a step forward and one back, so that rounds do not fill the cache.
    println!("\na step without attention: advance by a token and append it, host time aside");
    for (layout, length) in [
        (CacheLayout::Contiguous, 10),
        (CacheLayout::Contiguous, 100_000),
        (CacheLayout::Paged { page: 64, pages: 2048 }, 10),
        (CacheLayout::Paged { page: 64, pages: 2048 }, 100_000),
    ] {
        println!("{layout:?} at {length}: {:.1} µs", append_time(&gpu, &timer, layout, length, rounds));
    }
}

/// Median time of an append at `length`, in µs.
fn append_time(gpu: &Gpu, timer: &Timer, layout: CacheLayout, length: usize, rounds: usize) -> f64 {
    let config =
        CacheConfig::new(1, 64, 1 << 17).layout(layout).storage(CacheStorage::Q8(ScaleGroup::Of(32)));
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    cache.reserve(0, length + 2 * rounds + 2).expect("pages");
    gpu.submit(|encoder| cache.advance(encoder, Tokens::All(length), &mut scratch)).expect("an advance");
    let row = gpu.upload(&noise(64, 1)).expect("upload");
    let view = TensorView::new(&row, DType::F32, [1, 1, 1, 64]);
    let mut times: Vec<f64> = (0..2 * rounds)
        .map(|_| {
            gpu.submit(|encoder| cache.advance(encoder, Tokens::All(1), &mut scratch)).expect("an advance");
            let append = Append::new(view, view);
            let time =
                timer.time(|pass| cache.append_in_pass(pass, 0, &append, &mut scratch).expect("an append"));
            time.as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
