//! Full caches, and pages that are shared, released and reused.

use wgpu_attention::cache::{Append, CacheLayout, CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::tuning::Target;
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Error, Forward, KernelOptions, Mask, Scratch, TensorView,
};

use super::{DIMS, LAYOUTS, STORAGES, usual};

use crate::harness::device::device;
use crate::harness::{Ask, Bed, Count, Data, FORMS, Kind, Rng, Rules, due, full};

fn ask(bed: &mut Bed, context: &str) {
    let rules = Rules { causal: true, ..Default::default() };
    let rows = if bed.advanced == 0 { Some(1) } else { None };
    bed.ask(&Ask { rows, ..Ask::new(Target::Software, &rules) }).unwrap_or_else(|e| panic!("{context}: {e}"));
    bed.check_sequence_table().unwrap_or_else(|e| panic!("{context}: {e}"));
}

/// The cache takes exactly as many tokens as its capacity. It refuses the next one and stays
/// unchanged.
#[test]
fn full_cache_refuses_next_token() {
    crate::harness::in_turn!();
    for (layout, capacity) in
        LAYOUTS.into_iter().filter(|(layout, _)| !matches!(layout, CacheLayout::Ring { .. }))
    {
        let kind = Kind::new(CacheStorage::Q8(ScaleGroup::Of(32)), layout, capacity.min(37));
        let mut bed = Bed::new(full(), kind, Data::Lossless, 61);
        let capacity = kind.capacity;
        bed.grow(&Count::Each(vec![capacity - 3, 1])).expect("room");
        for n in 0..3 {
            bed.grow(&Count::Each(vec![1, n % 2])).expect("room");
            ask(&mut bed, "before the end");
        }
        let free = bed.cache.free_pages();
        for count in [Count::All(1), Count::Each(vec![1, 0]), Count::Each(vec![0, capacity])] {
            let error = bed.grow(&count).expect_err("full");
            let (s, len) = if count.of(0) == 0 { (1, 2) } else { (0, capacity) };
            let message = error.to_string();
            assert!(
                matches!(error, Error::CacheFull { sequence, len: l, rows, capacity: c }
                    if [sequence, l, rows, c] == [s, len, count.of(s), capacity]),
                "{message}"
            );
            assert!(
                message
                    .contains(&format!("sequence {s} of the cache has {len} of at most {capacity} tokens"))
            );
            assert_eq!([bed.cache.len(0), bed.cache.len(1)], [Some(capacity), Some(2)]);
            assert_eq!(bed.cache.free_pages(), free);
            ask(&mut bed, "after a refusal");
        }
        bed.grow(&Count::Each(vec![0, 2])).expect("room in the other");
        ask(&mut bed, "after the next step");
        // Only the device knows the count. It refuses the advance and records the refusal.
        bed.grow(&Count::Device { counts: vec![1, 1], most: 2 }).expect("the host cannot know");
        assert_eq!(bed.sequences[0].refused, 1);
        ask(&mut bed, "refused on the device");
        assert_eq!(bed.cache.len(1), None);
        bed.cache.set_known_len(1, 5).expect("its length");
        assert_eq!(bed.cache.len(1), Some(5));
    }
}

/// The host knows the count, but only the device knows the lengths.
#[test]
fn device_refuses_impossible_moves() {
    let kind = Kind { batch: 3, ..Kind::new(CacheStorage::F32, CacheLayout::Contiguous, 10) };
    let mut bed = Bed::new(full(), kind, Data::Lossless, 63);
    bed.grow(&Count::Device { counts: vec![3, 8, 0], most: 8 }).expect("the host cannot know");
    assert_eq!(bed.cache.len_bounds(0), Some([0, 8]));
    bed.grow(&Count::All(8)).expect("the host cannot know");
    assert_eq!(
        bed.sequences.iter().map(|s| (s.len(), s.refused)).collect::<Vec<_>>(),
        [(3, 1), (8, 1), (8, 0)]
    );
    ask(&mut bed, "two were refused");
    let lengths = bed.numbers(bed.cache.lengths());
    for (s, len) in lengths.into_iter().enumerate() {
        bed.cache.set_known_len(s, len as usize).expect("what the device says is possible");
    }
    bed.grow(&Count::All(2)).expect("room");
    ask(&mut bed, "known again");

    // A ring cannot go back to tokens that it has overwritten.
    let kind = Kind { batch: 2, ..Kind::new(CacheStorage::F32, CacheLayout::Ring { sink_tokens: 2 }, 8) };
    let mut bed = Bed::new(full(), kind, Data::Lossless, 64);
    bed.grow(&Count::Each(vec![7, 7])).expect("room");
    bed.grow(&Count::Device { counts: vec![8, 1], most: 8 }).expect("room");
    bed.rewind(&Count::All(7)).expect("the host cannot know");
    assert_eq!(bed.sequences.iter().map(|s| (s.len(), s.refused)).collect::<Vec<_>>(), [(15, 1), (1, 0)]);
    ask(&mut bed, "one could not go back");
    let lengths = bed.numbers(bed.cache.lengths());
    for (s, len) in lengths.into_iter().enumerate() {
        bed.cache.set_known_len(s, len as usize).expect("what the device says is possible");
    }
    bed.grow(&Count::All(3)).expect("room");
    ask(&mut bed, "both go on");
    // Tokens that were never overwritten are still there, although the host's bound permitted it.
    bed.cache.truncate(1, 2).expect("the sinks");
    bed.flush();
    bed.sequences[1].return_to(&kind, 2);
    ask(&mut bed, "truncated");
}

/// Only the device knew the ring's length. The host's bound on its history hides nothing.
#[test]
fn truncating_ring_hides_only_lost_tokens() {
    let kind = Kind { batch: 1, ..Kind::new(CacheStorage::F32, CacheLayout::Ring { sink_tokens: 1 }, 12) };
    let mut bed = Bed::new(full(), kind, Data::Lossless, 65);
    bed.grow(&Count::All(9)).expect("room");
    bed.grow(&Count::Device { counts: vec![1], most: 6 }).expect("room");
    bed.cache.set_known_len(0, 10).expect("its length");
    bed.cache.truncate(0, 9).expect("nothing was overwritten");
    bed.sequences[0].return_to(&kind, 9);
    bed.flush();
    ask(&mut bed, "nine tokens of twelve");
    bed.grow(&Count::All(2)).expect("room");
    ask(&mut bed, "eleven tokens of twelve");
}

#[test]
fn pages_run_out_and_come_back() {
    crate::harness::in_turn!();
    for form in FORMS {
        let layout = CacheLayout::Paged { page: 16, pages: 5 };
        let kind = Kind { batch: 3, ..Kind::new(CacheStorage::Q4(ScaleGroup::Of(32)), layout, 64) };
        let mut bed = Bed::new(full(), kind, Data::Lossless, 67);
        let rules = Rules { causal: true, ..Default::default() };
        let ask = Ask::new(form, &rules);
        assert_eq!(bed.cache.free_pages(), 5);
        bed.grow(&Count::Each(vec![16, 15, 33])).expect("five pages");
        assert_eq!(bed.cache.free_pages(), 0);
        bed.grow(&Count::Each(vec![0, 1, 15])).expect("they have room");
        let error = bed.grow(&Count::Each(vec![1, 1, 1])).expect_err("no page");
        assert!(matches!(error, Error::OutOfPages { needed: 3, free: 0 }), "{error}");
        assert!(error.to_string().contains("3"), "{error}");
        assert_eq!((0..3).map(|s| bed.cache.len(s)).collect::<Vec<_>>(), [Some(16), Some(16), Some(48)]);
        bed.ask(&ask).expect("as it was");
        // The pages of one sequence serve the others.
        bed.cache.clear(2).expect("a sequence");
        bed.sequences[2] = Default::default();
        assert_eq!(bed.cache.free_pages(), 3);
        bed.grow(&Count::Each(vec![1, 17, 0])).expect("three pages");
        assert_eq!(bed.cache.free_pages(), 0);
        bed.ask(&ask).expect("pages used again");
        let error = bed.grow(&Count::Each(vec![0, 0, 1])).expect_err("no page");
        assert!(matches!(error, Error::OutOfPages { needed: 1, free: 0 }), "{error}");
        assert!(matches!(bed.cache.reserve(2, 1), Err(Error::OutOfPages { needed: 1, free: 0 })));
        bed.cache.truncate(1, 16).expect("shorter");
        let kind = bed.kind;
        bed.sequences[1].return_to(&kind, 16);
        bed.cache.reserve(2, 17).expect("the pages of the other");
        assert_eq!(bed.cache.free_pages(), 0);
        bed.grow(&Count::Each(vec![3, 0, 17])).expect("reserved");
        bed.ask(&ask).expect("reserved pages");
        bed.check_sequence_table().expect("the sequence table");
    }
}

/// Both sequences write into a shared page, from every slot on. The first writer copies the page.
#[test]
fn copies_on_write_at_every_alignment() {
    crate::harness::in_turn!();
    let layout = CacheLayout::Paged { page: 16, pages: 12 };
    for storage in [CacheStorage::F32, CacheStorage::Q8(ScaleGroup::Row)] {
        let kind = Kind { batch: 3, layers: 2, ..Kind::new(storage, layout, 64) };
        for len in 14..=34 {
            let mut bed = Bed::new(full(), kind, Data::Lossless, 100 + len as u64);
            bed.grow(&Count::Each(vec![len, 5, 0])).expect("room");
            bed.fork(0, 1).expect("a fork");
            bed.fork(0, 2).expect("a fork");
            let pages = len.div_ceil(16);
            assert_eq!(bed.cache.free_pages(), 12 - pages, "three share {pages} pages");
            // If the last page is partial, the first sequence copies it, then the third. The second
            // uses the remaining one.
            let own = |len: usize| usize::from(!len.is_multiple_of(16));
            bed.grow(&Count::Each(vec![1, 0, 0])).expect("room");
            assert_eq!(bed.cache.free_pages(), 11 - pages);
            let rules = Rules { causal: true, ..Default::default() };
            let of = |layer| Ask { layer, rows: Some(2), ..Ask::new(FORMS[len % 2], &rules) };
            let ask = |bed: &mut Bed| {
                for layer in 0..2 {
                    bed.ask(&of(layer)).unwrap_or_else(|e| panic!("{len} tokens, layer {layer}: {e}"));
                }
            };
            ask(&mut bed);
            bed.grow(&Count::Each(vec![0, 0, 2])).expect("room");
            ask(&mut bed);
            let free = bed.cache.free_pages();
            bed.grow(&Count::Each(vec![0, 1, 0])).expect("room");
            // The sequence is now alone with its last page.
            assert_eq!(bed.cache.free_pages(), free - (1 - own(len)), "{len}");
            ask(&mut bed);
            bed.check_sequence_table().expect("the sequence table");
        }
    }
}

/// Discarded tokens of NaN leave no trace. None stays past the end, in reused pages, or where a
/// ring was overwritten.
#[test]
fn discarded_tokens_leave_no_trace() {
    crate::harness::in_turn!();
    for (s, storage) in STORAGES.into_iter().enumerate() {
        for (l, (layout, capacity)) in LAYOUTS.into_iter().enumerate() {
            if !due(&format!("given up, {storage:?}, {layout:?}")) {
                continue;
            }
            let (form, splits) = usual(s, l);
            let [head_dim, value_dim] = DIMS;
            let kind = Kind { head_dim, value_dim, ..Kind::new(storage, layout, capacity) };
            let mut bed = Bed::new(full(), kind, Data::Lossless, 73);
            let rules = Rules { causal: true, ..Default::default() };
            let ask = Ask { splits, ..Ask::new(form, &rules) };
            let context = format!("{storage:?}, {layout:?}, {form:?}");
            bed.grow(&Count::Each(vec![5, 17])).expect("room");
            bed.bad = true;
            bed.grow(&Count::All(3)).expect("room");
            bed.rewind(&Count::All(3)).expect("as many");
            bed.ask(&Ask { rows: Some(2), ..ask }).unwrap_or_else(|e| panic!("{context}, rewound: {e}"));
            bed.bad = false;
            bed.grow(&Count::All(1)).expect("room");
            bed.ask(&ask).unwrap_or_else(|e| panic!("{context}, one more: {e}"));
            // A whole sequence of them.
            bed.cache.clear(1).expect("a sequence");
            bed.sequences[1] = Default::default();
            bed.bad = true;
            bed.grow(&Count::Each(vec![0, 20])).expect("room");
            bed.cache.clear(1).expect("a sequence");
            bed.sequences[1] = Default::default();
            bed.bad = false;
            bed.grow(&Count::Each(vec![15, 2])).expect("room");
            bed.ask(&ask).unwrap_or_else(|e| panic!("{context}, cleared: {e}"));
            if kind.ring().is_some() {
                // Past the sinks, overwritten by later tokens.
                bed.bad = true;
                bed.grow(&Count::Each(vec![2, 0])).expect("a ring");
                bed.bad = false;
                bed.grow(&Count::Each(vec![24, 0])).expect("a ring");
                bed.ask(&ask).unwrap_or_else(|e| panic!("{context}, lapped: {e}"));
            }
        }
    }
}

/// A cache with separate pipelines, before any call.
#[test]
fn a_new_cache_is_empty() {
    let gpu = &full().gpu;
    let config = Kind::new(CacheStorage::F32, CacheLayout::Paged { page: 16, pages: 7 }, 50).config();
    let cache = Cache::new(gpu.device(), config).expect("a cache");
    assert!(cache.is_empty() && cache.len(0) == Some(0) && cache.len(1) == Some(0));
    assert_eq!((cache.free_pages(), cache.len_bounds(1)), (7, Some([0, 0])));
    // The bytes of a token: two heads of 8 and 8 channels.
    for (storage, bytes) in [
        (CacheStorage::F32, 2 * (32 + 32)),
        (CacheStorage::F16, 2 * (16 + 16)),
        (CacheStorage::BF16, 2 * (16 + 16)),
        (CacheStorage::Q8(ScaleGroup::Row), 2 * (16 + 4 + 16 + 4)),
        (CacheStorage::Q4(ScaleGroup::Of(32)), 2 * (16 + 4 + 16 + 4)),
        (CacheStorage::Q8_0, 2 * (16 + 4 + 16 + 4)),
        (CacheStorage::Q4_0, 2 * (16 + 4 + 16 + 4)),
    ] {
        assert_eq!(config.storage(storage).token_bytes(), bytes, "{storage:?}");
    }
    assert_eq!(CacheStorage::Q8(ScaleGroup::Of(32)).row_bytes(128), 128 + 4 * 4);
    assert_eq!(CacheStorage::Q4(ScaleGroup::Of(64)).row_bytes(128), 64 + 2 * 4);
    assert_eq!(CacheStorage::Q4(ScaleGroup::Row).row_bytes(128), 64 + 4);
}

/// One binding cannot hold the cache's keys, so groups of heads get separate caches. They give the
/// bits of one cache.
#[test]
fn split_head_caches_equal_one_cache() {
    let (heads, kv_heads, dim, rows, capacity) = (8, 4, 8, 5, 64);
    let config = CacheConfig::new(kv_heads, dim, capacity);
    // One head has 2 KiB of keys: two heads fit.
    let small = device(|limits| limits.max_storage_buffer_binding_size = 4096);
    let error = Cache::with_pipelines(small.pipelines(), config).expect_err("8 KiB of keys");
    assert!(error.to_string().contains("split_by_heads"), "{error}");
    let rng = &mut Rng::new(71);
    let [q, k, v] = [heads, kv_heads, kv_heads].map(|heads| rng.normals(heads * rows * dim));
    let results = [&full().gpu, &small].map(|gpu| {
        let configs = config.split_by_heads(gpu.device()).expect("each fits");
        let parts = configs.len();
        let [heads_each, kv_each] = [heads / parts, kv_heads / parts];
        let operator = Config::new(heads_each, dim)
            .kv_heads(kv_each)
            .kernel_options(KernelOptions::new().target(Target::Software));
        let attention = Attention::with_pipelines(gpu.pipelines(), operator).expect("an operator");
        let buffers = [&q, &k, &v].map(|x| gpu.upload(x).expect("room"));
        let out = gpu.buffer(4 * q.len()).expect("room");
        let view = |b, heads| TensorView::new(b, DType::F32, [1, heads, rows, dim]);
        let [q, k, v] = [view(&buffers[0], heads), view(&buffers[1], kv_heads), view(&buffers[2], kv_heads)];
        for (n, config) in configs.into_iter().enumerate() {
            let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("it fits");
            let [k, v] = [k, v].map(|t| t.slice(1, n * kv_each, kv_each));
            let [q, out] = [q, view(&out, heads)].map(|t| t.slice(1, n * heads_each, heads_each));
            gpu.submit(|e| cache.advance(e, Tokens::All(rows))).expect("room");
            gpu.submit(|e| cache.append(e, 0, &Append::new(k, v))).expect("an append");
            let call = Forward::with_cache(q, &cache, out).mask(Mask::causal());
            let size = attention.scratch_size(&call).expect("a size");
            let mut scratch = Scratch::new(gpu.device(), size).expect("room");
            gpu.submit(|e| attention.forward(e, &call, &mut scratch)).expect("a call");
        }
        (parts, gpu.download::<f32>(&out, heads * rows * dim).expect("a read-back"))
    });
    assert_eq!([results[0].0, results[1].0], [1, 2]);
    assert_eq!(results[0].1, results[1].1);
    // No group has less than one head.
    let smaller = device(|limits| limits.max_storage_buffer_binding_size = 1024);
    let error = config.split_by_heads(smaller.device()).expect_err("one head takes 2 KiB");
    assert!(matches!(error, Error::CacheBindingLimit { bytes: 2048, limit: 1024, .. }), "{error}");
}
