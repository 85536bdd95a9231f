//! `scripts/gpu cargo bench -p benches --bench decode [-- [--rounds N] [--quick] [--only NAME]]`
//!
//! Measures one query of 32 heads on 8 against 4096 keys, 128 wide. The keys are in tensors, or in
//! caches of every storage and layout. It prints medians of interleaved rounds on the device, next
//! to a kernel that only copies as many bytes. Then it measures a call among many calls in a pass.
//! Each call has different keys and values, as in a model's layers. After these come the growth of
//! the time with the length, and latent values. Last come moves of rows within caches, and the time
//! of an append. Except for the moves, every result is compared with the reference first. `--only`
//! selects the calls whose names contain its argument, and leaves out moves and appends.

use common::bed::{Bed, median};
use common::copy::{Copy, CopyForm};
use common::problem::{blank, compare_attention, read, rounded, tolerance, upload};
use common::rows::{append, of_attention, row};
use common::settings::{argument, quick};
use common::timer::{Timer, noise};
use rows::Row;
use wgpu_attention::cache::{Append, CacheLayout, CacheStorage, Keep, ScaleGroup, Tokens};
use wgpu_attention::reference::cache::{hadamard, stored};
use wgpu_attention::reference::compare::compare;
use wgpu_attention::reference::{Options, widen};
use wgpu_attention::tuning::Target;
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Forward, Gpu, KernelOptions, Mask, Scratch, Shape,
    TensorView,
};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
/// The channels of a latent key, and of its value.
const LATENT_DIMS: [usize; 2] = [576, 512];

/// A pass to time, whose result was right. It has a name, the call (if it is one), and the bytes
/// that it must read.
struct Subject<'a> {
    name: String,
    call: Option<(Shape, DType)>,
    bytes: f64,
    record: Box<dyn FnMut(&mut wgpu::ComputePass) + 'a>,
}

/// Returns the medians of `rounds`, in ms. All subjects alternate in each round.
fn medians(timer: &Timer, subjects: &mut [Subject], rounds: usize) -> Vec<f64> {
    let mut times = vec![Vec::new(); subjects.len()];
    for _ in 0..rounds {
        for (subject, times) in subjects.iter_mut().zip(&mut times) {
            times.push(timer.time(&mut subject.record).as_secs_f64() * 1e3);
        }
    }
    times.into_iter().map(|times| median(times).expect("a round")).collect()
}

/// Queries, keys and values. A sequence has one query.
struct Data {
    shape: Shape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Data {
    fn new(length: usize) -> Self {
        Data::batch(1, length)
    }

    /// Several sequences.
    fn batch(batch: usize, length: usize) -> Self {
        let shape = Shape { kv_heads: KV_HEADS, q_len: 1, ..Shape::new(batch, HEADS, length, DIM) };
        let each = batch * KV_HEADS * length * DIM;
        let rows = noise(2 * each, 7);
        let (k, v) = rows.split_at(each);
        Data { shape, q: noise(batch * HEADS * DIM, 3), k: k.to_vec(), v: v.to_vec() }
    }

    /// One head of keys. The first channels of a key are its value, as in multi-head latent
    /// attention.
    fn latent(heads: usize, length: usize) -> Self {
        let [head_dim, value_dim] = LATENT_DIMS;
        let shape = Shape { kv_heads: 1, q_len: 1, value_dim, ..Shape::new(1, heads, length, head_dim) };
        let k = noise(length * head_dim, 7);
        let v = k.chunks(head_dim).flat_map(|row| &row[..value_dim]).copied().collect();
        Data { shape, q: noise(heads * head_dim, 3), k, v }
    }

    /// A cache of keys and values of this shape.
    fn config(&self, capacity: usize) -> CacheConfig {
        let Shape { kv_heads, head_dim, value_dim, .. } = self.shape;
        CacheConfig::new(kv_heads, head_dim, capacity).value_dim(value_dim)
    }

    fn attention(&self, gpu: &Gpu, dtype: DType, options: KernelOptions) -> Attention {
        let Shape { heads, kv_heads, head_dim, value_dim, .. } = self.shape;
        let config = Config::new(heads, head_dim).kv_heads(kv_heads).value_dim(value_dim).dtype(dtype);
        let config = config.kernel_options(options);
        Attention::with_pipelines(gpu.pipelines(), config).expect("config")
    }

    fn out_len(&self) -> usize {
        self.shape.heads * self.shape.value_dim
    }

    /// Checks a result: a wrong kernel has no time. Queries have the type `queries`, and `result`
    /// sets the tolerance. `result` is f16 if a device may round a row to other levels than the
    /// reference.
    fn validate(
        &self,
        what: &str,
        stored: impl Fn(&[f32]) -> Vec<f32>,
        got: &[f32],
        [queries, result]: [DType; 2],
    ) {
        let rows = |x: &[f32], dim| x.chunks(dim).flat_map(&stored).collect::<Vec<_>>();
        let Shape { head_dim, value_dim, .. } = self.shape;
        let (q, k, v) = (rounded(self.q.clone(), queries), rows(&self.k, head_dim), rows(&self.v, value_dim));
        compare_attention(got, [&q, &k, &v], self.shape, &Options::default(), result)
            .unwrap_or_else(|wrong| panic!("{what} computes something else: {wrong}"));
    }
}

/// Returns a call on tensors.
fn tensors<'a>(bed: &'a Bed, data: &Data, dtype: DType) -> Subject<'a> {
    let gpu = &bed.gpu;
    let shape = data.shape;
    let [q, k, v] = [&data.q, &data.k, &data.v].map(|x| upload(gpu, x, dtype).expect("upload"));
    let out = blank(gpu, data.out_len(), dtype).expect("out");
    let attention = data.attention(gpu, dtype, KernelOptions::new());
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
            attention.forward(pass, &call, scratch).expect("forward");
        }
    };
    bed.timer.time(&mut record);
    let name = format!("tensors {dtype:?}");
    let stored = |row: &[f32]| rounded(row.to_vec(), dtype);
    data.validate(&name, stored, &read(gpu, &out, data.out_len(), dtype), [dtype; 2]);
    let bytes = ((data.k.len() + data.v.len()) * dtype.bytes()) as f64;
    Subject { name, call: Some((shape, dtype)), bytes, record: Box::new(record) }
}

/// The form in which a cache stores rows.
#[derive(Clone, Copy)]
struct Form {
    storage: CacheStorage,
    /// The width of the Walsh–Hadamard matrix.
    hadamard: Option<usize>,
    latent: bool,
    options: KernelOptions,
}

impl Form {
    fn new(storage: CacheStorage) -> Self {
        Form { storage, hadamard: None, latent: false, options: KernelOptions::new() }
    }

    fn of(self, config: CacheConfig) -> CacheConfig {
        config.storage(self.storage).hadamard(self.hadamard).latent(self.latent)
    }
}

/// Returns a cache that holds `data`.
fn filled(gpu: &Gpu, data: &Data, config: CacheConfig, form: Form) -> Cache {
    let mut cache = Cache::with_pipelines(gpu.pipelines(), form.of(config)).expect("a cache");
    let [k, v] = [&data.k, &data.v].map(|x| gpu.upload(x).expect("upload"));
    let [k, v] =
        [(&k, data.shape.k()), (&v, data.shape.v())].map(|(x, shape)| TensorView::new(x, DType::F32, shape));
    let append = if form.latent { Append::latent(k) } else { Append::new(k, v) };
    gpu.submit(|encoder| {
        cache.advance(encoder, Tokens::All(data.shape.kv_len))?;
        cache.append(encoder, 0, &append)
    })
    .expect("an append");
    cache
}

/// Returns a call on a cache.
fn cached<'a>(bed: &'a Bed, data: &Data, config: CacheConfig, name: String, form: Form) -> Subject<'a> {
    let gpu = &bed.gpu;
    let shape = data.shape;
    let cache = filled(gpu, data, config, form);
    let q = gpu.upload(&data.q).expect("q");
    let out = blank(gpu, data.out_len(), DType::F32).expect("out");
    let attention = data.attention(gpu, DType::F32, form.options);
    let bytes = (form.of(config).token_bytes() * shape.kv_len) as f64;
    let mut scratch = None;
    let mut record = {
        let out = out.clone();
        move |pass: &mut wgpu::ComputePass| {
            let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
            let (q, out) = (view(&q, shape.q()), view(&out, shape.out()));
            let call = Forward::with_cache(q, &cache, out).at_end().mask(Mask::causal());
            let scratch = scratch.get_or_insert_with(|| {
                let size = attention.scratch_size(&call).expect("size");
                Scratch::new(attention.pipelines().device(), size).expect("scratch")
            });
            attention.forward(pass, &call, scratch).expect("forward");
        }
    };
    bed.timer.time(&mut record);
    let Form { storage, hadamard: block, .. } = form;
    let exact = matches!(storage, CacheStorage::F32 | CacheStorage::BF16);
    let result = if exact { DType::F32 } else { DType::F16 };
    data.validate(
        &name,
        |row| match block {
            Some(block) => hadamard(&stored(storage, &hadamard(row, block)), block),
            None => stored(storage, row),
        },
        &read(gpu, &out, data.out_len(), DType::F32),
        [DType::F32, result],
    );
    Subject { name, call: Some((shape, DType::F32)), bytes, record: Box::new(record) }
}

/// Prints times and their share of the best copy's rate, in GB/s, and appends them as rows.
fn print(gpu: &Gpu, title: &str, subjects: &[Subject], times: &[f64], copy: f64) {
    println!("\n{title}\n{:38} {:>9} {:>8} {:>8} {:>8}", "", "ms", "MB read", "GB/s", "of copy");
    for (Subject { name, call, bytes, .. }, ms) in subjects.iter().zip(times) {
        let (rate, mb, floor) = (bytes / ms / 1e6, bytes / 1e6, bytes / copy / 1e6);
        println!("{name:38} {ms:9.3} {mb:8.2} {rate:8.2} {:8.2}", rate / copy);
        let Some((shape, dtype)) = call else { continue };
        append(&Row {
            ms: Some(*ms),
            floor_ms: Some(floor),
            bound: Some("memory".into()),
            share: Some(floor / ms),
            ..of_attention(row(gpu, "decode", name), *shape, "none", *dtype)
        });
    }
}

fn main() {
    let rounds =
        argument("--rounds").map_or(if quick() { 3 } else { 31 }, |n| n.parse().expect("--rounds N"));
    let Some(bed) = Bed::open() else { return };
    let (gpu, timer) = (&bed.gpu, &bed.timer);
    println!("medians of {rounds} rounds");
    let only = argument("--only").unwrap_or_default();
    let wanted = |name: &str| name.contains(&only);
    // As many bytes as keys and values have in f32.
    let length = if quick() { 512 } else { 4096 };
    let words = 2 * KV_HEADS * length * DIM;
    let copy = |form: CopyForm| {
        let copy = Copy::new(gpu, form, words);
        timer.time(|pass| copy.record(pass));
        pollster::block_on(copy.validate(gpu));
        let (name, bytes) = (format!("copy, {form}"), copy.bytes());
        Subject { name, call: None, bytes, record: Box::new(move |pass| copy.record(pass)) }
    };
    let mut subjects: Vec<Subject> = CopyForm::ALL.map(copy).into();
    let data = Data::new(length);
    let config = data.config(length);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if (dtype != DType::F16 || bed.f16()) && wanted(&format!("tensors {dtype:?}")) {
            subjects.push(tensors(&bed, &data, dtype));
        }
    }
    let group = ScaleGroup::Of(32);
    for storage in [
        CacheStorage::F32,
        CacheStorage::F16,
        CacheStorage::BF16,
        CacheStorage::Q8(group),
        CacheStorage::Q8(ScaleGroup::Row),
        CacheStorage::Q4(group),
        CacheStorage::E4M3(ScaleGroup::Row),
        CacheStorage::E5M2(ScaleGroup::Row),
        CacheStorage::Gaussian4(ScaleGroup::Row),
    ] {
        if quick() && ![CacheStorage::F32, CacheStorage::Q8(group)].contains(&storage) {
            continue;
        }
        let name = format!("cache {storage:?}");
        if !wanted(&name) {
            continue;
        }
        let form = Form::new(storage);
        subjects.push(cached(&bed, &data, config, name.clone(), form));
        if matches!(storage, CacheStorage::Q8(_) | CacheStorage::Q4(_) | CacheStorage::Gaussian4(_)) {
            let name = format!("{name}, times a matrix");
            subjects.push(cached(&bed, &data, config, name, Form { hadamard: Some(DIM), ..form }));
        }
    }
    for layout in [
        CacheLayout::Ring { sink_tokens: 4 },
        CacheLayout::Paged { page: 16, pages: length / 16 },
        CacheLayout::Paged { page: 256, pages: length / 256 },
    ] {
        if quick() && matches!(layout, CacheLayout::Paged { page: 256, .. }) {
            continue;
        }
        let storage = CacheStorage::Q8(group);
        let name = format!("cache {storage:?} {layout:?}");
        if wanted(&name) {
            subjects.push(cached(&bed, &data, config.layout(layout), name, Form::new(storage)));
        }
    }
    for storage in [CacheStorage::F16, CacheStorage::Q8(group)] {
        let name = format!("cache {storage:?} that can remove tokens");
        if !quick() && wanted(&name) {
            subjects.push(cached(&bed, &data, config.compacts(true), name, Form::new(storage)));
        }
    }
    let options = KernelOptions::new();
    for (what, options) in [
        ("batch-invariant", options.batch_invariant(true)),
        ("kernels for GPUs", options.target(Target::Gpu)),
    ] {
        for storage in [CacheStorage::F32, CacheStorage::F16, CacheStorage::Q8(group)] {
            let name = format!("cache {storage:?}, {what}");
            if !quick() && wanted(&name) {
                subjects.push(cached(&bed, &data, config, name, Form { options, ..Form::new(storage) }));
            }
        }
    }
    let times = medians(timer, &mut subjects, rounds);
    let times_of_copies = times[..CopyForm::ALL.len()].to_vec();
    let copied = (0..CopyForm::ALL.len()).map(|n| subjects[n].bytes / times[n] / 1e6).fold(0.0, f64::max);
    let title = format!("1 query, 32 heads on 8, {length} keys, 128 wide");
    print(gpu, &title, &subjects, &times, copied);
    drop(subjects);

    println!("\neach of {CHAIN} calls in one pass, on {SETS} sets of keys and values");
    for dtype in [DType::F32, DType::F16] {
        if (dtype != DType::F16 || bed.f16()) && wanted(&format!("chain {dtype:?}")) {
            chain(&bed, dtype, length, rounds.min(9));
        }
    }

    let mut subjects = Vec::new();
    for (length, capacity) in
        [(16, 16384), (256, 16384), (1024, 16384), (1024, 1024), (4096, 16384), (16384, 16384)]
    {
        let storage = CacheStorage::Q8(group);
        if quick() && ![256, 1024].contains(&length) {
            continue;
        }
        let name = format!("{length} keys, capacity {capacity}");
        if !wanted(&name) {
            continue;
        }
        let data = Data::new(length);
        subjects.push(cached(&bed, &data, data.config(capacity), name, Form::new(storage)));
    }
    let times = medians(timer, &mut subjects, rounds);
    print(gpu, "how it grows, Q8", &subjects, &times, copied);
    drop(subjects);

    let mut subjects = Vec::new();
    for heads in [1, 16] {
        let data = Data::latent(heads, length);
        for (storage, latent) in [CacheStorage::F32, CacheStorage::F16, CacheStorage::Q8(group)]
            .into_iter()
            .flat_map(|storage| [(storage, false), (storage, true)])
        {
            let of = if latent { "latent values" } else { "values apart" };
            let name = format!("{heads} heads, {storage:?}, {of}");
            if !quick() && wanted(&name) {
                subjects.push(cached(
                    &bed,
                    &data,
                    data.config(length),
                    name,
                    Form { latent, ..Form::new(storage) },
                ));
            }
        }
    }
    let times = medians(timer, &mut subjects, rounds);
    let title = format!("1 query, heads on 1, {length} keys {LATENT_DIMS:?} wide");
    print(gpu, &title, &subjects, &times, copied);
    drop(subjects);

    if !only.is_empty() {
        return;
    }
    println!("\nmoves of rows within a cache: the time for one layer, and the share of copy");
    // Long enough that the dispatches for the table do not count.
    let length = 4 * length;
    let best = CopyForm::ALL.into_iter().zip(&times_of_copies).min_by(|a, b| a.1.total_cmp(b.1));
    let copy = Copy::new(gpu, best.expect("a form").0, words);
    let odd: Vec<usize> = (1..length).step_by(2).collect();
    let late: Vec<usize> = (length / 2..length).collect();
    let one = Data::new(length);
    let four = Data::batch(4, length / 4);
    for storage in [CacheStorage::F32, CacheStorage::F16, CacheStorage::Q8(group)] {
        let form = Form::new(storage);
        let one = (&one, one.config(length).compacts(true), form);
        let [odd, late] = [&odd, &late].map(|keep| {
            move_times(&bed, &copy, one, rounds.min(9), |cache, pass| {
                cache.compact(pass, Keep::Each(&[keep])).expect("a compaction");
            })
        });
        let four = (&four, four.config(length / 4).batch(4), form);
        let reorder = move_times(&bed, &copy, four, rounds.min(9), |cache, pass| {
            cache.reorder(pass, &[1, 1, 3, 3]).expect("a reorder");
        });
        // Both move half of the rows. A move reads and writes.
        for (what, [ms, of_copy], config) in [
            ("without every second token", odd, one.1),
            ("without the first half", late, one.1),
            ("two of four sequences continue from the others", reorder, four.1),
        ] {
            let bytes = (form.of(config).token_bytes() * length) as f64;
            println!("{what}, {storage:?}: {ms:.3} ms, {:.2}", bytes / ms / (copy.bytes() / of_copy));
        }
    }

    println!("\na step without attention: advance by a token and append it, host time aside");
    for (layout, length) in [
        (CacheLayout::Contiguous, 10),
        (CacheLayout::Contiguous, 100_000),
        (CacheLayout::Paged { page: 64, pages: 2048 }, 10),
        (CacheLayout::Paged { page: 64, pages: 2048 }, 100_000),
    ] {
        println!("{layout:?} at {length}: {:.1} µs", append_time(gpu, timer, layout, length, rounds));
    }
}

/// The number of calls in a pass, and of sets of keys and values. Together the sets are larger than
/// a GPU's cache.
const CHAIN: usize = 32;
const SETS: usize = 8;

/// Measures one call among many that follow each other in a pass.
fn chain(bed: &Bed, dtype: DType, length: usize, rounds: usize) {
    let mut layers: Vec<Subject> =
        (0..if quick() { 2 } else { SETS }).map(|_| tensors(bed, &Data::new(length), dtype)).collect();
    let sets = layers.len();
    let mut pass_time = || {
        bed.timer.time(|pass| (0..CHAIN).for_each(|n| (layers[n % sets].record)(pass))).as_secs_f64() * 1e3
    };
    pass_time();
    let ms = median((0..rounds).map(|_| pass_time()).collect()).expect("a round") / CHAIN as f64;
    let Subject { call, bytes, .. } = &layers[0];
    let (shape, dtype) = call.expect("a call");
    let floor = bytes / bed.ceilings().copy_gbs.giga / 1e6;
    let name = format!("one of {CHAIN} {dtype:?}");
    println!("{name:40} {ms:8.4} {:8.2} {:8.2} {:8.2}", bytes / 1e6, bytes / ms / 1e6, floor / ms);
    let row = of_attention(row(&bed.gpu, "decode", &name), shape, "none", dtype);
    let (bound, share) = (Some("memory".into()), Some(floor / ms));
    append(&Row { ms: Some(ms), floor_ms: Some(floor), bound, share, ..row });
}

/// Returns the median times of moves in a cache that holds the data, and of a copy, in ms.
fn move_times(
    bed: &Bed,
    copy: &Copy,
    (data, config, form): (&Data, CacheConfig, Form),
    rounds: usize,
    record: impl Fn(&mut Cache, &mut wgpu::ComputePass),
) -> [f64; 2] {
    let time_copy = || bed.timer.time(|pass| copy.record(pass));
    let times = (0..rounds).map(|_| {
        let mut cache = filled(&bed.gpu, data, config, form);
        // Waits until the rows are stored.
        time_copy();
        [bed.timer.time(|pass| record(&mut cache, pass)), time_copy()]
    });
    let times: Vec<_> = times.collect();
    [0, 1].map(|n| median(times.iter().map(|t| t[n].as_secs_f64() * 1e3).collect()).expect("a round"))
}

/// Returns the median time of an append at `length`, in µs. First a query that sees only its own
/// token checks the appended row.
fn append_time(gpu: &Gpu, timer: &Timer, layout: CacheLayout, length: usize, rounds: usize) -> f64 {
    let storage = CacheStorage::Q8(ScaleGroup::Of(32));
    let config = CacheConfig::new(1, 64, 1 << 17).layout(layout).storage(storage);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(1, 64)).expect("config");
    let data = noise(64, 1);
    let row = gpu.upload(&data).expect("upload");
    let out = blank(gpu, 64, DType::F32).expect("out");
    let view = |buffer| TensorView::new(buffer, DType::F32, [1, 1, 1, 64]);
    let mask = Mask::causal().window(0, 0);
    let size = Forward::with_cache(view(&row), &cache, view(&out)).at_end().mask(mask);
    let size = attention.scratch_size(&size).expect("size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    cache.reserve(0, length + 2 * rounds + 2).expect("pages");
    gpu.submit(|encoder| cache.advance(encoder, Tokens::All(length))).expect("an advance");
    let append = |cache: &mut Cache| {
        gpu.submit(|encoder| cache.advance(encoder, Tokens::All(1))).expect("an advance");
        let append = Append::new(view(&row), view(&row));
        let time = timer.time(|pass| cache.append(pass, 0, &append).expect("an append"));
        time.as_secs_f64() * 1e6
    };
    append(&mut cache);
    let call = Forward::with_cache(view(&row), &cache, view(&out)).mask(mask);
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch)).expect("forward");
    let stored = stored(storage, &data);
    let want: Vec<f64> = widen(&stored);
    compare(&read(gpu, &out, 64, DType::F32), &want, tolerance(&stored, &want, DType::F32))
        .unwrap_or_else(|wrong| panic!("{layout:?} at {length} holds something else: {wrong}"));
    median((0..2 * rounds).map(|_| append(&mut cache)).collect()).expect("a round")
}
