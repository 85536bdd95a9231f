//! Errors of caches, and of attention to them.

use wgpu_attention::cache::{Append, CacheLayout, CacheRead, CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::mask::Blocks;
use wgpu_attention::position::{Rope, RopeConfig, RopeSections, RowPositions};
use wgpu_attention::{Alignment, Cache, CacheConfig, Forward, KernelOptions, Pipelines};

use super::*;

const CAPACITY: usize = 20;
const ROWS: usize = 3;

fn config() -> CacheConfig {
    CacheConfig::new(SHAPE.kv_heads, SHAPE.head_dim, CAPACITY)
        .batch(SHAPE.batch)
        .value_dim(SHAPE.value_dim)
        .layers(2)
}

/// A cache that was advanced by [`ROWS`], and the tensors of a step.
struct Step {
    cache: Cache,
    k: wgpu::Buffer,
    v: wgpu::Buffer,
    q: wgpu::Buffer,
}

impl Step {
    fn new(gpu: &Gpu, config: CacheConfig) -> Self {
        let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
        gpu.submit(|e| cache.advance(e, Tokens::All(ROWS))).expect("room");
        let [k, v, q] = [0.3, 0.5, 0.7].map(|seed| gpu.upload(&noise(1024, seed)).expect("an upload"));
        Step { cache, k, v, q }
    }

    fn k(&self) -> TensorView<'_> {
        TensorView::new(&self.k, DType::F32, [SHAPE.batch, SHAPE.kv_heads, ROWS, SHAPE.head_dim])
    }

    fn v(&self) -> TensorView<'_> {
        TensorView::new(&self.v, DType::F32, [SHAPE.batch, SHAPE.kv_heads, ROWS, SHAPE.value_dim])
    }

    fn q(&self) -> TensorView<'_> {
        TensorView::new(&self.q, DType::F32, SHAPE.q())
    }
}

pub(super) fn caches_made() -> Seen {
    let gpu = &full().gpu;
    let mut seen = Seen::new();
    let mut refused = |words: &[&str], config: CacheConfig| {
        let error = Cache::with_pipelines(gpu.pipelines(), config).expect_err("refused");
        seen.insert(read("a cache", &error, words));
    };
    let zero = |axis| [format!("`cache`: {axis} is 0"), "at least 1".into()];
    for (axis, config) in [
        ("batch", config().batch(0)),
        ("kv_heads", CacheConfig::new(0, 8, 20)),
        ("head_dim", CacheConfig::new(2, 0, 20).value_dim(1)),
        ("value_dim", config().value_dim(0)),
        ("capacity", CacheConfig::new(2, 8, 0)),
        ("layers", config().layers(0)),
    ] {
        refused(&zero(axis).each_ref().map(String::as_str), config);
    }
    for (axis, config) in [
        ("batch", config().batch(1 << 29)),
        ("capacity", CacheConfig::new(1, 8, usize::MAX)),
        ("head_dim", CacheConfig::new(1, usize::MAX, 4).value_dim(4)),
        ("layers", config().layers(usize::MAX)),
    ] {
        refused(&[axis, "below 2^29"], config);
    }
    for n in [0, 1, 16, 31, 33, 100] {
        for storage in [CacheStorage::Q8(ScaleGroup::Of(n)), CacheStorage::Q4(ScaleGroup::Of(n))] {
            refused(&["group", &format!("is {n};"), "a multiple of 32"], config().storage(storage));
        }
    }
    for sinks in [CAPACITY, CAPACITY + 1, usize::MAX] {
        refused(
            &["sink_tokens", "below `capacity`"],
            config().layout(CacheLayout::Ring { sink_tokens: sinks }),
        );
    }
    for spare in [CAPACITY - 1, CAPACITY, usize::MAX] {
        let ring = config().layout(CacheLayout::Ring { sink_tokens: 1 });
        refused(&["spare_tokens", "below `capacity` minus `sink_tokens`"], ring.spare_tokens(spare));
    }
    for layout in [CacheLayout::Contiguous, CacheLayout::Paged { page: 16, pages: 4 }] {
        let words = ["`spare_tokens` is 1", "`CacheLayout::Ring`"];
        refused(&words, config().layout(layout).spare_tokens(1));
    }
    for page in [0, 1, 8, 15, 17, 48, 257, 512, usize::MAX] {
        let layout = CacheLayout::Paged { page, pages: 4 };
        refused(&["page", "a power of two from 16 to 256"], config().layout(layout));
    }
    for pages in [0, usize::MAX] {
        let layout = CacheLayout::Paged { page: 16, pages };
        refused(&["pages", "at least 1", "2^29"], config().layout(layout));
    }
    // One token more than a binding holds, for keys, values and a sequence table.
    let most = gpu.device().limits().max_storage_buffer_binding_size.min((1 << 32) - 4) as usize;
    let tokens = most / (4 * 1024) + 1;
    let words = |side| [side, "max_storage_buffer_binding_size", "split_by_heads"];
    refused(&words("the keys"), CacheConfig::new(1, 1024, tokens).value_dim(1));
    refused(&words("the values"), CacheConfig::new(1, 1, tokens).value_dim(1024));
    refused(
        &["`cache (sequence table)`"],
        CacheConfig::new(1 << 28, 1 << 28, 1 << 28).batch(1 << 28).layers(1 << 28),
    );
    let small = device(|limits| limits.max_storage_buffer_binding_size = 4096);
    // Two heads of 64 tokens of 8 channels. One page more is too much.
    let paged = |pages| {
        let layout = CacheLayout::Paged { page: 16, pages };
        CacheConfig::new(2, 8, 1024).layout(layout)
    };
    Cache::with_pipelines(small.pipelines(), paged(4)).expect("just the limit");
    let error = Cache::with_pipelines(small.pipelines(), paged(5)).expect_err("a page too many");
    seen.insert(read("a cache", &error, &["the keys of a cache layer", "5120 bytes", "allows 4096"]));
    let long = CacheConfig::new(1, 1, 16 * 2000).layout(CacheLayout::Paged { page: 16, pages: 1 });
    let error = Cache::with_pipelines(small.pipelines(), long).expect_err("a long page table");
    seen.insert(read("a cache", &error, &["`cache (sequence table)`", "8032 bytes", "allows 4096"]));
    seen
}

/// Errors before anything is recorded: of changes that only the host makes, and of recorded calls.
pub(super) fn moves_of_caches() -> Seen {
    let mut bench = Bench::new();
    let gpu = bench.gpu.clone();
    let mut step = Step::new(&gpu, config());
    let counts = gpu.upload(&[1u32; 8]).expect("an upload");
    let view = |dtype, shape| TensorView::new(&counts, dtype, shape);
    let device = |counts| Tokens::Device { counts, most: 2 };
    let good = view(DType::U32, [2, 1, 1, 1]);
    let unusable = buffer(gpu.device(), 64, wgpu::BufferUsages::COPY_DST);
    let unusable = TensorView::new(&unusable, DType::U32, [2, 1, 1, 1]);
    let lengths = step.cache.lengths();
    let (own, strides) = (lengths.buffer().clone(), lengths.strides());
    let own = TensorView::new(&own, DType::U32, [2, 1, 1, 1]).with_strides(strides);
    let cases: Vec<(&[&str], Tokens)> = vec![
        (&["`cache`: rows is 0", "at least 1"], Tokens::All(0)),
        (&["`cache`: rows is 0"], Tokens::Each(&[0, 0])),
        (&["`cache`: rows is 0"], Tokens::Each(&[])),
        (&["`cache`: rows is 0"], Tokens::Device { counts: good, most: 0 }),
        (&["`rows`", "2 elements expected, got 1"], Tokens::Each(&[1])),
        (&["`rows`", "2 elements expected, got 3"], Tokens::Each(&[1, 1, 1])),
        (&["`counts`", "must be U32", "F32"], device(view(DType::F32, [2, 1, 1, 1]))),
        (&["`counts`", "batch must be 2", "got 1"], device(view(DType::U32, [1, 1, 1, 1]))),
        (&["`counts`", "must be 1", "got 2"], device(view(DType::U32, [2, 2, 1, 1]))),
        (&["`counts`", "ends at byte"], device(good.with_offset(7))),
        (&["`counts`", "usage", "STORAGE"], device(unusable)),
        (&["`cache`", "`counts`", "a separate buffer"], device(own)),
    ];
    for (words, rows) in &cases {
        bench.refuses_with(words[0], words, |e| step.cache.advance(e, *rows));
        bench.refuses_with(words[0], words, |e| step.cache.rewind(e, *rows));
    }
    let lists: [(&[&str], &[usize]); 5] = [
        (&["`parents`", "2 elements expected, got 0"], &[]),
        (&["`parents`", "2 elements expected, got 1"], &[0]),
        (&["`parents`", "2 elements expected, got 3"], &[0, 1, 0]),
        (&["`parents` is 2", "below the number"], &[0, 2]),
        (&["`parents` is", "below the number"], &[usize::MAX, 0]),
    ];
    for (words, parents) in lists {
        bench.refuses_with(words[0], words, |e| step.cache.reorder(e, parents));
    }
    let full: [(&[&str], Tokens); 3] = [
        (&["sequence 0 of the cache has 3 of at most 20 tokens, so 18 more do not fit"], Tokens::All(18)),
        (&["sequence 1", "3 of at most 20 tokens", "18"], Tokens::Each(&[17, 18])),
        (&["sequence 1", "truncate", "ring", "larger"], Tokens::Each(&[0, usize::MAX])),
    ];
    for (words, rows) in full {
        bench.refuses_with(words[0], words, |e| step.cache.advance(e, rows));
    }
    for rows in [Tokens::All(4), Tokens::Each(&[1, 4])] {
        let words = ["`rows` is 4", "at most the smallest possible length"];
        bench.refuses_with("rewind", &words, |e| step.cache.rewind(e, rows));
    }
    assert_eq!(step.cache.len(1), Some(3), "nothing has moved");

    // Changes that only the host makes.
    let cache = &mut step.cache;
    let mut said = |words: &[&str], result: Result<(), Error>| {
        bench.seen.insert(read(words[0], &result.expect_err(words[0]), words));
    };
    let none = ["`sequence` is 2", "a sequence of the cache"];
    said(&none, cache.truncate(2, 0));
    said(&none, cache.clear(2));
    said(&none, cache.set_known_len(2, 0));
    said(&none, cache.fork(2, 0));
    said(&none, cache.fork(0, 2));
    said(&none, cache.reserve(2, 0));
    assert_eq!((cache.len(2), cache.len_bounds(2)), (None, None));
    said(&["`len` is 4", "at most the smallest possible length"], cache.truncate(0, 4));
    said(&["`len` is 2", "len_bounds"], cache.set_known_len(0, 2));
    said(&["`len` is 4", "len_bounds"], cache.set_known_len(0, 4));
    said(&["a fork of a sequence", "Paged", "append the tokens again"], cache.fork(0, 1));
    said(&["sequence 0 of the cache", "18 more do not fit"], cache.reserve(0, 21));
    assert_eq!(cache.len(0), Some(3));
    gpu.submit(|e| cache.advance(e, device(good))).expect("room");
    let layout = CacheLayout::Paged { page: 16, pages: 2 };
    let mut paged = Step::new(&gpu, config().layout(layout));
    gpu.submit(|e| paged.cache.advance(e, device(good))).expect("room");
    said(&["only the device knows", "set_known_len"], paged.cache.fork(0, 1));
    said(&["needs 1", "0 free"], paged.cache.reserve(0, 17));
    bench.refuses_with("pages", &["1", "0", "page"], |e| paged.cache.advance(e, Tokens::Each(&[14, 0])));
    let mut ring = Step::new(&gpu, config().layout(CacheLayout::Ring { sink_tokens: 1 }));
    gpu.submit(|e| ring.cache.advance(e, Tokens::All(20))).expect("a ring");
    let mut said = |words: &[&str], result: Result<(), Error>| {
        bench.seen.insert(read(words[0], &result.expect_err(words[0]), words));
    };
    // The ring has the first and the last 19 of 23 tokens. Any shorter length except one would need
    // an older token.
    for len in [2, 3, 4, 21, 22] {
        said(&[&format!("`len` is {len}"), "overwritten", "spare_tokens"], ring.cache.truncate(0, len));
    }
    for rows in [1, 20] {
        let words = [&format!("`rows` is {rows}"), "overwritten", "spare_tokens"];
        bench.refuses_with("rewind", &words, |e| ring.cache.rewind(e, Tokens::All(rows)));
    }
    ring.cache.truncate(0, 23).expect("as long as it is");
    ring.cache.truncate(0, 1).expect("the sinks");
    bench.seen
}

pub(super) fn appends() -> Seen {
    let [own, other] = devices(|_| ());
    let mut bench = Bench::on(&own, Config::new(SHAPE.heads, SHAPE.head_dim));
    let gpu = bench.gpu.clone();
    let mut step = Step::new(&gpu, config());
    let usage = wgpu::BufferUsages::COPY_DST;
    let unusable = buffer(gpu.device(), 4096, usage);
    let foreign = buffer(other.device(), 4096, wgpu::BufferUsages::STORAGE);
    let table = step.cache.lengths().buffer().clone();
    let mut refuses = |step: &Step, words: &[&str], layer: usize, append: Append| {
        bench.refuses_with(words[0], words, |e| step.cache.append(e, layer, &append));
        bench.refuses_with(words[0], words, |e| {
            let mut pass = e.begin_compute_pass(&Default::default());
            step.cache.append(&mut pass, layer, &append)
        });
    };
    let (k, v) = (step.k(), step.v());
    for layer in [2, usize::MAX] {
        refuses(&step, &["layer", "a layer of the cache"], layer, Append::new(k, v));
    }
    for dtype in [DType::U32, DType::Bool] {
        let wrong = TensorView::new(k.buffer(), dtype, k.shape());
        refuses(&step, &["`k`", "F32, F16 or BF16", &format!("{dtype:?}")], 0, Append::new(wrong, v));
    }
    let half = TensorView::new(v.buffer(), DType::F16, v.shape());
    refuses(&step, &["`v`", "F32, as in `k`", "F16"], 0, Append::new(k, half));
    for (n, name) in ["k", "v"].into_iter().enumerate() {
        let of = |view| if n == 0 { Append::new(view, v) } else { Append::new(k, view) };
        let good = [k, v][n];
        for (axis, axis_name) in AXES.into_iter().enumerate() {
            for more in [1isize, -1] {
                let mut shape = good.shape();
                shape[axis] = shape[axis].strict_add_signed(more);
                let words = [
                    format!("`{name}`: {axis_name} must be {}", good.shape()[axis]),
                    format!("got {}", shape[axis]),
                ];
                refuses(&step, &words.each_ref().map(String::as_str), 0, of(reshaped(&good, shape)));
            }
        }
        let quoted = format!("`{name}`");
        refuses(&step, &[&quoted, "ends at byte", "4096"], 0, of(good.with_offset(1 << 10)));
        refuses(&step, &[&quoted, "past 2^32"], 0, of(good.with_offset(usize::MAX)));
        refuses(
            &step,
            &[&quoted, "usage", "STORAGE"],
            0,
            of(TensorView::new(&unusable, DType::F32, good.shape())),
        );
        refuses(
            &step,
            &[&quoted, "another device", "Pipelines"],
            0,
            of(TensorView::new(&foreign, DType::F32, good.shape())),
        );
        let of_sequence_table = TensorView::new(&table, DType::F32, good.shape()).with_strides([0, 0, 0, 1]);
        refuses(&step, &["`cache`", &quoted, "a separate buffer"], 0, of(of_sequence_table));
    }
    let sections = RopeConfig::new(2).sections(RopeSections::Contiguous([1, 0, 0]));
    let rope = Rope::new(gpu.device(), sections).expect("a rope");
    let words = ["a rope with sections in a cache's append", "`Positions::rotate`"];
    refuses(&step, &words, 0, Append::new(k, v).rope(&rope));
    // An append must record the host's earlier change first.
    step.cache.truncate(0, 1).expect("shorter");
    let (k, v) = (step.k(), step.v());
    refuses(&step, &["not recorded", "flush"], 0, Append::new(k, v));
    gpu.submit(|e| step.cache.flush(e)).expect("a recording");
    gpu.submit(|e| step.cache.append(e, 1, &Append::new(step.k(), step.v()))).expect("a step");
    // An append before any advance.
    let new = Cache::with_pipelines(gpu.pipelines(), config()).expect("a cache");
    let words = ["an append without an advance", "`Cache::advance` first"];
    let append = Append::new(step.k(), step.v());
    bench.refuses_with("no advance", &words, |e| new.append(e, 0, &append));
    bench.seen
}

/// Errors of calls that read rows back or overwrite them.
pub(super) fn rows_of_caches() -> Seen {
    let mut bench = Bench::on(&full().gpu, Config::new(SHAPE.heads, SHAPE.head_dim));
    let gpu = bench.gpu.clone();
    let mut step = Step::new(&gpu, config());
    let positions = gpu.upload(&[0u32; 64]).expect("an upload");
    let tensor = |shape| RowPositions::Tensor(TensorView::new(&positions, DType::U32, shape));
    let table = step.cache.lengths().buffer().clone();
    let [k_buffer, v_buffer] = [&step.k, &step.v].map(Clone::clone);
    let view = |buffer, dtype, dim| TensorView::new(buffer, dtype, [SHAPE.batch, SHAPE.kv_heads, ROWS, dim]);
    let k = view(&k_buffer, DType::F32, SHAPE.head_dim);
    let v = view(&v_buffer, DType::F32, SHAPE.value_dim);
    let mut refuses =
        |words: &[&str], layer: usize, [k, v]: [TensorView; 2], at: RowPositions<TensorView>| {
            let read = CacheRead::new(k, v).at(at);
            bench.refuses_with(words[0], words, |e| step.cache.read(e, layer, &read));
            bench.refuses_with(words[0], words, |e| {
                let mut pass = e.begin_compute_pass(&Default::default());
                step.cache.read(&mut pass, layer, &read)
            });
            let append = Append::new(k, v);
            bench.refuses_with(words[0], words, |e| step.cache.overwrite(e, layer, &append, at));
            assert_eq!(step.cache.len(0), Some(ROWS));
        };
    let start = RowPositions::Start(0);
    for layer in [2, usize::MAX] {
        refuses(&["layer", "a layer of the cache"], layer, [k, v], start);
    }
    refuses(&["`k`", "F32, F16 or BF16", "U32"], 0, [view(&k_buffer, DType::U32, SHAPE.head_dim), v], start);
    refuses(&["`v`", "F32", "F16"], 0, [k, view(&v_buffer, DType::F16, SHAPE.value_dim)], start);
    for (n, name) in ["k", "v"].into_iter().enumerate() {
        let good = [k, v][n];
        let of = |view| if n == 0 { [view, v] } else { [k, view] };
        for (axis, axis_name) in AXES.into_iter().enumerate() {
            // The number of rows comes from k.
            if n == 0 && axis == 2 {
                continue;
            }
            for more in [1isize, -1] {
                let mut shape = good.shape();
                shape[axis] = shape[axis].strict_add_signed(more);
                let words = [
                    format!("`{name}`: {axis_name} must be {}", good.shape()[axis]),
                    format!("got {}", shape[axis]),
                ];
                refuses(&words.each_ref().map(String::as_str), 0, of(reshaped(&good, shape)), start);
            }
        }
        let quoted = format!("`{name}`");
        refuses(&[&quoted, "ends at byte", "4096"], 0, of(good.with_offset(1 << 10)), start);
        refuses(&[&quoted, "past 2^32"], 0, of(good.with_offset(usize::MAX)), start);
    }
    let none = [k, v].map(|t| t.slice(2, 0, 0));
    refuses(&["`k`", "length is 0"], 0, none, start);
    for (shape, words) in [
        ([3, 1, ROWS, 1], "batch must be 2 or 1, got 3"),
        ([2, 2, ROWS, 1], "axes must be 1"),
        ([2, 1, ROWS - 1, 1], "length must be 3 or 1, got 2"),
        ([2, 1, ROWS, 2], "dim must be 1, got 2"),
    ] {
        refuses(&["`positions`", words], 0, [k, v], tensor(shape));
    }
    let floats = RowPositions::Tensor(TensorView::new(&positions, DType::F32, [2, 1, ROWS, 1]));
    refuses(&["`positions`", "U32", "F32"], 0, [k, v], floats);

    // Reads write to separate buffers. Writes do not read from the cache's buffers.
    let shape = |dim| [SHAPE.batch, SHAPE.kv_heads, ROWS, dim];
    refuses_read(&mut bench, &step, &["`k`", "share memory"], [k.with_strides([0, 0, 0, 1]), v], start);
    let over_k = TensorView::new(&k_buffer, DType::F32, shape(SHAPE.value_dim));
    refuses_read(&mut bench, &step, &["`k`", "`v`", "overlap"], [k, over_k], start);
    let at = RowPositions::Tensor(TensorView::new(&k_buffer, DType::U32, [1, 1, 1, 1]));
    refuses_read(&mut bench, &step, &["`k`", "shares its buffer with `positions`"], [k, v], at);
    for first in [1, ROWS as u32, u32::MAX] {
        let said = format!("`start` is {first};");
        let words = [said.as_str(), "at most the length of every sequence"];
        refuses_overwrite(&mut bench, &mut step, &words, [k, v], RowPositions::Start(first));
    }
    let lengths = RowPositions::Tensor(TensorView::new(&table, DType::U32, [1, 1, 1, 1]));
    refuses_overwrite(&mut bench, &mut step, &["`cache`", "`positions`"], [k, v], lengths);

    // Calls that write rows record the host's changes. Calls that read rows need a flush first.
    step.cache.truncate(0, 2).expect("shorter");
    refuses_read(&mut bench, &step, &["not recorded", "flush"], [k, v], start);
    let two = [k, v].map(|t| t.slice(2, 0, 2));
    gpu.submit(|e| step.cache.overwrite(e, 0, &Append::new(two[0], two[1]), start)).expect("two rows");
    let out = gpu.buffer(4096).expect("a buffer");
    let read = CacheRead::new(TensorView::new(&out, DType::F32, shape(SHAPE.head_dim)), v);
    gpu.submit(|e| step.cache.read(e, 1, &read)).expect("a reading");
    bench.seen
}

fn refuses_read(
    bench: &mut Bench,
    step: &Step,
    words: &[&str],
    [k, v]: [TensorView; 2],
    at: RowPositions<TensorView>,
) {
    let read = CacheRead::new(k, v).at(at);
    bench.refuses_with(words[0], words, |e| step.cache.read(e, 0, &read));
}

fn refuses_overwrite(
    bench: &mut Bench,
    step: &mut Step,
    words: &[&str],
    [k, v]: [TensorView; 2],
    at: RowPositions<TensorView>,
) {
    let append = Append::new(k, v);
    bench.refuses_with(words[0], words, |e| step.cache.overwrite(e, 0, &append, at));
}

pub(super) fn attention_to_caches() -> Seen {
    let [own, other] = devices(|_| ());
    let plain = Config::new(SHAPE.heads, SHAPE.head_dim);
    let mut bench = Bench::on(&own, plain);
    let gpu = bench.gpu.clone();
    let mut step = Step::new(&gpu, config());
    let attention = bench.attention.clone();
    let buffers = bench.buffers();
    let out_view = |shape| TensorView::new(&buffers[3], DType::F32, shape);
    let (out, lse) = (out_view(SHAPE.out()), gpu.buffer(4096).expect("a buffer"));
    let extra = gpu.buffer(1 << 14).expect("a buffer");
    let table = step.cache.lengths().buffer().clone();

    let mut refuses = |words: &[&str], attention: &Attention, call: &Forward| {
        let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
        bench.refuses_with(words[0], words, |e| attention.forward(e, call, &mut scratch));
        bench.refuses_with(words[0], words, |e| {
            let mut pass = e.begin_compute_pass(&Default::default());
            attention.forward(&mut pass, call, &mut scratch)
        });
    };
    {
        let good = Forward::with_cache(step.q(), &step.cache, out);
        // The cache's dimensions must be the operator's.
        let of = |config: Config| Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
        let same = || plain.kv_heads(SHAPE.kv_heads).value_dim(SHAPE.value_dim);
        let expected = "the same as in the attention's `Config`";
        refuses(&["`cache.kv_heads` is 2", expected], &of(same().kv_heads(4)), &good);
        refuses(&["`cache.value_dim` is 6", expected], &of(same().value_dim(5)), &good);
        let wide = Config::new(SHAPE.heads, 9).kv_heads(2).value_dim(6);
        refuses(&["`cache.head_dim` is 8", expected], &of(wide), &good);
        refuses(
            &["a cache on the staged path", "Auto"],
            &of(same().kernel_options(KernelOptions::new().algorithm(Algorithm::Staged))),
            &good,
        );
        refuses(
            &["`splits` is 0", "at least 1"],
            &of(same().kernel_options(KernelOptions::new().splits(0))),
            &good,
        );
        refuses(
            &["`splits` is 129", "at most 128"],
            &of(same().kernel_options(KernelOptions::new().splits(129))),
            &good,
        );
        // Splits need temporary memory, and the scratch is empty.
        refuses(
            &["scratch", "partial", "scratch_size"],
            &of(same().kernel_options(KernelOptions::new().splits(2))),
            &good,
        );
        let elsewhere =
            Attention::with_pipelines(&Pipelines::new(other.device()), same()).expect("an operator");
        let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = elsewhere.forward(&mut encoder, &good, &mut scratch).expect_err("another device");
        read("another device", &error, &["a cache on another device", "with_pipelines"]);
    }
    for layer in [2, usize::MAX] {
        let call = Forward::with_cache(step.q(), &step.cache, out).layer(layer);
        refuses(&["layer", "a layer of the cache"], &attention, &call);
    }
    for (axis, axis_name) in AXES.into_iter().enumerate() {
        for more in [1isize, -1] {
            let other = |shape: [usize; 4]| {
                let mut shape = shape;
                shape[axis] = shape[axis].strict_add_signed(more);
                shape
            };
            let [q, o] = [SHAPE.q(), SHAPE.out()];
            let expected = |name: &str, n: usize| format!("`{name}`: {axis_name} must be {n}, got");
            let call = Forward::with_cache(reshaped(&step.q(), other(q)), &step.cache, out);
            refuses(&[&expected("q", q[axis])], &attention, &call);
            let call = Forward::with_cache(step.q(), &step.cache, out_view(other(o)));
            refuses(&[&expected("out", o[axis])], &attention, &call);
            if other(SHAPE.lse()).contains(&0) {
                continue;
            }
            let wrong = TensorView::new(&lse, DType::F32, other(SHAPE.lse()));
            let call = Forward::with_cache(step.q(), &step.cache, out).lse(wrong);
            let expected =
                format!("`lse`: {} must be {}", ["batch", "heads", "q_len", "dim"][axis], SHAPE.lse()[axis]);
            refuses(&[&expected], &attention, &call);
        }
    }
    for dtype in [DType::F16, DType::U32, DType::Bool] {
        let q = TensorView::new(&step.q, dtype, SHAPE.q());
        refuses(&["`q`", "must be F32"], &attention, &Forward::with_cache(q, &step.cache, out));
        let o = TensorView::new(&buffers[3], dtype, SHAPE.out());
        refuses(&["`out`", "must be F32"], &attention, &Forward::with_cache(step.q(), &step.cache, o));
        let wrong = TensorView::new(&lse, dtype, SHAPE.lse());
        let call = Forward::with_cache(step.q(), &step.cache, out).lse(wrong);
        refuses(&["`lse`", "must be F32"], &attention, &call);
    }
    // Memory.
    let overlap = out.with_strides([0, 18, 6, 1]);
    refuses(&["`out`", "share memory"], &attention, &Forward::with_cache(step.q(), &step.cache, overlap));
    let far = step.q().with_offset(1 << 10);
    refuses(&["`q`", "ends at byte"], &attention, &Forward::with_cache(far, &step.cache, out));
    let onto = TensorView::new(&buffers[3], DType::F32, SHAPE.q());
    refuses(&["`out`", "`q`", "a separate buffer"], &attention, &Forward::with_cache(onto, &step.cache, out));
    let into = TensorView::new(&table, DType::F32, SHAPE.lse()).with_strides([4, 1, 1, 1]);
    let call = Forward::with_cache(step.q(), &step.cache, out).lse(into);
    refuses(&["`lse`"], &attention, &call);
    // Tensors of masks.
    let numbers = |shape| TensorView::new(&extra, DType::U32, shape);
    let bools = |shape| TensorView::new(&extra, DType::Bool, shape);
    // Options that one kind of keys has and the other does not.
    let good = Forward::with_cache(step.q(), &step.cache, out);
    let words = ["weights and dropout with a cache", "as tensors"];
    let weights = TensorView::new(&extra, DType::F32, [2, 4, SHAPE.q_len, CAPACITY]);
    refuses(&words, &attention, &good.weights(weights));
    refuses(&words, &attention, &good.dropout(Dropout::Seeded { p: 0.5, seed: 0 }));
    let words = ["scores with a cache", "as tensors"];
    refuses(&words, &attention, &good.scores(weights, ScoreStage::Scaled));
    let tensors = Forward::new(step.q(), step.q(), step.q(), out);
    for call in [tensors.layer(0), tensors.at_end()] {
        refuses(&["`layer` and `at_end` without a cache", "with_cache"], &attention, &call);
    }
    let with = |mask| Forward::with_cache(step.q(), &step.cache, out).mask(mask);
    let words = ["block maps and packed sequences with a cache", "other rules"];
    refuses(&words, &attention, &with(Mask::none().blocks(Blocks::new(numbers([1; 4]), [8, 8]))));
    refuses(&words, &attention, &with(Mask::none().packed(numbers([2, 1, 1, 2]), numbers([2, 1, 1, 2]))));
    let offsets = with(Mask::causal().query_offsets(numbers([2, 1, 1, 1])));
    refuses(&["query offsets with a cache", "omit the offset"], &attention, &offsets);
    let words = ["`Alignment::Offset` with a cache", "omit the offset"];
    refuses(&words, &attention, &with(Mask::causal().aligned(Alignment::Offset(0))));
    let [b, h, i, _] = SHAPE.weights();
    for n in [CAPACITY - 1, CAPACITY + 1, 3] {
        let words = [format!("`attn_mask`: kv_len must be {CAPACITY} or 1"), format!("got {n}")];
        let words = words.each_ref().map(String::as_str);
        refuses(&words, &attention, &with(Mask::none().attn_mask(bools([b, h, i, n]))));
    }
    for n in [2, 4, CAPACITY] {
        let words = ["`tree`", "q_len must be 3", &format!("got {n}")];
        refuses(&words, &attention, &with(Mask::none().tree(bools([1, 1, 3, n]))));
        refuses(&words, &attention, &with(Mask::none().tree(bools([1, 1, n, 3]))));
    }
    refuses(&["`tree`", "must be Bool", "U32"], &attention, &with(Mask::none().tree(numbers([1, 1, 3, 3]))));
    let onto = TensorView::new(&buffers[3], DType::Bool, [1, 1, 3, 3]);
    refuses(&["`out`", "`tree`"], &attention, &with(Mask::none().tree(onto)));

    // A ring has no last key, so no tensor of keys can fit.
    let ring = Step::new(&gpu, config().layout(CacheLayout::Ring { sink_tokens: 1 }));
    let call = Forward::with_cache(ring.q(), &ring.cache, out);
    refuses(
        &["`attn_mask`: kv_len must be", "got 20"],
        &attention,
        &call.mask(Mask::none().attn_mask(bools([b, h, i, CAPACITY]))),
    );

    // Queries of a step without an advance.
    step.cache.truncate(0, 1).expect("shorter");
    refuses(&["not recorded", "flush"], &attention, &Forward::with_cache(step.q(), &step.cache, out));
    gpu.submit(|e| step.cache.rewind(e, Tokens::All(1))).expect("one token each");
    refuses(
        &["last advance", "rewound", "at_end"],
        &attention,
        &Forward::with_cache(step.q(), &step.cache, out),
    );
    let call = Forward::with_cache(step.q(), &step.cache, out).at_end();
    let mut scratch =
        Scratch::new(gpu.device(), attention.scratch_size(&call).expect("a size")).expect("scratch");
    gpu.submit(|e| attention.forward(e, &call, &mut scratch)).expect("queries of their own");
    bench.seen
}
