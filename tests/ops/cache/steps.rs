//! Generation token by token and in chunks. Every layout, storage and target gives the result of
//! one causal call over the same tokens.

use wgpu_attention::DType;
use wgpu_attention::cache::{CacheLayout, CacheStorage, ScaleGroup};
use wgpu_attention::tuning::Target;

use super::{DIMS, LAYOUTS, STORAGES, usual};
use crate::harness::{
    Ask, Bed, Count, Data, FORMS, Kind, Layout, Places, Profile, Report, Rules, defaults, due, full,
    planned_by_name, profiles, rest, with_registers,
};

fn causal() -> Rules {
    Rules { causal: true, ..Default::default() }
}

/// Appends chunks of these lengths. Attention reads each chunk right after its append.
fn runs(report: &mut Report, bed: &mut Bed, ask: &Ask, chunks: &[usize]) {
    for n in chunks {
        let name = format!("{:?}, {n} rows", bed.kind);
        let profile = bed.profile.name;
        let setup = format!("{profile}, {:?}, {:?}, splits {:?}", ask.form, ask.dtype, ask.splits);
        let outcome = match bed.grow(&Count::All(*n)) {
            Ok(()) => bed.ask(ask).and_then(|worst| bed.check_sequence_table().map(|()| worst)),
            Err(e) => Err(format!("refused: {e}")),
        };
        report.record(&name, &setup, outcome);
    }
}

/// Chunks for a ring of 24: they fill it, then overwrite it by single tokens and by larger chunks.
const CHUNKS: [usize; 10] = [5, 1, 1, 1, 20, 1, 1, 7, 1, 18];

#[test]
fn layouts_and_storages_match_model() {
    let mut report = Report::new("caches, steps");
    let [head_dim, value_dim] = DIMS;
    for (s, storage) in STORAGES.into_iter().enumerate() {
        for (l, (layout, capacity)) in LAYOUTS.into_iter().enumerate() {
            let (usual, splits) = usual(s, l);
            for form in FORMS {
                let key = format!("steps, {storage:?}, {layout:?}");
                if !(form == usual && due(&key) || rest(&key)) {
                    continue;
                }
                // Most cases run on the device whose subgroups the kernels use.
                let profile = profiles()[usize::from((s + 2 * l) % 4 == 3)];
                let kind = Kind { head_dim, value_dim, ..Kind::new(storage, layout, capacity) };
                let mut bed = Bed::new(profile, kind, Data::Lossless, 7 + s as u64);
                let rules = causal();
                runs(&mut report, &mut bed, &Ask { splits, ..Ask::new(form, &rules) }, &CHUNKS);
            }
        }
    }
    report.finish();
}

/// Keys and values in different storages, in every layout. Rows are read back and overwritten too.
#[test]
fn sides_may_differ_in_storage() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, two storages");
    let group = ScaleGroup::Of(32);
    let pairs = [
        [CacheStorage::Q8(group), CacheStorage::Q4(group)],
        [CacheStorage::F16, CacheStorage::Gaussian4(ScaleGroup::Row)],
        [CacheStorage::Q4_0, CacheStorage::F32],
        [CacheStorage::Q8_0, CacheStorage::Q4_0],
        [CacheStorage::E4M3(group), CacheStorage::E5M2(ScaleGroup::Row)],
        [CacheStorage::Q4(group), CacheStorage::Q4_0],
    ];
    for (n, [keys, values]) in pairs.into_iter().enumerate() {
        for (l, (layout, capacity)) in LAYOUTS.into_iter().enumerate() {
            let (usual, splits) = usual(n, l);
            for form in FORMS {
                let key = format!("two storages, {keys:?}, {values:?}, {layout:?}");
                if !(form == usual && due(&key) || rest(&key)) {
                    continue;
                }
                let hadamard = ((n + l) % 3 == 0).then_some(32);
                let [head_dim, value_dim] = if hadamard.is_some() { [64, 32] } else { DIMS };
                let value_storage = Some(values);
                let kind = Kind { head_dim, value_dim, hadamard, ..Kind::new(keys, layout, capacity) };
                let kind = Kind { value_storage, ..kind };
                let mut bed = Bed::new(full(), kind, Data::Random, 31 + n as u64);
                let rules = causal();
                runs(&mut report, &mut bed, &Ask { splits, ..Ask::new(form, &rules) }, &[5, 1, 20, 1, 7]);
                let at = Places::Start(2);
                let outcome = bed.overwrite(0, &at, 4).map_err(|e| format!("refused: {e}"));
                let outcome = outcome.and_then(|()| bed.read(0, &at, 6, DType::F32, Layout::Dense));
                report.record(&format!("{kind:?}, rows"), &format!("{form:?}"), outcome);
            }
        }
    }
    report.finish();
}

/// Every chunk length, on a ring that the chunks overwrite and on pages that they cross.
#[test]
fn chunks_of_every_length() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, chunks");
    for (layout, capacity) in [
        (CacheLayout::Ring { sink_tokens: 2 }, 13),
        (CacheLayout::Ring { sink_tokens: 0 }, 7),
        (CacheLayout::Paged { page: 32, pages: 14 }, 212),
    ] {
        let kind = Kind { heads: 2, ..Kind::new(CacheStorage::Q8(ScaleGroup::Row), layout, capacity) };
        let mut bed = Bed::new(full(), kind, Data::Lossless, 11);
        let rules = causal();
        let chunks: Vec<_> = (1..=20).collect();
        runs(&mut report, &mut bed, &Ask::new(Target::Software, &rules), &chunks);
    }
    report.finish();
}

/// Only F32 storage holds these values exactly. The error is at most the effect of the storage's
/// rounding.
#[test]
fn error_stays_within_storage_rounding() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, rounding");
    for (s, storage) in STORAGES.into_iter().enumerate() {
        let [head_dim, value_dim] = DIMS;
        let (layout, capacity) = LAYOUTS[s % 3];
        let (usual, splits) = usual(s, s % 3);
        for form in FORMS {
            let key = format!("rounding, {storage:?}");
            if !(form == usual && due(&key) || rest(&key)) {
                continue;
            }
            let kind = Kind { head_dim, value_dim, ..Kind::new(storage, layout, capacity) };
            let mut bed = Bed::new(full(), kind, Data::Random, 23 + s as u64);
            let rules = causal();
            runs(&mut report, &mut bed, &Ask { splits, ..Ask::new(form, &rules) }, &CHUNKS);
        }
    }
    report.finish();
}

/// Tiles with fewer rows and channels per invocation, which prefetch nothing, and with more scores:
/// 2 to 60 packed rows.
#[test]
fn register_counts() {
    planned_otherwise("caches, register counts", Target::Gpu, 43, &[30, 1, 2, 4, 8], |n| {
        with_registers(profiles()[n % 2], [128, 64, 256][n / 2 % 3])
    });
}

/// Vectors of 4 and of 16 lanes: 2 to 8 packed rows.
#[test]
fn lanes() {
    crate::harness::in_turn!();
    planned_otherwise("caches, lanes", Target::Software, 53, &[30, 1, 2, 4], |n| {
        planned_by_name(["16 lanes", "4 lanes"][n % 3 / 2]).expect("there is one")
    });
}

/// Every storage in pages, with plans for other devices.
fn planned_otherwise(
    name: &'static str,
    form: Target,
    seed: u64,
    chunks: &[usize],
    profile: impl Fn(usize) -> &'static Profile,
) {
    let mut report = Report::new(name);
    let dims = [(64, 130), (128, 24), (40, 64)];
    for (s, storage) in STORAGES.into_iter().enumerate() {
        for (n, (head_dim, value_dim)) in dims.into_iter().enumerate() {
            let key = format!("{name}, {storage:?}, {head_dim}");
            if !(n == s % 3 && due(&key) || rest(&key)) {
                continue;
            }
            let layout = CacheLayout::Paged { page: 16, pages: 12 };
            let kind = Kind { heads: 2, kv_heads: 1, head_dim, value_dim, ..Kind::new(storage, layout, 80) };
            let mut bed = Bed::new(profile(s + n), kind, Data::Lossless, seed + s as u64);
            let rules = causal();
            let ask = Ask { splits: [None, Some(2)][s % 2], ..Ask::new(form, &rules) };
            runs(&mut report, &mut bed, &ask, chunks);
        }
    }
    report.finish();
}

/// Channel counts that no vector, word or group divides, and groups of heads.
#[test]
fn channels() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, channels");
    let dims = [(1, 13), (13, 1), (40, 65), (65, 130), (130, 40), (13, 40), (96, 33)];
    let groups = [(1, 1), (3, 1), (4, 4), (6, 2)];
    for (n, (head_dim, value_dim)) in dims.into_iter().enumerate() {
        for (s, storage) in STORAGES.into_iter().chain([CacheStorage::Q8(ScaleGroup::Of(96))]).enumerate() {
            // Two runs with each storage are usual.
            let always = s == n % 7 || s == (n + 2) % 7;
            let key = format!("channels, {head_dim}, {value_dim}, {storage:?}");
            if !(always && due(&key) || rest(&key)) {
                continue;
            }
            let (layout, capacity) = LAYOUTS[(n + s) % 3];
            let (heads, kv_heads) = groups[(n + s) % 4];
            let batch = 1 + s % 2;
            let kind =
                Kind { batch, heads, kv_heads, head_dim, value_dim, ..Kind::new(storage, layout, capacity) };
            let profile = profiles()[n % 2];
            let mut bed = Bed::new(profile, kind, Data::Lossless, 31 + n as u64);
            // Other strides and offsets, all unaligned.
            bed.layout = if s % 2 == 0 { Layout::Window(2 * n as u64 + 1) } else { Layout::Blhd };
            let rules = causal();
            let form = FORMS[(n + s / 2) % 2];
            let splits = [None, Some(2)][s / 2 % 2];
            let ask = Ask { splits, layout: bed.layout, ..Ask::new(form, &rules) };
            runs(&mut report, &mut bed, &ask, &[3, 1, 2, 1]);
        }
    }
    report.finish();
}

/// Rows of several words for a lane of the decode kernel for GPUs, in every storage.
#[test]
fn rows_of_several_words() {
    let mut report = Report::new("caches, several words");
    for (s, storage) in STORAGES.into_iter().enumerate() {
        if s > 0 && !due(&format!("several words, {storage:?}")) {
            continue;
        }
        let (layout, capacity) = LAYOUTS[s % 3];
        let kind = Kind { head_dim: 260, value_dim: 8, ..Kind::new(storage, layout, capacity) };
        let mut bed = Bed::new(profiles()[s % 2], kind, Data::Lossless, 61);
        let rules = causal();
        runs(&mut report, &mut bed, &Ask::new(Target::Gpu, &rules), &[3, 1]);
    }
    report.finish();
}

/// Queries, outputs and new keys and values in f16 and in bf16.
#[test]
fn steps_in_f16_and_bf16() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, half floats");
    let types: [(&Profile, DType); 2] = [(full(), DType::F16), (defaults(), DType::BF16)];
    for (s, storage) in STORAGES.into_iter().enumerate() {
        let (layout, capacity) = LAYOUTS[s % 3];
        let (profile, dtype) = types[usize::from(s % 4 > 1)];
        for (t, form) in FORMS.into_iter().enumerate() {
            let key = format!("{dtype:?}, {storage:?}");
            if !(t == s % 2 && due(&key) || rest(&key)) {
                continue;
            }
            let [head_dim, value_dim] = DIMS;
            let kind = Kind { head_dim, value_dim, ..Kind::new(storage, layout, capacity) };
            let mut bed = Bed::new(profile, kind, Data::Lossless, 41);
            bed.dtype = dtype;
            bed.layout = [Layout::Dense, Layout::Window(5)][t];
            let rules = causal();
            let splits = [None, Some(3)][s / 2 % 2];
            let ask = Ask { dtype, splits, layout: bed.layout, ..Ask::new(form, &rules) };
            runs(&mut report, &mut bed, &ask, &CHUNKS[..5]);
        }
    }
    report.finish();
}

/// Sequences of different lengths: rows past a sequence's count are not read, and give zero.
#[test]
fn ragged_batches() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, ragged");
    let steps = [[6, 0, 2], [0, 3, 1], [1, 1, 0], [4, 2, 4], [0, 0, 1], [1, 4, 3]];
    for (l, (layout, capacity)) in LAYOUTS.into_iter().enumerate() {
        for (t, form) in FORMS.into_iter().enumerate() {
            for (n, splits) in [None, Some(4)].into_iter().enumerate() {
                if n != (l + t) % 2 && !rest(&format!("ragged, {layout:?}")) {
                    continue;
                }
                let kind = Kind { batch: 3, ..Kind::new(CacheStorage::F16, layout, capacity.min(20)) };
                let mut bed = Bed::new(defaults(), kind, Data::Lossless, 43);
                for (n, step) in steps.iter().enumerate() {
                    let rules = [causal(), Rules::default()][n % 2].clone();
                    let ask = Ask { splits, ..Ask::new(form, &rules) };
                    let outcome = match bed.grow(&Count::Each(step.to_vec())) {
                        Ok(()) => bed.ask(&ask).and_then(|own| {
                            // Then as many queries of each sequence, whatever the last append was.
                            let worst = bed.ask(&Ask { rows: Some(2), ..ask })?;
                            bed.check_sequence_table().map(|()| own.max(worst))
                        }),
                        Err(e) => Err(format!("refused: {e}")),
                    };
                    report.record(
                        &format!("{step:?} of {layout:?}"),
                        &format!("{form:?}, {splits:?}"),
                        outcome,
                    );
                }
            }
        }
    }
    report.finish();
}

/// Non-finite numbers show where queries see them, in their group and nowhere else. Huge values do
/// not overflow f16.
#[test]
fn bad_numbers_show_in_their_rows() {
    use wgpu_attention::cache::{Append, Tokens};
    use wgpu_attention::{Attention, Cache, CacheConfig, Config, Forward, Scratch, TensorView};
    let gpu = &full().gpu;
    for (s, storage) in STORAGES.into_iter().enumerate() {
        for (t, form) in FORMS.into_iter().enumerate() {
            let always = matches!(storage, CacheStorage::F16 | CacheStorage::BF16 | CacheStorage::Q8_0);
            if !(always && t == s % 2 || rest(&format!("bad numbers, {storage:?}"))) {
                continue;
            }
            let config = CacheConfig::new(1, 64, 8).storage(storage);
            let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
            // Key i is 1 in channel i, value i is i in all channels. Later values hold NaN, ∞ and
            // 1e30.
            let mut v: Vec<f32> = (0..4 * 64).map(|n| (n / 64) as f32).collect();
            (v[64 + 40], v[2 * 64 + 3], v[3 * 64 + 50]) = (f32::NAN, f32::INFINITY, 1e30);
            let k: Vec<f32> = (0..4 * 64).map(|n| if n % 64 == n / 64 { 7.0 } else { 0.0 }).collect();
            let [k, v] = [&k, &v].map(|x| gpu.upload(x).expect("an upload"));
            let view = |b, rows| TensorView::new(b, DType::F32, [1, 1, rows, 64]);
            let q = gpu.upload(&vec![0.0f32; 4 * 64]).expect("an upload");
            let out = gpu.buffer(4 * 4 * 64).expect("a buffer");
            let config = Config::new(1, 64).kernel_options(wgpu_attention::KernelOptions::new().target(form));
            let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
            let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("scratch");
            gpu.submit(|e| {
                cache.advance(e, Tokens::All(4))?;
                cache.append(e, 0, &Append::new(view(&k, 4), view(&v, 4)))?;
                let call = Forward::with_cache(view(&q, 4), &cache, view(&out, 4));
                attention.forward(e, &call.mask(wgpu_attention::Mask::causal()), &mut scratch)
            })
            .expect("a step");
            let out: Vec<f32> = gpu.download(&out, 4 * 64).expect("a read-back");
            let at = |row: usize, d: usize| out[row * 64 + d];
            let name = format!("{storage:?}, {form:?}");
            assert!(out[..64].iter().all(|x| *x == 0.0), "{name}: the first row sees zeros only");
            let group = match storage {
                CacheStorage::Q8(group)
                | CacheStorage::Q4(group)
                | CacheStorage::E4M3(group)
                | CacheStorage::E5M2(group)
                | CacheStorage::Gaussian4(group) => Some(group),
                CacheStorage::Q8_0 | CacheStorage::Q4_0 => Some(ScaleGroup::Of(32)),
                _ => None,
            };
            let (grouped, whole) = (group.is_some(), group == Some(ScaleGroup::Row));
            // Row 1 sees the NaN of channel 40, in a group with channels 32 to 63 or all.
            assert!(at(1, 40).is_nan(), "{name}: {}", at(1, 40));
            assert_eq!(at(1, 39).is_nan(), grouped, "{name}");
            assert_eq!(at(1, 3).is_nan(), whole, "{name}");
            if !whole {
                // Half of a one, as the storage rounds it.
                let want = 0.5 * wgpu_attention::reference::cache::stored(storage, &[1.0; 32])[3];
                assert!((at(1, 3) - want).abs() < 1e-5, "{name}: {}", at(1, 3));
            }
            // Row 2 sees ∞ in channel 3.
            assert!(!at(2, 3).is_finite(), "{name}");
            assert_eq!(at(2, 20).is_finite(), !grouped, "{name}");
            // In row 3, channel 50 has a value above f16's range.
            if storage == CacheStorage::F16 {
                assert!((at(3, 50) - (65504.0 + 3.0) / 4.0).abs() < 1.0, "{name}: {}", at(3, 50));
            }
            if storage == CacheStorage::BF16 {
                assert!((at(3, 50) / 2.5e29 - 1.0).abs() < 1e-2, "{name}: {}", at(3, 50));
            }
            if storage == CacheStorage::F32 {
                assert!((at(3, 50) / 2.5e29 - 1.0).abs() < 1e-5, "{name}: {}", at(3, 50));
            }
        }
    }
}

/// A cache so long that the plan splits its keys, with few and with many tokens.
#[test]
fn long_caches_split_automatically() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, long");
    for (layout, storage) in [
        (CacheLayout::Contiguous, CacheStorage::F32),
        (CacheLayout::Ring { sink_tokens: 5 }, CacheStorage::Q8(ScaleGroup::Row)),
        (CacheLayout::Paged { page: 256, pages: 9 }, CacheStorage::F16),
        (CacheLayout::Contiguous, CacheStorage::BF16),
    ] {
        for form in FORMS {
            let kind = Kind { batch: 1, kv_heads: 1, ..Kind::new(storage, layout, 2100) };
            let mut bed = Bed::new(full(), kind, Data::Lossless, 71);
            let rules = causal();
            // The last one overwrites the start of the ring.
            let chunks = [3, 290, 700, 1105, 90];
            for chunk in &chunks[..if kind.ring().is_some() { 5 } else { 4 }] {
                bed.grow(&Count::All(*chunk)).expect("room");
                let outcome = bed.ask(&Ask { rows: Some(1), ..Ask::new(form, &rules) });
                report.record(&format!("{layout:?}, {chunk} more"), &format!("{form:?}"), outcome);
                let window = Rules { window: Some([600, 0]), ..causal() };
                let outcome = bed.ask(&Ask { rows: Some(3), ..Ask::new(form, &window) });
                report.record(&format!("{layout:?}, window, {chunk} more"), &format!("{form:?}"), outcome);
            }
        }
    }
    report.finish();
}

/// One step in the caller's pass, in one encoder with the steps before and after it.
#[test]
fn steps_in_a_callers_pass() {
    use wgpu_attention::cache::{Append, Tokens};
    use wgpu_attention::{Attention, Cache, CacheConfig, Config, Forward, Mask, Scratch, TensorView};
    let gpu = &full().gpu;
    let upload = |seed: f32| {
        let x: Vec<f32> = (0..6 * 8).map(|n| ((n as f32 + 1.0) * seed).sin()).collect();
        gpu.upload(&x).expect("an upload")
    };
    let [q, k, v] = [0.3, 0.5, 0.7].map(upload);
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(1, 8)).expect("an operator");
    let outs = [false, true].map(|in_passes| {
        let mut cache = Cache::with_pipelines(gpu.pipelines(), CacheConfig::new(1, 8, 6)).expect("a cache");
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("scratch");
        let out = gpu.upload(&[f32::NAN; 48]).expect("an upload");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        for n in 0..6 {
            // Token n of each tensor, and its place in out. A buffer is read or written, so out is
            // a separate buffer.
            let row = |b| TensorView::new(b, DType::F32, [1, 1, 1, 8]).with_offset(8 * n);
            cache.advance(&mut encoder, Tokens::All(1)).expect("room");
            let append = Append::new(row(&k), row(&v));
            let call = Forward::with_cache(row(&q), &cache, row(&out)).mask(Mask::causal());
            if in_passes {
                let mut pass = encoder.begin_compute_pass(&Default::default());
                cache.append(&mut pass, 0, &append).expect("a recording");
                attention.forward(&mut pass, &call, &mut scratch).expect("a recording");
            } else {
                cache.append(&mut encoder, 0, &append).expect("a recording");
                attention.forward(&mut encoder, &call, &mut scratch).expect("a recording");
            }
        }
        gpu.queue().submit([encoder.finish()]);
        gpu.download::<f32>(&out, 48).expect("a read-back")
    });
    assert!(outs[0].iter().all(|x| x.is_finite()), "{:?}", outs[0]);
    assert_eq!(outs[0], outs[1]);
    // The first token sees itself, the last one all six.
    let v: Vec<f32> = gpu.download(&v, 48).expect("a read-back");
    assert!(outs[0][..8].iter().zip(&v).all(|(a, b)| (a - b).abs() < 1e-6));
    assert!(outs[0][40..].iter().zip(&v[40..]).any(|(a, b)| (a - b).abs() > 1e-2));
}

/// A ring that has advanced very far gives the bits of a ring that has advanced by its length.
#[test]
fn far_advanced_rings_keep_bits() {
    use wgpu_attention::cache::{Append, Tokens};
    use wgpu_attention::{Attention, Cache, CacheConfig, Config, Forward, Mask, Scratch, TensorView};
    let gpu = &full().gpu;
    let x: Vec<f32> = (0..9 * 8).map(|n| ((n as f32 + 1.0) * 0.37).sin()).collect();
    let x = gpu.upload(&x).expect("an upload");
    let slope = gpu.upload(&[0.25f32]).expect("an upload");
    for form in FORMS {
        let config = Config::new(1, 8).kernel_options(wgpu_attention::KernelOptions::new().target(form));
        let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
        // The second ring has passed most of the possible positions, but not a multiple of its
        // window.
        let outs = [0, (1 << 29) - 1000].map(|before| {
            let config = CacheConfig::new(1, 8, 7).layout(CacheLayout::Ring { sink_tokens: 0 });
            let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
            let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("scratch");
            let out = gpu.upload(&[f32::NAN; 8]).expect("an upload");
            let row = |b, n: usize| TensorView::new(b, DType::F32, [1, 1, 1, 8]).with_offset(8 * n);
            gpu.submit(|e| {
                if before > 0 {
                    cache.advance(e, Tokens::All(before))?;
                }
                for n in 0..9 {
                    cache.advance(e, Tokens::All(1))?;
                    cache.append(e, 0, &Append::new(row(&x, n), row(&x, n)))?;
                }
                let slope = TensorView::new(&slope, DType::F32, [1; 4]);
                let call = Forward::with_cache(row(&x, 0), &cache, row(&out, 0));
                let mask = Mask::causal().alibi(slope).window(5, 0);
                attention.forward(e, &call.mask(mask), &mut scratch)
            })
            .expect("steps");
            gpu.download::<f32>(&out, 8).expect("a read-back")
        });
        assert!(outs[0].iter().all(|x| x.is_finite()), "{form:?}: {outs:?}");
        assert_eq!(outs[0], outs[1], "{form:?}");
    }
}
