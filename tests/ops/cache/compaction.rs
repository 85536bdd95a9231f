//! Caches from which tokens are removed. Attention sees the tokens that are left, at their
//! positions.

use wgpu_attention::cache::{Append, CacheLayout, CacheStorage, Keep, ScaleGroup, Tokens};
use wgpu_attention::position::RowPositions;
use wgpu_attention::{Attention, Cache, CacheConfig, Config, DType, Error, Forward, Scratch, TensorView};

use super::{DIMS, STORAGES, as_gpu, usual, view};
use crate::harness::{
    Ask, Bed, Count, Data, FORMS, Kind, Layout, Report, Rng, Rules, defaults, due, full, rest,
};

pub const LAYOUTS: [(CacheLayout, usize); 2] =
    [(CacheLayout::Contiguous, 40), (CacheLayout::Paged { page: 16, pages: 12 }, 40)];

/// Draws `n` rising indices below `stored`.
fn drawn(rng: &mut Rng, n: usize, stored: usize) -> Vec<usize> {
    let mut left = n;
    let mut list = Vec::new();
    for index in 0..stored {
        if rng.below(stored - index) < left {
            list.push(index);
            left -= 1;
        }
    }
    list
}

/// Draws the tokens that each layer and head of each sequence keeps.
pub fn lists(bed: &mut Bed, counts: &[usize]) -> Vec<Vec<Vec<Vec<usize>>>> {
    let Kind { layers, kv_heads, .. } = bed.kind;
    let stored: Vec<_> = bed.sequences.iter().map(|s| s.len() - s.removed).collect();
    let rng = &mut bed.rng;
    let mut of = |s: usize| -> Vec<Vec<Vec<usize>>> {
        let mut layer = |_| (0..kv_heads).map(|_| drawn(rng, counts[s], stored[s])).collect();
        (0..layers).map(&mut layer).collect()
    };
    (0..counts.len()).map(&mut of).collect()
}

/// Reads all rows of every layer, and asks for attention.
pub fn check(bed: &mut Bed, ask: &Ask) -> Result<f64, String> {
    bed.check_sequence_table()?;
    let mut worst = 0f64;
    for layer in 0..bed.kind.layers {
        let start = RowPositions::Start(bed.rng.below(30) as u32);
        worst = worst.max(bed.read(layer, &start, 30, DType::F32, Layout::Dense)?);
    }
    Ok(worst.max(bed.ask(ask)?))
}

fn removed(bed: &mut Bed, counts: &[usize], on_device: bool) -> Result<(), String> {
    let lists = lists(bed, counts);
    bed.compact(&lists, on_device).map_err(|e| format!("refused: {e}"))
}

/// Every storage and layout: lists on the host and on the device, new tokens, lists again.
#[test]
fn storages_and_layouts_match_model() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, compaction");
    let window = Rules { causal: true, window: Some([9, 0]), ..Default::default() };
    let rules = [Rules { causal: true, ..Default::default() }, window, Rules::default()];
    for (s, storage) in STORAGES.into_iter().enumerate() {
        for (l, (layout, capacity)) in LAYOUTS.into_iter().enumerate() {
            let (usual, splits) = usual(s, l);
            for form in FORMS {
                let key = format!("compaction, {storage:?}, {layout:?}");
                if !(form == usual && due(&key) || rest(&key)) {
                    continue;
                }
                let hadamard = ((s + l) % 4 == 3).then_some(32);
                let [head_dim, value_dim] = if hadamard.is_some() { [64, 32] } else { DIMS };
                let kind = Kind {
                    layers: 2,
                    hadamard,
                    head_dim,
                    value_dim,
                    compacts: true,
                    ..Kind::new(storage, layout, capacity)
                };
                let profile = [full(), defaults(), as_gpu()][(s + l) % 3];
                // Products of lossless numbers may lie halfway between two levels.
                let data = if hadamard.is_some() { Data::Random } else { Data::Lossless };
                let mut bed = Bed::new(profile, kind, data, 41 + s as u64);
                for (n, on_device) in [false, true, false, true].into_iter().enumerate() {
                    let rules = &rules[n % 3];
                    let dtype = [DType::F32, DType::F16][n % 2];
                    let ask = Ask { layer: n % 2, splits, dtype, ..Ask::new(form, rules) };
                    let late = Ask { rows: Some(2), ..ask };
                    let mut steps = || {
                        let refused = |e: Error| format!("refused: {e}");
                        bed.grow(&Count::Each(vec![17 - n, 21 - 4 * n])).map_err(refused)?;
                        let mut worst = bed.ask(&ask)?;
                        removed(&mut bed, if on_device { &[8, 8] } else { &[11, 3] }, on_device)?;
                        worst = worst.max(check(&mut bed, &late)?);
                        bed.grow(&Count::All(1)).map_err(refused)?;
                        worst = worst.max(bed.ask(&ask)?);
                        bed.overwrite(1, &RowPositions::Start(3), 9).map_err(refused)?;
                        Ok(worst.max(check(&mut bed, &late)?))
                    };
                    let outcome = steps();
                    report.record(&format!("{kind:?}, {n}"), &format!("{form:?}, {dtype:?}"), outcome);
                }
            }
        }
    }
    report.finish();
}

/// Lists on the device that are out of order or out of range. They change their sequence only, and
/// read nothing outside of it.
#[test]
fn hostile_lists_change_their_sequence_only() {
    for (n, (layout, capacity)) in LAYOUTS.into_iter().enumerate() {
        let profile = [full(), as_gpu()][n % 2];
        let gpu = &profile.gpu;
        let kind = Kind { compacts: true, ..Kind::new(CacheStorage::F32, layout, capacity) };
        let mut bed = Bed::new(profile, kind, Data::Lossless, 51);
        bed.grow(&Count::Each(vec![9, 30])).expect("room");
        // A second cache gets the same tokens of sequence 1 and keeps the right ones.
        let wild = [7u32, 3, u32::MAX, 0, 1 << 31, 5];
        let right = [2u32, 5, 6, 7, 20, 29];
        let numbers: Vec<u32> = wild.iter().chain(&right).copied().collect();
        let list = gpu.upload(&numbers).expect("an upload");
        let view = TensorView::new(&list, DType::U32, [2, 1, 1, 6]);
        gpu.submit(|encoder| bed.cache.compact(encoder, Keep::Device(&[view]))).expect("a compaction");
        let out =
            [gpu.buffer(4 * 2 * 2 * 30 * 8), gpu.buffer(4 * 2 * 2 * 30 * 8)].map(|b| b.expect("a buffer"));
        let views = [0, 1].map(|n| TensorView::new(&out[n], DType::F32, [2, 2, 30, 8]));
        let read = wgpu_attention::cache::CacheRead::new(views[0], views[1]);
        gpu.submit(|encoder| bed.cache.read(encoder, 0, &read)).expect("a read");
        let got: Vec<f32> = gpu.download(&out[0], 2 * 2 * 30 * 8).expect("a read-back");
        for (n, row) in got.chunks(8).enumerate() {
            let (s, h, position) = (n / 60, n / 30 % 2, n % 30);
            let token = bed.sequences[s].tokens.get(position).map(|token| &token[0].k[h * 8..][..8]);
            let zeros = row.iter().all(|x| *x == 0.0);
            if s == 1 {
                let kept = right.contains(&(position as u32));
                assert!(if kept { Some(row) == token } else { zeros }, "{layout:?}, {h}, {position}");
            } else {
                assert!(zeros || Some(row) == token, "{layout:?}, {h}, {position}");
            }
        }
        assert_eq!([bed.cache.stored(0), bed.cache.stored(1)], [Some(6), Some(6)]);
        assert_eq!([bed.cache.len(0), bed.cache.len(1)], [Some(9), Some(30)]);
    }
}

/// Latent caches: attention to the rows that are left equals attention to a cache of those rows.
#[test]
fn latent_rows_move_once() {
    let gpu = &full().gpu;
    let keep = [1, 4, 5, 11, 19];
    let (head_dim, value_dim, heads, new) = (40, 24, 4, 2);
    let mut rng = Rng::named("latent compaction");
    let rows = rng.normals(20 * head_dim);
    let left: Vec<f32> = keep.iter().flat_map(|n| rows[n * head_dim..][..head_dim].to_vec()).collect();
    let [rows, left, fresh, q] = [rows, left, rng.normals(new * head_dim), rng.normals(heads * 3 * head_dim)]
        .map(|x| gpu.upload(&x).expect("an upload"));
    let config = Config::new(heads, head_dim).kv_heads(1).value_dim(value_dim);
    let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
    for (layout, capacity) in LAYOUTS {
        let config = CacheConfig::new(1, head_dim, capacity).value_dim(value_dim).latent(true).layout(layout);
        let outs = [false, true].map(|compacts| {
            let mut cache =
                Cache::with_pipelines(gpu.pipelines(), config.compacts(compacts)).expect("a cache");
            let (first, count) = if compacts { (&rows, 20) } else { (&left, keep.len()) };
            let out = gpu.buffer(4 * heads * 3 * value_dim).expect("a buffer");
            gpu.submit(|e| {
                cache.advance(e, Tokens::All(count))?;
                cache.append(e, 0, &Append::latent(view(first, 1, count, head_dim)))?;
                if compacts {
                    cache.compact(e, Keep::Each(&[&keep]))?;
                }
                cache.advance(e, Tokens::All(new))?;
                cache.append(e, 0, &Append::latent(view(&fresh, 1, new, head_dim)))
            })
            .expect("a step");
            let call =
                Forward::with_cache(view(&q, heads, 3, head_dim), &cache, view(&out, heads, 3, value_dim));
            let call = call.at_end();
            let size = attention.scratch_size(&call).expect("a size");
            let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
            gpu.submit(|e| attention.forward(e, &call, &mut scratch)).expect("a call");
            gpu.download::<f32>(&out, heads * 3 * value_dim).expect("a read-back")
        });
        let apart = outs[0].iter().zip(&outs[1]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart <= 1e-5, "{layout:?}: {apart}");
    }
}

/// Wrong calls have clear errors and change nothing.
#[test]
fn wrong_calls_are_refused() {
    let gpu = &full().gpu;
    let config = CacheConfig::new(2, 8, 20).batch(2);
    let ring = config.layout(CacheLayout::Ring { sink_tokens: 2 }).compacts(true);
    let made = Cache::with_pipelines(gpu.pipelines(), ring).map(drop);
    assert!(matches!(made, Err(Error::Unsupported { .. })), "{made:?}");
    let mut plain = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config.compacts(true)).expect("a cache");
    gpu.submit(|e| plain.advance(e, Tokens::All(5))).expect("room");
    gpu.submit(|e| cache.advance(e, Tokens::Each(&[5, 9]))).expect("room");
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let all = [0, 1, 2, 3, 4];
    let got = plain.compact(&mut encoder, Keep::Each(&[&all, &all]));
    assert!(matches!(got, Err(Error::Unsupported { .. })), "{got:?}");
    let list = gpu.upload(&[0u32; 64]).expect("an upload");
    let view = |shape| TensorView::new(&list, DType::U32, shape);
    let option = |got: Result<(), Error>| assert!(matches!(got, Err(Error::Option { .. })), "{got:?}");
    option(cache.compact(&mut encoder, Keep::Each(&[&[1, 1], &all])));
    option(cache.compact(&mut encoder, Keep::Each(&[&[2, 1], &all])));
    option(cache.compact(&mut encoder, Keep::Each(&[&[0, 5], &all])));
    option(cache.compact(&mut encoder, Keep::Device(&[view([2, 1, 1, 6])])));
    let length = |got: Result<(), Error>| assert!(matches!(got, Err(Error::Length { .. })), "{got:?}");
    length(cache.compact(&mut encoder, Keep::Each(&[&all])));
    length(cache.compact(&mut encoder, Keep::Device(&[])));
    let shape = cache.compact(&mut encoder, Keep::Device(&[view([2, 3, 1, 4])]));
    assert!(matches!(shape, Err(Error::Shape { .. })), "{shape:?}");
    assert_eq!([cache.stored(0), cache.stored(1)], [Some(5), Some(9)]);
    cache.compact(&mut encoder, Keep::Each(&[&[1, 4], &[8]])).expect("a compaction");
    assert_eq!([cache.stored(0), cache.stored(1), cache.len(0)], [Some(2), Some(1), Some(5)]);
    option(cache.truncate(0, 4));
    option(cache.rewind(&mut encoder, Tokens::All(1)));
    cache.clear(0).expect("a sequence");
    assert_eq!([cache.stored(0), cache.len(0)], [Some(0); 2]);
    let config = config.storage(CacheStorage::Q4(ScaleGroup::Row)).compacts(true);
    assert_eq!(config.token_bytes(), 2 * (2 * (16 + 4) + 4));
}
