//! Additive attention on every target and path, in every type and layout, compared with the
//! reference. `backward` has gradients, `vectors` other libraries' results.

mod backward;
mod normalised;
pub mod vectors;

use wgpu_attention::additive::{AdditiveAttention, AdditiveConfig, AdditiveForward};
use wgpu_attention::attention::ScoreStage;
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::tuning::{Algorithm, MatrixUnits, Target};
use wgpu_attention::{DType, Error, KernelOptions, Scratch, Shape, TensorView};

use crate::harness::report::judge_outputs;
use crate::harness::run::run_with;
use crate::harness::{
    Case, DropoutData, FORMS, HostData, Layout, Report, Rng, Setup, Weights, due, full, rest,
};
use crate::laws::property::{Draw, Draws, judged, seed};
use crate::small::single_masks;
pub use vectors::{D2L, FAMILY, NAMES};

/// Returns random data with a vector for each head, or one for all.
pub fn case(name: impl Into<String>, shape: Shape, each: bool) -> Case {
    let mut case = Case::random(name, shape);
    let heads = if each { shape.heads } else { 1 };
    case.score_vector = Some(Rng::named(&format!("{} vector", case.name)).normals(heads * shape.head_dim));
    case
}

/// Queries, keys, hidden units and channels of values, about the sizes of tiles.
const SIZES: [[usize; 4]; 9] = [
    [1, 1, 1, 1],
    [1, 300, 20, 33],
    [3, 50, 64, 12],
    [8, 24, 16, 16],
    [33, 31, 7, 70],
    [16, 129, 33, 64],
    [70, 40, 12, 3],
    [5, 9, 100, 140],
    [6, 33, 4, 520],
];

#[test]
fn shapes() {
    let mut report = Report::new("additive, shapes");
    for (n, [q_len, kv_len, head_dim, value_dim]) in SIZES.into_iter().enumerate() {
        let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len, head_dim, value_dim };
        let case = case(format!("{q_len}x{kv_len}x{head_dim}x{value_dim}"), shape, n % 2 == 0);
        for (m, form) in FORMS.into_iter().enumerate() {
            let key = format!("additive {} {form:?}", case.name);
            for (path, always) in [(Algorithm::Fused, n % 2 == m), (Algorithm::Staged, (n + 2) % 4 == m)] {
                if !(always && due(&key) || rest(&key)) {
                    continue;
                }
                let dtype = [DType::F32, DType::F16, DType::BF16][(n + m) % 3];
                let weights =
                    if path == Algorithm::Staged { Weights::PerHead(DType::F32) } else { Weights::None };
                let layout = [Layout::Dense, Layout::Window(2 * n as u64 + 1), Layout::Blhd][(n + 2 * m) % 3];
                let setup = Setup { dtype, layout, weights, ..Setup::plain(full(), form, path) };
                report.check_in(&case, &setup, &mut Default::default());
            }
        }
    }
    report.finish();
}

const SHAPE: Shape =
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 37, kv_len: 70, head_dim: 8, value_dim: 12 };

/// Every second part of a mask always runs on one target. Shares run the others on both. Dropout
/// runs on both.
#[test]
fn masks() {
    let mut report = Report::new("additive, masks");
    for (n, (name, rules)) in single_masks().into_iter().enumerate() {
        let case = case(name, SHAPE, true).with(|c| c.rules = rules.clone());
        for (m, form) in FORMS.into_iter().enumerate() {
            let key = format!("additive {name} {form:?}");
            if n % 4 == 2 * m && due(&key) || rest(&key) {
                report.check_in(&case, &fused(form), &mut Default::default());
            }
        }
    }
    for form in FORMS {
        let seeded =
            case("dropout", SHAPE, false).with(|c| c.dropout = Some(DropoutData::Seeded { p: 0.3, seed: 7 }));
        report.check_in(&seeded, &fused(form), &mut Default::default());
    }
    report.finish();
}

fn fused(form: Target) -> Setup {
    Setup::plain(full(), form, Algorithm::Fused)
}

/// Keys split among workgroups, by the plan and by option.
#[test]
fn splits() {
    let mut report = Report::new("additive, splits");
    let shape = Shape { q_len: 3, kv_len: 700, ..SHAPE };
    let case = case("splits", shape, true).with(|c| {
        c.rules.lengths =
            Some(HostData::of([2, 1, 3, 1], |[b, _, i, _]| [0, 700, 65, 131, 640, 1][b * 3 + i]));
    });
    for form in FORMS {
        let truth = case.truth(DType::F32, Weights::None);
        for splits in [1, 2, 7, 128] {
            let judged = run_with(&case, &fused(form), |kernel_options| kernel_options.splits(splits))
                .and_then(|got| judge_outputs(&case.expected, case.shape, &truth, &got, false));
            report.record(&format!("{splits} splits"), &fused(form), judged);
        }
        report.check_in(&case, &fused(form), &mut Default::default());
    }
    report.finish();
}

#[test]
fn random_problems() {
    let seed = seed() ^ 0xadd;
    let mut report = Report::new("additive, property");
    let draws = Draws { name: "additive, property", always: 40, most: 300, group: 10 };
    for n in draws.numbers() {
        let first = Draw::random(seed.wrapping_add(n as u64 / 10)).with_additive_scores();
        let draw = (0..n % 10).fold(first, |draw, _| draw.again());
        let outcome = judged(&report, draw, Draw::simpler, Draw::outcome);
        report.record(&format!("draw {n}"), &draw.setup(&draw.case()), outcome);
    }
    report.finish();
}

/// Returns the results of a call with one head and one query: out, lse and scores at a stage.
fn one_query(form: Target, [q, k, v, vector]: [&[f32]; 4], staged: bool) -> Result<[Vec<f32>; 3], Error> {
    let gpu = &full().gpu;
    let hidden = q.len();
    let (keys, value_dim) = (k.len() / hidden, v.len() / (k.len() / hidden));
    let [q, k, v, vector] = [q, k, v, vector].map(|x| gpu.upload(x).expect("an upload"));
    let [out, lse, scores] = [value_dim, 1, keys].map(|n| gpu.buffer(4 * n).expect("a buffer"));
    let view = |buffer, length, dim| TensorView::new(buffer, DType::F32, [1, 1, length, dim]);
    let config =
        AdditiveConfig::new(1, hidden).value_dim(value_dim).kernel_options(KernelOptions::new().target(form));
    let attention = AdditiveAttention::with_pipelines(gpu.pipelines(), config)?;
    let vector = TensorView::vector(&vector, DType::F32, hidden);
    let out_view = view(&out, 1, value_dim);
    let mut call = AdditiveForward::new(
        view(&q, 1, hidden),
        view(&k, keys, hidden),
        view(&v, keys, value_dim),
        vector,
        out_view,
    )
    .lse(view(&lse, 1, 1));
    if staged {
        call = call.scores(view(&scores, 1, keys), ScoreStage::Scaled);
    }
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|e| attention.forward(e, &call, &mut scratch))?;
    let read = |buffer, n| gpu.download::<f32>(buffer, n);
    Ok([read(&out, value_dim)?, read(&lse, 1)?, read(&scores, keys)?])
}

/// One hidden unit and two keys, computed by hand: scores are ±2 tanh 1.
#[test]
fn one_hidden_unit_by_hand() {
    let score = 2.0 * 1f64.tanh();
    let weight = 1.0 / (1.0 + (-2.0 * score).exp());
    for form in FORMS {
        for staged in [false, true] {
            let got = one_query(form, [&[0.5], &[-1.5, 0.5], &[0.0, 1.0], &[2.0]], staged).expect("it runs");
            let near = |got: f32, want: f64| assert!((f64::from(got) - want).abs() < 1e-6, "{got} {want}");
            near(got[0][0], weight);
            near(got[1][0], (score.exp() + (-score).exp()).ln());
            if staged {
                near(got[2][0], -score);
                near(got[2][1], score);
            }
        }
    }
}

/// The accuracy that `shaders/additive/tanh.wgsl` states: units in the last place, signs, limits.
/// The test uses scores of a query against many keys and, without a score matrix, the lse of single
/// keys.
#[test]
fn tanh() {
    let mut x: Vec<f32> = vec![0.0, -0.0, 1e-30, -1e-30, 1e-8, 3e-5, 0.5, 1.0, 8.9, 9.02, 9.03, 20.0, 88.0];
    x.extend([89.0, 700.0, 3e38, -3e38, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
    let rng = &mut Rng::new(3);
    x.extend((0..20_000).map(|_| (rng.unit() * 24.0 - 12.0) as f32));
    x.extend((0..5_000).map(|_| (-rng.unit() * 40.0).exp() as f32));
    let v = vec![1.0; x.len()];
    let off = |x: f32, got: f32| {
        let want = f64::from(x).tanh();
        let ulp = f64::from(f32::EPSILON) / 2.0 * want.abs().max(1e-30).log2().ceil().exp2();
        if x.is_nan() {
            f64::from(u8::from(!got.is_nan())) * 100.0
        } else {
            (f64::from(got) - want).abs() / ulp
        }
    };
    for form in FORMS {
        let [.., scores] = one_query(form, [&[0.0], &x, &v, &[1.0]], true).expect("it runs");
        // The limit is twice the error on this machine, because other devices divide less exactly.
        for (x, got) in x.iter().zip(&scores) {
            assert!(off(*x, *got) <= 14.0, "tanh {x:e} is {got:e}, off by {} ulp", off(*x, *got));
            assert!(got.is_nan() || got.abs() <= 1.0, "tanh {x:e} is {got:e}");
            assert!(x.is_nan() || x.abs() < 9.02 || got.abs() == 1.0, "tanh {x:e} is {got:e}");
            assert!(x.is_nan() || x.abs() > 1e-7 || *x == *got, "tanh {x:e} is {got:e}");
        }
        for x in &x[..22] {
            let [out, lse, _] = one_query(form, [&[*x], &[0.0], &[3.0], &[1.0]], false).expect("it runs");
            assert!(off(*x, lse[0]) <= 18.0 || x.abs() < 1e-7 && lse[0].abs() < 1e-7, "{x:e}: {}", lse[0]);
            assert!(if x.is_nan() { out[0].is_nan() } else { out[0] == 3.0 }, "{x:e}: {}", out[0]);
        }
    }
}

/// There is no score matrix and no tensor of pairs' hidden units, so no temporary memory at any
/// length.
#[test]
fn fused_calls_need_no_scratch() {
    let gpu = &full().gpu;
    let buffer = gpu.buffer(4096 * 64 * 4).expect("a buffer");
    let out = gpu.buffer(4096 * 64 * 4).expect("a buffer");
    let vector = gpu.buffer(256).expect("a buffer");
    let view = |buffer| TensorView::new(buffer, DType::F32, [1, 1, 4096, 64]);
    for form in FORMS {
        let config = AdditiveConfig::new(1, 64).kernel_options(KernelOptions::new().target(form));
        let attention = AdditiveAttention::with_pipelines(gpu.pipelines(), config).expect("it is made");
        let input = view(&buffer);
        let call = AdditiveForward::new(
            input,
            input,
            input,
            TensorView::vector(&vector, DType::F32, 64),
            view(&out),
        );
        assert_eq!(attention.scratch_size(&call.mask(DeviceMask::causal())).expect("it fits").total(), 0);
    }
}

/// Hidden keys may hold anything, on both targets. A visible NaN shows.
#[test]
fn hidden_numbers_have_no_effect() {
    let mut report = Report::new("additive next to NaN");
    for poison in [f32::NAN, f32::INFINITY] {
        let case = case(format!("hidden {poison}"), SHAPE, true).with(|c| {
            c.rules.lengths = Some(HostData::new(vec![40, 33], [2, 1, 1, 1]));
            for row in (0..4).flat_map(|h| (41..70).map(move |j| h * 70 + j)) {
                c.k[row * 8..][..8].fill(poison);
                c.v[row * 12..][..12].fill(poison);
            }
        });
        for form in FORMS {
            report.check_in(&case, &fused(form), &mut Default::default());
        }
    }
    // A visible key with NaN.
    let case = case("seen NaN", SHAPE, true).with(|c| c.k[5] = f32::NAN);
    for form in FORMS {
        let got = crate::harness::run(&case, &fused(form)).expect("it runs");
        let rows = got.out.chunks_exact(12).enumerate();
        // In the first batch entry, the heads that use the first key head.
        let shows = rows.clone().all(|(row, out)| (row / 37 < 2) == out.iter().all(|x| x.is_nan()));
        report.record("seen NaN", &fused(form), if shows { Ok(0.0) } else { Err("it does not show".into()) });
    }
    report.finish();
}

/// The same inputs give the same bits.
#[test]
fn bits_are_the_same() {
    let case = case("bits", Shape { q_len: 9, kv_len: 300, ..SHAPE }, true);
    for form in FORMS {
        let runs = [(); 3].map(|()| crate::harness::run(&case, &fused(form)).expect("it runs").bits());
        assert!(runs[0] == runs[1] && runs[1] == runs[2], "{form:?}");
    }
}

/// With equal queries and a huge vector, only the largest score has a weight.
#[test]
fn reference_matches_definition() {
    let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 3, kv_len: 4, head_dim: 5, value_dim: 2 };
    let case = case("definition", shape, true);
    let vector = case.score_vector.clone().expect("it has one");
    let [q, k, v, vector] = [&case.q, &case.k, &case.v, &vector].map(|x| widen::<f64>(x));
    let got = reference::additive_attention(&q, &k, &v, &vector, shape, &Options::new()).expect("it fits");
    for h in 0..2 {
        for i in 0..3 {
            let score = |j: usize| -> f64 {
                let of = |d: usize| vector[h * 5 + d] * (q[(h * 3 + i) * 5 + d] + k[j * 5 + d]).tanh();
                (0..5).map(of).sum()
            };
            let total: f64 = (0..4).map(|j| score(j).exp()).sum();
            for c in 0..2 {
                let want = (0..4).map(|j| score(j).exp() * v[j * 2 + c]).sum::<f64>() / total;
                assert!((got.out[(h * 3 + i) * 2 + c] - want).abs() < 1e-14);
            }
        }
    }
    // A vector of zeros gives the mean.
    let got = reference::additive_attention(&q, &k, &v, &[0.0; 5], shape, &Options::new()).expect("it fits");
    assert!((got.out[0] - (v[0] + v[2] + v[4] + v[6]) / 4.0).abs() < 1e-15);
    assert!(reference::additive_attention(&q, &k, &v, &[0.0; 4], shape, &Options::new()).is_err());
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..7).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let config = AdditiveConfig::new(4, 8).kv_heads(2).value_dim(6);
    let attention = AdditiveAttention::with_pipelines(gpu.pipelines(), config).expect("it is made");
    let (q, k, v) = (view(0, [2, 4, 3, 8]), view(1, [2, 2, 5, 8]), view(2, [2, 2, 5, 6]));
    let (vector, out) = (view(3, [1, 4, 1, 8]), view(4, [2, 4, 3, 6]));
    let refused = |call: &AdditiveForward, words: &[&str]| {
        let error = attention.scratch_size(call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("nothing");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        assert!(attention.forward(&mut encoder, call, &mut scratch).is_err());
        assert!(attention.prepare(call, &mut scratch).is_err());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(attention.forward(&mut pass, call, &mut scratch).is_err());
    };
    let of =
        |q, k, v, vector, out, words: &[&str]| refused(&AdditiveForward::new(q, k, v, vector, out), words);
    of(view(0, [2, 3, 3, 8]), k, v, vector, out, &["`q`", "heads must be 4", "got 3"]);
    of(view(0, [2, 4, 3, 7]), k, v, vector, out, &["`q`", "dim must be 8", "got 7"]);
    of(q, view(1, [2, 4, 5, 8]), v, vector, out, &["`k`", "heads must be 2", "got 4"]);
    of(q, view(1, [2, 2, 5, 9]), v, vector, out, &["`k`", "dim must be 8", "got 9"]);
    of(q, k, view(2, [2, 2, 4, 6]), vector, out, &["`v`", "length must be 5", "got 4"]);
    of(q, k, v, view(3, [1, 4, 1, 9]), out, &["`score_vector`", "dim must be 8", "got 9"]);
    of(q, k, v, view(3, [1, 4, 1, 1]), out, &["`score_vector`", "dim must be 8", "got 1"]);
    of(q, k, v, view(3, [1, 2, 1, 8]), out, &["`score_vector`", "heads must be 4 or 1", "got 2"]);
    of(q, k, v, view(3, [2, 4, 1, 8]), out, &["`score_vector`", "batch must be 1", "got 2"]);
    of(q, k, v, view(3, [1, 4, 8, 8]), out, &["`score_vector`", "length must be 1", "got 8"]);
    of(q, k, v, typed(3, DType::U32, [1, 4, 1, 8]), out, &["`score_vector`", "F32, F16 or BF16"]);
    of(q, k, v, vector.with_offset(5000), out, &["`score_vector`", "byte"]);
    of(q, k, v, vector, view(4, [2, 4, 3, 5]), &["`out`", "dim must be 6", "got 5"]);
    of(q, k, v, vector, view(3, [2, 4, 3, 6]), &["`out`", "`score_vector`"]);
    of(q, k, v, vector, view(0, [2, 4, 3, 6]), &["`out`", "`q`"]);
    of(typed(0, DType::BF16, [2, 4, 3, 8]), k, v, vector, out, &["`q`", "F32", "BF16"]);
    let good = AdditiveForward::new(q, k, v, vector, out);
    refused(&good.lse(view(5, [2, 4, 3, 2])), &["`lse`"]);
    refused(&good.weights(view(5, [2, 4, 3, 4])), &["`weights`", "kv_len must be 5"]);
    refused(&good.mask(DeviceMask::none().attn_mask(view(6, [2, 4, 3, 5]))), &["`attn_mask`"]);
    let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("nothing");
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let weights = good.weights(typed(5, DType::BF16, [2, 4, 3, 5]));
    let error = attention.forward(&mut encoder, &weights, &mut scratch).expect_err("no scratch");
    assert!(error.to_string().contains("scores"), "{error}");
    assert!(attention.forward(&mut encoder, &good, &mut scratch).is_ok());

    let made = |config: AdditiveConfig| AdditiveAttention::with_pipelines(gpu.pipelines(), config);
    assert!(made(AdditiveConfig::new(3, 8).kv_heads(2)).is_err());
    assert!(made(AdditiveConfig::new(1, 0)).is_err());
    assert!(made(AdditiveConfig::new(1, 8).dtype(DType::U32)).is_err());
    let always = made(config.kernel_options(KernelOptions::new().matrix_units(MatrixUnits::Always)))
        .expect("it is made");
    let error = always.scratch_size(&good).expect_err("no matrix units").to_string();
    assert!(error.contains("matrix units"), "{error}");
    let fused =
        made(config.kernel_options(KernelOptions::new().algorithm(Algorithm::Fused))).expect("it is made");
    assert!(fused.scratch_size(&weights).is_err());
}
