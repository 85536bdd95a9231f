//! Rows of caches that are read back and overwritten.

use wgpu_attention::cache::{Append, CacheLayout, CacheRead, CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::position::{Rope, RopeConfig, RowPositions};
use wgpu_attention::tuning::Target;
use wgpu_attention::{Cache, CacheConfig, DType, Error, TensorView};

use super::{LAYOUTS, STORAGES};
use crate::harness::positions::normals;
use crate::harness::{
    Ask, Bed, Count, Data, FORMS, HostData, Kind, Layout, Places, Report, Rules, due, full, profiles,
};

/// Returns row positions of two sequences of 33 and 29 tokens, and the number of rows. Some rows do
/// not exist.
fn places() -> Vec<(Places, usize)> {
    let of = |shape, f: fn([usize; 4]) -> u32| RowPositions::Tensor(HostData::of(shape, f));
    vec![
        (RowPositions::Start(0), 36),
        (RowPositions::Start(27), 2),
        (RowPositions::Start(u32::MAX - 1), 3),
        (of([2, 1, 1, 1], |[b, ..]| [3, 28][b]), 5),
        (of([1, 1, 1, 1], |_| u32::MAX), 2),
        (of([2, 1, 4, 1], |[b, _, i, _]| [[31, 2, 17, 32], [0, u32::MAX, 28, 16]][b][i]), 4),
        (of([1, 1, 3, 1], |[_, _, i, _]| [25, 24, 1][i]), 3),
    ]
}

fn grown(bed: &mut Bed) {
    for n in [5, 1, 20, 1, 2] {
        bed.grow(&Count::All(n)).expect("room");
    }
    bed.grow(&Count::Each(vec![4, 0])).expect("room");
}

/// Every storage and layout. With random data no value is off by more than its rounding.
#[test]
fn appended_rows_are_read_back() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, read back");
    for (s, storage) in STORAGES.into_iter().enumerate() {
        for (l, (layout, capacity)) in LAYOUTS.into_iter().enumerate() {
            let profile = profiles()[(s + l) % 2];
            let kind =
                Kind { layers: 2, head_dim: 40, value_dim: 13, ..Kind::new(storage, layout, capacity) };
            let data = if s % 2 == l % 2 { Data::Random } else { Data::Lossless };
            let mut bed = Bed::new(profile, kind, data, 71 + s as u64);
            grown(&mut bed);
            for (n, (at, rows)) in places().iter().enumerate() {
                let dtype = match (n + s) % 3 {
                    1 => DType::F16,
                    0 => DType::F32,
                    _ => DType::BF16,
                };
                let layout = [Layout::Window(n as u64 + 1), Layout::Dense, Layout::Blhd][n % 3];
                let outcome = bed.read((n + s) % 2, at, *rows, dtype, layout);
                report.record(&format!("{kind:?}, {dtype:?} at {n}"), &profile.name, outcome);
            }
        }
    }
    report.finish();
}

/// The part of the test above that always runs: every storage in one layout.
#[test]
fn every_storage_is_read_back() {
    let mut report = Report::new("caches, every storage");
    for (s, storage) in STORAGES.into_iter().enumerate() {
        let (layout, capacity) = LAYOUTS[s % 3];
        let kind = Kind { head_dim: 40, value_dim: 13, ..Kind::new(storage, layout, capacity) };
        let mut bed = Bed::new(full(), kind, Data::Random, 91 + s as u64);
        grown(&mut bed);
        let outcome = bed.read(0, &RowPositions::Start(0), 36, DType::F32, Layout::Dense);
        report.record(&format!("{kind:?}"), &"full", outcome);
    }
    report.finish();
}

/// Rows are read back after an overwrite, and attended to. Rows that do not exist are dropped and
/// counted.
#[test]
fn rows_are_overwritten() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, overwritten");
    for (s, storage) in STORAGES.into_iter().enumerate() {
        for (l, (layout, capacity)) in LAYOUTS.into_iter().enumerate() {
            if !due(&format!("overwritten, {storage:?}, {layout:?}")) {
                continue;
            }
            let profile = profiles()[(s + l) % 2];
            let kind =
                Kind { layers: 2, head_dim: 40, value_dim: 24, ..Kind::new(storage, layout, capacity) };
            let mut bed = Bed::new(profile, kind, Data::Lossless, 81 + s as u64);
            bed.layout = [Layout::Dense, Layout::Window(3)][s % 2];
            grown(&mut bed);
            let rules = Rules { causal: true, ..Default::default() };
            for (n, (at, rows)) in places().iter().enumerate() {
                let layer = n % 2;
                let known = matches!(at, RowPositions::Start(start) if u64::from(*start) + *rows as u64 > 29);
                let outcome = match bed.overwrite(layer, at, *rows) {
                    Err(Error::Option { option: "start", .. }) if known => Ok(0.0),
                    Ok(()) if !known => bed
                        .read(layer, &RowPositions::Start(0), 36, DType::F32, Layout::Dense)
                        .and_then(|_| {
                            bed.ask(&Ask { layer, rows: Some(2), ..Ask::new(FORMS[(s + n) % 2], &rules) })
                        })
                        .and_then(|worst| bed.check_sequence_table().map(|()| worst)),
                    other => Err(format!("{other:?}")),
                };
                report.record(&format!("{kind:?} at {n}"), &profile.name, outcome);
            }
            // Lengths are unchanged: the next step continues.
            bed.grow(&Count::All(2)).expect("room");
            report.record(
                &format!("{kind:?}, then"),
                &profile.name,
                bed.ask(&Ask::new(Target::Software, &rules)),
            );
        }
    }
    report.finish();
}

/// Shared pages are copied before an overwrite. If only the device knows which pages, the call is
/// refused.
#[test]
fn fork_keeps_overwritten_rows() {
    let layout = CacheLayout::Paged { page: 16, pages: 7 };
    let kind = Kind { layers: 2, ..Kind::new(CacheStorage::Q8(ScaleGroup::Of(32)), layout, 64) };
    let mut bed = Bed::new(full(), kind, Data::Lossless, 91);
    let read = |bed: &Bed, context: &str| {
        for layer in [0, 1] {
            bed.read(layer, &RowPositions::Start(0), 50, DType::F32, Layout::Dense)
                .and_then(|_| bed.check_sequence_table())
                .unwrap_or_else(|e| panic!("{context}: {e}"));
        }
    };
    bed.grow(&Count::Each(vec![40, 3])).expect("room");
    bed.fork(0, 1).expect("a fork");
    assert_eq!(bed.cache.free_pages(), 4);
    let tensor = |first: u32| RowPositions::Tensor(HostData::new(vec![first], [1, 1, 1, 1]));
    let error = bed.overwrite(0, &tensor(0), 1).expect_err("pages are shared");
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("only the device knows"), "{error}");
    // One call records the fork and the write. It copies the second page of three, in both layers.
    bed.overwrite(0, &RowPositions::Start(20), 3).expect("four pages");
    assert_eq!(bed.cache.free_pages(), 3);
    read(&bed, "a page apart");
    bed.overwrite(1, &RowPositions::Start(16), 16).expect("no page is needed");
    assert_eq!(bed.cache.free_pages(), 3);
    read(&bed, "the other layer");
    bed.overwrite(1, &RowPositions::Start(15), 25).expect("two pages");
    assert_eq!(bed.cache.free_pages(), 1);
    read(&bed, "all apart");
    bed.overwrite(0, &tensor(39), 2).expect("no page is shared");
    assert_eq!(bed.sequences.iter().map(|s| s.refused).collect::<Vec<_>>(), [1, 1]);
    read(&bed, "the device knows where");
    // Three pages are shared again, and one is free.
    bed.fork(1, 0).expect("a fork");
    bed.grow(&Count::Each(vec![24, 0])).expect("two pages");
    let free = bed.cache.free_pages();
    bed.cache.reserve(1, 64).expect("pages");
    bed.flush();
    assert_eq!((free, bed.cache.free_pages()), (2, 1));
    let error = bed.overwrite(0, &RowPositions::Start(0), 30).expect_err("two pages are needed");
    assert!(matches!(error, Error::OutOfPages { needed: 2, free: 1 }), "{error}");
    read(&bed, "after a refusal");
    bed.overwrite(0, &RowPositions::Start(0), 16).expect("one page");
    read(&bed, "after the next");
}

/// Keys that are overwritten at their positions equal appended ones, with their rotation.
#[test]
fn overwritten_keys_are_rotated_by_their_positions() {
    let gpu = &full().gpu;
    let rope = Rope::new(gpu.device(), RopeConfig::new(6)).expect("a rope");
    let shape = [2, 1, 9, 8];
    let [good, other] =
        ["good", "other"].map(|name| gpu.upload(&normals(name, shape).data).expect("an upload"));
    let config = CacheConfig::new(1, 8, 12).batch(2);
    let read = |cache: &Cache| {
        let outputs = [0; 2].map(|_| gpu.upload(&[f32::NAN; 2 * 9 * 8]).expect("an upload"));
        let [k, v] = outputs.each_ref().map(|b| TensorView::new(b, DType::F32, shape));
        gpu.submit(|e| cache.read(e, 0, &CacheRead::new(k, v))).expect("a reading");
        outputs.map(|b| gpu.download::<f32>(&b, 2 * 9 * 8).expect("a read-back"))
    };
    let view = |buffer| TensorView::new(buffer, DType::F32, shape);
    let [want, before, by_start, by_tensor] = [0, 1, 2, 3].map(|n| {
        let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
        let first = if n == 0 { view(&good) } else { view(&other) };
        gpu.submit(|e| {
            cache.advance(e, Tokens::All(9))?;
            cache.append(e, 0, &Append::new(first, first).rope(&rope))
        })
        .expect("room");
        if n >= 2 {
            // Rows 2 to 8, from the position of the first.
            let rows = view(&good).slice(2, 2, 7);
            let starts = gpu.upload(&[2u32]).expect("an upload");
            let at = match n {
                2 => RowPositions::Start(2),
                _ => RowPositions::Tensor(TensorView::new(&starts, DType::U32, [1, 1, 1, 1])),
            };
            let append = Append::new(rows, rows).rope(&rope);
            gpu.submit(|e| cache.overwrite(e, 0, &append, at)).expect("positions that are there");
        }
        read(&cache)
    });
    assert_eq!(by_start, by_tensor);
    for side in [0, 1] {
        for (n, got) in by_start[side].iter().enumerate() {
            let want = if n / 8 % 9 < 2 { &before } else { &want };
            assert_eq!(*got, want[side][n], "side {side}, element {n}");
        }
        assert_ne!(by_start[side], before[side]);
    }
}

#[test]
fn reads_exceed_workgroup_limit() {
    let gpu = &full().gpu;
    let (rows, dim) = (70_000, 2);
    let config = CacheConfig::new(1, dim, rows);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
    let values: Vec<f32> = (0..rows * dim).map(|n| n as f32).collect();
    let [x, k, v] = [&values, &vec![f32::NAN; rows * dim], &vec![f32::NAN; rows * dim]]
        .map(|x| gpu.upload(x).expect("an upload"));
    let view = |buffer| TensorView::new(buffer, DType::F32, [1, 1, rows, dim]);
    gpu.submit(|e| {
        cache.advance(e, Tokens::All(rows))?;
        cache.append(e, 0, &Append::new(view(&x), view(&x)))?;
        cache.read(e, 0, &CacheRead::new(view(&k), view(&v)))
    })
    .expect("room");
    for side in [&k, &v] {
        assert!(gpu.download::<f32>(side, rows * dim).expect("a read-back") == values);
    }
}
