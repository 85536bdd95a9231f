//! The fused kernel on matrix units, in fragments of 8 × 8 and of 16 × 16. The tests cover edges,
//! scores that move a row's origin, and every rule of a mask. They also check the effects and
//! errors of each setting. Shares run all other cases of the fused path on matrix units (see
//! `run::setups`). They also run most cases in fragments of 16 × 16, which take three times as long
//! to compile.

use wgpu_attention::cache::{Append, CacheLayout, CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::tuning::{Algorithm, MatrixUnits, Target};
use wgpu_attention::{
    Alignment, Attention, Cache, CacheConfig, Config, DType, Forward, KernelOptions, Mask, Scratch, Shape,
    TensorView,
};

use crate::harness::device::believing;
use crate::harness::report::judge_outputs;
use crate::harness::run::run_with;
use crate::harness::{
    Case, DropoutData, HostData, Layout, Profile, Report, Rng, Setup, Weights, due, full, matrices, rest, run,
};
use crate::small;

fn check(report: &mut Report, case: &Case, setup: &Setup) {
    let skips = report.skips();
    report.check_in(case, setup, &mut Default::default());
    assert_eq!(report.skips(), skips, "{} is for matrix units", case.name);
}

/// True if cases that need a separate kernel run on `profile`.
pub fn runs(profile: &Profile, name: &str) -> bool {
    let key = format!("matrix, {name}, {}", profile.name);
    profile.compiles_fast() && due(&key) || rest(&key)
}

pub fn finish(mut report: Report) {
    if matrices().next().is_none() {
        report.skip("the adapter has no matrix units, or the device cannot use them".into(), "all");
    }
    report.finish();
}

fn shape(q_len: usize, kv_len: usize, head_dim: usize, value_dim: usize) -> Shape {
    Shape { batch: 1, heads: 2, kv_heads: 1, q_len, kv_len, head_dim, value_dim }
}

#[test]
fn lengths() {
    crate::harness::in_turn!();
    let mut report = Report::new("matrix, lengths");
    for profile in matrices() {
        for q_len in [1, 7, 8, 9, 16, 31, 33, 64, 65] {
            for kv_len in [1, 7, 8, 15, 16, 17, 33, 65] {
                let case = Case::random(format!("matrix {q_len} {kv_len}"), shape(q_len, kv_len, 16, 16));
                let setup = Setup::matrix(profile, Layout::Dense);
                check(&mut report, &case.clone().with(|c| c.rules.causal = true), &setup);
                check(&mut report, &case, &setup);
            }
        }
    }
    finish(report);
}

#[test]
fn channels() {
    crate::harness::in_turn!();
    let mut report = Report::new("matrix, channels");
    let few = [(1, 1), (2, 5), (13, 7), (16, 48), (7, 33), (33, 17), (64, 63)];
    // Each takes a software driver minutes.
    let many = [(80, 96), (130, 3), (3, 200), (128, 128), (192, 128), (255, 256)];
    for profile in matrices() {
        for (n, (head_dim, value_dim)) in few.into_iter().chain(many).enumerate() {
            let case = Case::random(
                format!("matrix channels {head_dim} {value_dim}"),
                shape(21, 37, head_dim, value_dim),
            );
            let layout = if n % 2 == 0 { Layout::Dense } else { Layout::Window(n as u64) };
            // The first three share a kernel, the fourth has another one.
            if n < 3
                || n == 3 && runs(profile, &case.name)
                || rest(&format!("{}, {}", case.name, profile.name))
            {
                check(&mut report, &case, &Setup::matrix(profile, layout));
            }
        }
    }
    finish(report);
}

/// The tiles for GPUs. Each is a kernel that takes long to compile.
#[test]
fn tiles_of_gpus() {
    let mut report = Report::new("matrix, tiles of GPUs");
    for profile in matrices() {
        let large = Setup { form: Target::Gpu, ..Setup::matrix(profile, Layout::Dense) };
        for (q_len, dim) in [(40, 16), (20, 32), (130, 64), (300, 128)] {
            // Another test compiles the first kernel, too.
            let case = Case::random(format!("matrix large {q_len} {dim}"), shape(q_len, 150, dim, dim))
                .with(|c| c.rules.causal = dim > 16);
            let key = format!("{}, {}", case.name, profile.name);
            if dim == 16 && profile.compiles_fast() && due(&key) || rest(&key) {
                check(&mut report, &case, &large);
            }
        }
    }
    finish(report);
}

/// Every rule of a mask alone. If the kernels take long to compile, only some rules run.
#[test]
fn masks() {
    let mut report = Report::new("matrix, masks");
    let shape = Shape { head_dim: 16, value_dim: 16, ..small::SHAPE };
    for profile in matrices() {
        for (name, rules) in small::single_masks() {
            let case = Case::random(format!("matrix, {name}"), shape).with(|c| c.rules = rules);
            let key = format!("matrix, {name}");
            if ["documents", "blocks"].contains(&name) && due(&key) || runs(profile, &case.name) {
                check(&mut report, &case, &Setup::matrix(profile, Layout::Dense));
            }
        }
    }
    finish(report);
}

/// Scores whose maxima rise from key to key, slowly and in steps. The sizes are just below and just
/// above the limit at which the origin moves.
#[test]
fn rising_scores() {
    let mut report = Report::new("matrix, rising scores");
    for profile in matrices().filter(|p| due(&format!("matrix, rising scores, {}", p.name))) {
        for (n, rise) in [0.05, 0.4, 0.5, 0.6, 3.0, 20.0, -0.5].into_iter().enumerate() {
            let case = Case::random(format!("matrix rising {rise}"), shape(33, 90, 16, 16)).with(|c| {
                c.scale = Some(1.0);
                // The score q · k is `rise` times the key's index, plus a little noise. In every
                // third row it falls.
                for (row, q) in c.q.chunks_exact_mut(16).enumerate() {
                    q.iter_mut().for_each(|x| *x *= 0.25);
                    q[0] = if row % 3 == 0 { -1.0 } else { 1.0 };
                }
                for (j, k) in c.k.chunks_exact_mut(16).enumerate() {
                    k[0] = rise * j as f32;
                }
                // Half of the cases also have a bias, which uses the other unit of scores.
                if n % 2 == 1 {
                    c.rules.bias = Some(HostData::of([1, 1, 1, 90], |[.., j]| 0.1 * j as f32));
                }
            });
            check(&mut report, &case, &Setup::matrix(profile, Layout::Dense));
        }
    }
    finish(report);
}

/// One key has most of the weight and a value of zero. Hundreds have little weight, near the
/// smallest numbers of f16.
#[test]
fn small_weights_count() {
    crate::harness::in_turn!();
    let mut report = Report::new("matrix, small weights");
    for profile in matrices().filter(|p| due(&format!("matrix, small weights count, {}", p.name))) {
        for above in [6.0, 9.0, 12.0] {
            let case =
                Case::random(format!("matrix small weights {above}"), shape(20, 400, 16, 16)).with(|c| {
                    c.scale = Some(1.0);
                    c.q.iter_mut()
                        .chain(&mut c.k)
                        .enumerate()
                        .for_each(|(n, x)| *x *= if n % 16 == 0 { 0.0 } else { 0.1 });
                    c.q.iter_mut().step_by(16).for_each(|x| *x = 1.0);
                    c.k[5 * 16] = above;
                    c.v[5 * 16..][..16].fill(0.0);
                });
            check(&mut report, &case, &Setup::matrix(profile, Layout::Dense));
        }
    }
    finish(report);
}

#[test]
fn large_scores_and_hidden_rows() {
    crate::harness::in_turn!();
    let mut report = Report::new("matrix, large scores");
    for profile in matrices().filter(|p| due(&format!("matrix, large scores and hidden rows, {}", p.name))) {
        let setup = Setup::matrix(profile, Layout::Blhd);
        for size in [1e2, 1e3, -1e3] {
            let case = Case::random(format!("matrix scores {size}"), shape(40, 50, 16, 16)).with(|c| {
                // The score q · k is about ±size for every pair.
                c.scale = Some(1.0);
                c.q.iter_mut().enumerate().for_each(|(n, x)| *x = if n % 16 == 0 { size } else { *x });
                c.k.iter_mut().enumerate().for_each(|(n, x)| *x = if n % 16 == 0 { 1.0 } else { *x });
            });
            check(&mut report, &case, &setup);
        }
        let hidden = Case::random("matrix, −∞ in the bias", shape(40, 50, 16, 16)).with(|c| {
            // Whole rows, whole tiles of some rows, and single keys.
            c.rules.bias = Some(HostData::of([1, 2, 40, 50], |[_, h, i, j]| {
                let out =
                    i % 5 == 0 || (i % 5 == 1 && j < 33) || (i % 5 == 2 && j > 16) || (h + i + j) % 7 == 0;
                if out { f32::NEG_INFINITY } else { 0.0 }
            }));
        });
        check(&mut report, &hidden, &setup);
        // So large that the next number is further away than the origin may lag.
        let offset = Case::random("matrix, offset", shape(20, 60, 16, 16)).with(|c| {
            c.rules.bias = Some(HostData::of([1, 1, 1, 60], |[.., j]| -1.5e8 + 12.0 * j as f32));
        });
        check(&mut report, &offset, &setup);
        let none = Case::random("matrix, nothing seen", shape(70, 5, 16, 16)).with(|c| {
            (c.rules.causal, c.rules.alignment) = (true, Alignment::BottomRight);
        });
        check(&mut report, &none, &setup);
    }
    finish(report);
}

/// Values with weight zero, or with a weight that f16 rounds to zero, may be anything.
#[test]
fn infinite_values() {
    let mut report = Report::new("matrix, infinite values");
    for profile in matrices().filter(|p| due(&format!("matrix, infinite values, {}", p.name))) {
        let case = Case::random("matrix, infinite values", shape(20, 40, 16, 16)).with(|c| {
            c.rules.causal = true;
            c.v[39 * 16 + 3] = f32::INFINITY;
            c.v[38 * 16 + 5] = f32::NAN;
            // The last row sees this value with a weight below f16's range.
            c.scale = Some(1.0);
            c.v[30 * 16 + 7] = f32::INFINITY;
            for h in 0..2 {
                let q = &mut c.q[(h * 20 + 19) * 16..][..16];
                q.fill(0.0);
                q[0] = 1.0;
            }
            c.k[30 * 16] = -40.0;
        });
        let setup = Setup::matrix(profile, Layout::Dense);
        let want = case.stored(DType::F16, DType::F32).reference::<f64>().out;
        let got = run(&case.stored(DType::F16, DType::F32), &setup).expect("a run").out;
        for (n, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got.is_nan(), want.is_nan(), "{} {n}: {got} {want}", profile.name);
            assert_eq!(got.is_infinite(), want.is_infinite(), "{} {n}: {got} {want}", profile.name);
        }
        assert!(want.iter().any(|x| x.is_nan()) && want.iter().any(|x| x.is_infinite()), "nothing is tested");
        report.check_in(&case.with(|c| c.v = vec![1.0; c.v.len()]), &setup, &mut Default::default());
    }
    finish(report);
}

#[test]
fn splits_and_dropout() {
    let mut report = Report::new("matrix, splits and dropout");
    for profile in matrices().filter(|p| due(&format!("matrix, splits and dropout, {}", p.name))) {
        let setup = Setup::matrix(profile, Layout::Dense);
        let case = Case::random("matrix split", shape(20, 600, 16, 16));
        let stored = case.stored(DType::F16, DType::F32);
        let truth = stored.truth_of_halves(DType::F16, Weights::None);
        for n in [2, 3] {
            let judged = run_with(&stored, &setup, |kernel_options| kernel_options.splits(n))
                .and_then(|got| judge_outputs(&case.expected, case.shape, &truth, &got, false));
            report.record(&format!("{n} splits"), &setup, judged);
        }
        // Dropout removes nine weights of ten. The factor of the others would lift some of them
        // above f16's range.
        let dropped = Case::random("matrix dropout", shape(20, 50, 16, 16))
            .with(|c| c.dropout = Some(DropoutData::Seeded { p: 0.9, seed: 7 }));
        if runs(profile, "dropout") {
            check(&mut report, &dropped, &setup);
        }
    }
    finish(report);
}

/// Drivers that choose the subgroup size may choose a smaller one than the plan's.
#[test]
fn subgroups_of_other_sizes() {
    let mut report = Report::new("matrix, subgroups of other sizes");
    for profile in matrices() {
        for times in [2, 4, 8] {
            let width = times * profile.widest_subgroup();
            let name = format!("width {times} times");
            let always = times == 4 && runs(profile, &name);
            if !always && !rest(&format!("{name}, {}", profile.name)) {
                continue;
            }
            let case = Case::random(format!("matrix width {width}"), shape(70, 40, 16, 16))
                .with(|c| c.rules.causal = true);
            check(&mut report, &case, &Setup::matrix(believing(profile, width), Layout::Dense));
        }
    }
    finish(report);
}

/// Keys and values from caches of every kind of storage. Results equal those of the other kernels,
/// except for the rounding of weights.
#[test]
fn caches() {
    crate::harness::in_turn!();
    if matrices().next().is_none() {
        return finish(Report::new("matrix, caches"));
    }
    let mut rng = Rng::new(5);
    let (len, q_len, dim) = (50, 20, 16);
    let halves = |rng: &mut Rng, n: usize| -> Vec<u16> {
        rng.normals(n).into_iter().map(|x| half::f16::from_f32(x).to_bits()).collect()
    };
    let wide = |x: &[u16]| x.iter().map(|x| half::f16::from_bits(*x).to_f64()).collect::<Vec<_>>();
    let [q, k, v] = [2 * q_len, len, len].map(|rows| halves(&mut rng, rows * dim));
    let storages = [
        (CacheStorage::F16, CacheLayout::Contiguous),
        (CacheStorage::Q8(ScaleGroup::Row), CacheLayout::Paged { page: 16, pages: 4 }),
        (CacheStorage::F32, CacheLayout::Ring { sink_tokens: 2 }),
    ];
    for (profile, (storage, layout)) in matrices().flat_map(|p| storages.map(|s| (p, s))) {
        // Pages and groups of 8 bits run in both sizes of fragments.
        let paged = matches!(layout, CacheLayout::Paged { .. });
        if !paged && !runs(profile, &format!("{storage:?}")) {
            continue;
        }
        let gpu = &profile.gpu;
        let config = CacheConfig::new(1, dim, 64).storage(storage).layout(layout);
        let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
        let [q, new_k, new_v] = [&q, &k, &v].map(|x| gpu.upload(x).expect("upload"));
        let out = gpu.buffer(2 * q_len * dim * 2).expect("out");
        let view = |buffer, heads, rows| TensorView::new(buffer, DType::F16, [1, heads, rows, dim]);
        let mut run = |units, appends: bool| {
            let config = Config::new(2, dim).kv_heads(1).dtype(DType::F16);
            let config = config.kernel_options(
                KernelOptions::new().target(Target::Software).matrix_units(units).f16_operands(true),
            );
            let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("a config");
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            if appends {
                cache.advance(&mut encoder, Tokens::All(len)).expect("room");
                let tokens = Append::new(view(&new_k, 1, len), view(&new_v, 1, len));
                cache.append(&mut encoder, 0, &tokens).expect("an append");
                gpu.queue().submit([encoder.finish()]);
                encoder = gpu.device().create_command_encoder(&Default::default());
            }
            let call =
                Forward::with_cache(view(&q, 2, q_len), &cache, view(&out, 2, q_len)).mask(Mask::causal());
            let call = call.at_end();
            let mut scratch =
                Scratch::new(gpu.device(), attention.scratch_size(&call).expect("a size")).expect("scratch");
            attention.forward(&mut encoder, &call, &mut scratch).expect("a call");
            gpu.queue().submit([encoder.finish()]);
            wide(&gpu.download::<u16>(&out, 2 * q_len * dim).expect("out"))
        };
        let plain = run(MatrixUnits::Never, true);
        let got = run(MatrixUnits::Always, false);
        // Weights and both results are rounded by at most 2⁻¹². If keys are not f16, keys and
        // values are rounded, too. Then scores of at most 9 are off by 9 · 2⁻¹², and so are weights
        // and their sum.
        let largest = wide(&v).into_iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        let most = if storage == CacheStorage::F16 { 4.0 } else { 24.0 } * largest / 4096.0;
        let error = got.iter().zip(&plain).fold(0.0, |m: f64, (a, b)| m.max((a - b).abs()));
        assert!(error <= most && error > 0.0, "{} {storage:?}: {error:e}, at most {most:e}", profile.name);
    }
}

/// F32 tensors, by option.
#[test]
fn f32_tensors_rounded() {
    crate::harness::in_turn!();
    let mut report = Report::new("matrix, f32 tensors");
    for profile in matrices() {
        for (q_len, head_dim) in [(33, 16), (17, 30)] {
            let case = Case::random(format!("matrix f32 {q_len}"), shape(q_len, 41, head_dim, 16))
                .with(|c| c.rules.causal = true);
            let setup = Setup { dtype: DType::F32, ..Setup::matrix(profile, Layout::Blhd) };
            if runs(profile, &case.name) {
                check(&mut report, &case, &setup);
            }
        }
    }
    finish(report);
}

/// Without matrix units the result has the same bits, whatever the device has.
#[test]
fn unrequested_matrix_units_are_unused() {
    if matrices().next().is_none() {
        return finish(Report::new("matrix, unasked"));
    }
    let bits = |profile: &'static Profile, dtype, form, units: MatrixUnits, rounded: bool| {
        let case = Case::random("matrix unasked", shape(40, 50, 16, 16)).stored(dtype, DType::F32);
        let plain = Setup { profile: full(), form, dtype, ..Setup::matrix(full(), Layout::Dense) };
        let setup = Setup { profile, ..plain };
        let got = run_with(&case, &setup, |t| t.matrix_units(units).f16_operands(rounded)).expect("a run");
        (run(&case, &plain).expect("a run").bits(), got.bits())
    };
    for profile in matrices().filter(|profile| runs(profile, "unasked")) {
        // F32 stays exact unless the option permits rounding, and BF16 always does. The plan treats
        // the device as a GPU.
        for (dtype, rounded) in [(DType::F32, false), (DType::BF16, false), (DType::BF16, true)] {
            let (plain, got) = bits(profile, dtype, Target::Gpu, MatrixUnits::Auto, rounded);
            assert_eq!(plain, got);
        }
        let (plain, got) = bits(profile, DType::F16, Target::Gpu, MatrixUnits::Never, false);
        assert_eq!(plain, got);
        // Software drivers do not use matrix units.
        let (plain, got) = bits(profile, DType::F16, Target::Software, MatrixUnits::Auto, true);
        assert_eq!(plain, got);
        // These calls use them.
        let (plain, got) = bits(profile, DType::F32, Target::Software, MatrixUnits::Always, true);
        assert_ne!(plain, got);
        let (plain, got) = bits(profile, DType::F16, Target::Gpu, MatrixUnits::Auto, false);
        assert_ne!(plain, got);
    }
}

#[test]
fn refusals() {
    let refused = |profile: &'static Profile, words: &[&str], case: &Case, setup: Setup, rounded: bool| {
        let change = |t: KernelOptions| t.matrix_units(MatrixUnits::Always).f16_operands(rounded);
        let error = run_with(case, &Setup { profile, ..setup }, change).expect_err("refused");
        for word in words.iter().chain(&["matrix units"]) {
            assert!(error.contains(word), "`{error}` does not say `{word}`");
        }
    };
    let case = Case::random("matrix refused", shape(4, 4, 16, 16));
    let f32_setup = Setup { dtype: DType::F32, ..Setup::matrix(full(), Layout::Dense) };
    refused(full(), &["Pipelines::with_adapter"], &case, f32_setup, true);
    for profile in matrices() {
        refused(profile, &["F32", "f16_operands"], &case, f32_setup, false);
        let bf16_setup = Setup { dtype: DType::BF16, ..f32_setup };
        for rounded in [false, true] {
            refused(profile, &["BF16", "not rounded"], &case, bf16_setup, rounded);
        }
        let staged = Setup { path: Algorithm::Staged, ..f32_setup };
        refused(profile, &["the staged path"], &case, staged, true);
        let weights = Setup { path: Algorithm::Auto, weights: Weights::PerHead(DType::F32), ..f32_setup };
        refused(profile, &["the staged path"], &case, weights, true);
        let wide = Case::random("matrix too wide", shape(4, 4, 257, 16));
        refused(profile, &["at most 256"], &wide, f32_setup, true);
    }
}
