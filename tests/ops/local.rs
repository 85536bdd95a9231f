//! Attention to windows around positions, and prediction of the positions: vectors, limits,
//! gradients, bad input.

use wgpu_attention::layers::{AttentionalForward, AttentionalVector};
use wgpu_attention::local::{
    LocalAttention, LocalBackward, LocalConfig, LocalForward, PositionPredictor, PredictorBackward,
    PredictorForward,
};
use wgpu_attention::mask::{DeviceMask, HostMask};
use wgpu_attention::reference::{
    self, HostLinear, LocalOptions, Options, predict_positions, predict_positions_backward, widen,
};
use wgpu_attention::{Attention, Config, DType, Forward, KernelOptions, Linear, Scratch, Shape, TensorView};

use crate::harness::gradients::{Compared, Input, compare_differences};
use crate::harness::local::{Case, Predictor, Setup, predicted_async};
use crate::harness::run::Layout;
use crate::harness::{FORMS, Report, Rng, Vector, defaults, due, full, rest};
use crate::ops::additive::vectors::{OnDevice, expect, floats};

pub const FAMILY: &str = "recurrent_scores";
pub const NAMES: &[&str] = &["luong_local_p"];

/// Positions from hidden states, attention around them, and the attentional vector.
#[test]
fn every_target_matches_vector() {
    let gpu = &full().gpu;
    let vector = Vector::load(FAMILY, NAMES[0]);
    let on = OnDevice { vector: &vector };
    let [_, batch, q_len, dim] = vector.shape4("q");
    let kv_len = vector.shape4("k")[2];
    let units = vector.shape("v_p")[0];
    let half_window = vector.size("local_half_window");
    let [q, k, w_p, v_p, w_c] = ["q", "k", "w_p", "v_p", "w_c"].map(|t| on.upload(t));
    let buffer = |n: usize| gpu.buffer(4 * batch * q_len * n).expect("a buffer");
    let [p, out, weights, h_tilde] = [buffer(1), buffer(dim), buffer(kv_len), buffer(dim)];
    let row = |buffer, n| floats(buffer, [batch, 1, q_len, n]);
    let keys = floats(&k, [batch, 1, kv_len, dim]);
    for form in FORMS {
        let kernel_options = KernelOptions::new().target(form);
        let predictor = PositionPredictor::with_pipelines(gpu.pipelines()).kernel_options(kernel_options);
        let linear = Linear { weight: TensorView::matrix(&w_p, DType::F32, [units, dim]), bias: None };
        let v_p = TensorView::vector(&v_p, DType::F32, units);
        let predict = PredictorForward::new(row(&q, dim), linear, v_p, kv_len, row(&p, 1));
        // Only D = 2 gives the vector's σ of 1 and its scale.
        let config = LocalConfig::new(1, dim, half_window);
        assert_eq!((vector.number("sigma"), vector.number("scale")), (Some(1.0), Some(1.0)));
        let attention = LocalAttention::with_pipelines(gpu.pipelines(), config).expect("it is made");
        let call = LocalForward::new([row(&q, dim), keys, keys], row(&p, 1), row(&out, dim))
            .weights(row(&weights, kv_len));
        let join = AttentionalVector::with_pipelines(gpu.pipelines()).kernel_options(kernel_options);
        let w_c = Linear { weight: TensorView::matrix(&w_c, DType::F32, [dim, 2 * dim]), bias: None };
        let joined = AttentionalForward::new(row(&out, dim), row(&q, dim), w_c, row(&h_tilde, dim));
        let size = predictor.scratch_size(&predict).expect("it fits");
        let size = size.max(attention.scratch_size(&call).expect("it fits"));
        let size = size.max(join.scratch_size(&joined).expect("it fits"));
        let mut scratch = Scratch::new(gpu.device(), size).expect("memory");
        gpu.submit(|e| {
            predictor.forward(e, &predict, &mut scratch)?;
            attention.forward(e, &call, &mut scratch)?;
            join.forward(e, &joined, &mut scratch)
        })
        .expect("it runs");
        for (tensor, buffer, n) in
            [("p", &p, 1), ("out", &out, dim), ("weights", &weights, kv_len), ("h_tilde", &h_tilde, dim)]
        {
            assert!(vector.expected(tensor).is_some(), "{tensor}");
            let got = gpu.download::<f32>(buffer, batch * q_len * n).expect("a read-back");
            expect(&vector, tensor, &got);
        }
    }
}

#[test]
fn reference_matches_vector() {
    let vector = Vector::load(FAMILY, NAMES[0]);
    let [q, k, w_p, v_p] = ["q", "k", "w_p", "v_p"].map(|t| widen::<f64>(&vector.f32(t)));
    let [_, batch, q_len, dim] = vector.shape4("q");
    let kv_len = vector.shape4("k")[2];
    let sources = vec![kv_len as u32; batch * q_len];
    let p = predict_positions(&q, HostLinear { weight: &w_p, bias: None }, &v_p, &sources).expect("it fits");
    let shape = Shape { q_len, ..Shape::new(batch, 1, kv_len, dim) };
    let options = LocalOptions { half_window: 2, sigma: Some(1.0), scale: 1.0, lengths: None };
    let got = reference::local_attention(&q, &k, &k, &p, shape, &options).expect("it fits");
    let near =
        |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12);
    assert!(near(&p, &vector.f64("p")) && near(&got.out, &vector.f64("out")));
    assert!(near(&got.weights, &vector.f64("weights")));
}

fn cases() -> Vec<(&'static str, Case)> {
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 7, kv_len: 21, head_dim: 12, value_dim: 9 };
    let long = Shape { batch: 1, q_len: 5, kv_len: 200, head_dim: 33, value_dim: 70, ..shape };
    let one = Shape { batch: 3, heads: 1, kv_heads: 1, q_len: 1, kv_len: 1, head_dim: 1, value_dim: 1 };
    let fours = Shape { heads: 2, kv_heads: 1, q_len: 40, kv_len: 33, head_dim: 16, value_dim: 8, ..shape };
    vec![
        ("positions of heads", Case::random("positions of heads", shape, 3, true)),
        ("positions for all heads", Case::random("positions for all heads", fours, 2, false)),
        // More keys than the invocations of a workgroup.
        ("wide windows", Case::random("wide windows", long, 90, true).with(|c| c.sigma = Some(20.0))),
        ("lengths", Case::random("lengths", shape, 4, false).with(|c| c.lengths = Some(vec![21, 5]))),
        ("nothing there", Case::random("nothing", shape, 2, true).with(|c| c.lengths = Some(vec![0, 99]))),
        ("no Gaussian", Case::random("no Gaussian", fours, 5, true).with(|c| c.sigma = None)),
        ("all keys", Case::random("all keys", shape, 1 << 29, true).with(|c| c.sigma = Some(4.0))),
        ("one key", Case::random("one key", shape, 0, true).with(|c| c.sigma = Some(0.7))),
        ("one of everything", Case::random("one of everything", one, 1, false)),
    ]
}

#[test]
fn every_shape_matches_the_reference() {
    let mut report = Report::new("local attention");
    let [f16, bf16] = [DType::F16, DType::BF16];
    for (n, (name, case)) in cases().iter().enumerate() {
        for profile in [full(), defaults()] {
            let plain = Setup::plain(profile, Layout::Dense);
            let setups = [
                plain,
                Setup { layout: Layout::Blhd, weights: true, accumulates: true, ..plain },
                Setup { layout: Layout::Window(2 * n as u64 + 1), weights: true, ..plain },
                Setup { dtype: f16, gradient: f16, layout: Layout::Blhd, ..plain },
                Setup { dtype: bf16, gradient: bf16, accumulates: true, ..plain },
                Setup { dtype: f16, layout: Layout::Window(3), accumulates: true, ..plain },
                Setup { dtype: bf16, weights: true, layout: Layout::Window(9), ..plain },
            ];
            let setups_len = setups.len();
            for (s, setup) in setups.into_iter().enumerate() {
                let full = profile.name == "full";
                let usual =
                    full && (s == n % setups_len || s == 1 || s == 2) || !full && s == (n + 3) % setups_len;
                let key = format!("local {name}, {setup}");
                if !(usual && due(&key) || rest(&key)) {
                    continue;
                }
                report.record(name, &setup, case.outcome(&setup));
            }
        }
    }
    report.finish();
}

#[test]
fn random_problems_match_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("local attention, random problems");
    for n in 0..60 {
        let rng = &mut Rng::new(n + 4000);
        let [kv_heads, group] = [rng.between(1, 3), rng.between(1, 3)];
        let shape = Shape {
            batch: rng.between(1, 3),
            heads: kv_heads * group,
            kv_heads,
            q_len: rng.between(1, 30),
            kv_len: rng.between(1, 150),
            head_dim: rng.between(1, 40),
            value_dim: rng.between(1, 40),
        };
        let half_window = rng.between(0, 40);
        let mut case = Case::random(&format!("random {n}"), shape, half_window, rng.chance(0.5));
        case.sigma = rng.chance(0.8).then(|| 0.3 + 10.0 * rng.unit());
        let lengths = |_| rng.below(shape.kv_len + 3) as u32;
        case.lengths = (n % 3 == 0).then(|| (0..shape.batch).map(lengths).collect());
        let layout = [Layout::Dense, Layout::Blhd, Layout::Window(n)][n as usize % 3];
        let setup = Setup { weights: n % 2 == 0, accumulates: n % 5 < 2, ..Setup::plain(full(), layout) };
        report.record(&format!("random {n}"), &setup, case.outcome(&setup));
    }
    report.finish();
}

/// Half way between two keys, the position belongs to the second one. A position of NaN, or far
/// from all keys, sees nothing.
#[test]
fn positions_at_the_edges() {
    let below_half = f32::from_bits(0.5f32.to_bits() - 1);
    let below_minus_half = f32::from_bits((-0.5f32).to_bits() + 1);
    let places: [(f32, Option<usize>); 18] = [
        (0.0, Some(0)),
        (-0.0, Some(0)),
        (below_half, Some(0)),
        (0.5, Some(1)),
        (1.5, Some(2)),
        (2.499_999_8, Some(2)),
        (2.5, Some(3)),
        (-0.5, Some(0)),
        (-1e-9, Some(0)),
        (below_minus_half, None),
        (4.499, Some(4)),
        (4.5, None),
        (1e9, None),
        (1e30, None),
        (-1e30, None),
        (f32::INFINITY, None),
        (f32::NEG_INFINITY, None),
        (f32::NAN, None),
    ];
    let shape = Shape { q_len: places.len(), ..Shape::new(1, 1, 5, 4) };
    for sigma in [None, Some(0.5)] {
        let case = Case::random("edges", shape, 0, false).with(|c| {
            c.sigma = sigma;
            c.positions = places.iter().map(|(place, _)| *place).collect();
        });
        let got = case.run(&Setup { weights: true, ..Setup::plain(full(), Layout::Dense) }).expect("a run");
        let weights = got.weights.expect("weights");
        let want = case.forward::<f64>(widen);
        for (i, (place, key)) in places.into_iter().enumerate() {
            for j in 0..5 {
                let weight = weights[i * 5 + j];
                assert_eq!(weight > 0.0, key == Some(j), "{place} sees {j} with {weight}");
                assert!((weight - want.weights[i * 5 + j]).abs() < 1e-6);
            }
            for c in 0..4 {
                let value = key.map_or(0.0, |j| f64::from(case.v[j * 4 + c]));
                let out = got.out[i * 4 + c];
                assert!(sigma.is_some() && key.is_some() || out == value, "{place}: {out}, not {value}");
            }
            assert!(key.is_some() || got.gradients[3][i] == 0.0, "{place}");
        }
        assert!(got.gradients.iter().flatten().all(|x| x.is_finite()));
    }
}

/// Scores of which all except one vanish, and a single key.
#[test]
fn large_scores_are_exact() {
    let shape = Shape { q_len: 3, ..Shape::new(1, 1, 9, 2) };
    let mut case = Case::random("large", shape, 2, false).with(|c| {
        c.scale = 1.0;
        c.sigma = None;
        c.q = vec![1e4, 0.0, -1e4, 0.0, 0.0, 0.0];
        c.positions = vec![4.0, 4.2, 0.0];
    });
    case.k = (0..9).flat_map(|j| [j as f32, 0.0]).collect();
    let got = case.run(&Setup::plain(full(), Layout::Dense)).expect("a run");
    assert_eq!(got.out[..2], widen::<f64>(&case.v[12..14]));
    assert_eq!(got.out[2..4], widen::<f64>(&case.v[4..6]));
    for c in 0..2 {
        let mean = (0..3).map(|j| f64::from(case.v[2 * j + c])).sum::<f64>() / 3.0;
        assert!((got.out[4 + c] - mean).abs() < 1e-6);
    }
}

/// Local-m equals a window of attention's masks, without a Gaussian and around 0, 1, 2, …. A wide
/// Gaussian has no effect.
#[test]
fn local_m_equals_window() {
    let gpu = &full().gpu;
    let shape = Shape { q_len: 9, kv_len: 14, ..Shape::new(2, 2, 9, 8) };
    let case = Case::random("local-m", shape, 3, false).with(|c| {
        c.sigma = None;
        c.positions = (0..18).map(|n| (n % 9) as f32).collect();
    });
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| widen::<f64>(x));
    let options = Options::new().mask(HostMask::local_m(3)).weights(true);
    let want = reference::attention(&q, &k, &v, shape, &options).expect("it fits");
    let near = |a: &[f64], b: &[f64], by: f64| a.iter().zip(b).all(|(a, b)| (a - b).abs() < by);
    assert!(near(&case.forward::<f64>(widen).out, &want.out, 1e-7), "the scale is rounded to f32");
    let weights = want.weights.expect("weights");
    for (n, w) in weights.iter().enumerate() {
        let (i, j) = (n / 14 % 9, n % 14);
        assert_eq!(*w > 0.0, i.abs_diff(j) <= 3, "{i} {j}");
    }
    let buffers = [&case.q, &case.k, &case.v].map(|x| gpu.upload(x).expect("an upload"));
    let out = gpu.buffer(4 * case.d_out.len()).expect("a buffer");
    for form in FORMS {
        let config = Config::new(2, 8).kernel_options(KernelOptions::new().target(form));
        let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("attention");
        let [q, k, v] = [0, 1, 2].map(|n| floats(&buffers[n], [shape.q(), shape.k(), shape.v()][n]));
        let call = Forward::new(q, k, v, floats(&out, shape.out())).mask(DeviceMask::local_m(3));
        let size = attention.scratch_size(&call).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        gpu.submit(|e| attention.forward(e, &call, &mut scratch)).expect("it runs");
        let got: Vec<f32> = gpu.download(&out, case.d_out.len()).expect("out");
        assert!(near(&widen(&got), &want.out, 1e-5), "{form:?}");
    }
    for sigma in [None, Some(1e8)] {
        let case = case.clone().with(|c| c.sigma = sigma);
        let got = case.run(&Setup::plain(full(), Layout::Dense)).expect("a run");
        assert!(near(&got.out, &want.out, 1e-5), "{sigma:?}");
    }
}

/// The same call gives the same bits, also with a scratch that held other data.
#[test]
fn the_same_call_gives_the_same_bits() {
    let (_, case) = cases().swap_remove(0);
    let setup = Setup { weights: true, ..Setup::plain(full(), Layout::Dense) };
    let bits = || {
        let got = case.run(&setup).expect("a run");
        let all = got.out.into_iter().chain(got.weights.into_iter().flatten());
        let all = all.chain(got.gradients.into_iter().flatten());
        all.map(f64::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(bits(), bits());
}

#[test]
fn reference_gradients_match_finite_differences() {
    let mut compared = Compared::new();
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 3, kv_len: 6, head_dim: 2, value_dim: 3 };
    for (n, per_head) in [false, true, true].into_iter().enumerate() {
        let case = Case::random(&format!("differences {n}"), shape, 2, per_head).with(|c| {
            // Between the points where a window changes.
            c.positions.iter_mut().for_each(|p| *p = p.floor() + 0.25);
            c.sigma = (n < 2).then_some(1.2);
            c.lengths = (n == 1).then(|| vec![6, 3]);
        });
        let all = [&case.q, &case.k, &case.v, &case.positions].map(|x| widen::<f64>(x));
        let d_out = widen::<f64>(&case.d_out);
        let gradients = case.backward::<f64>(false, widen);
        let names = ["q", "k", "v", "positions"];
        let inputs: Vec<_> = (0..4).map(|n| Input::new(names[n], &all[n], &gradients[n])).collect();
        let loss = |x: &[Vec<f64>]| {
            let got = reference::local_attention(&x[0], &x[1], &x[2], &x[3], shape, &case.options());
            got.expect("it fits").out.iter().zip(&d_out).map(|(x, y)| x * y).sum::<f64>()
        };
        compare_differences("local", &inputs, usize::MAX, &mut compared, loss).expect("differences");
    }
    assert!(["q", "k", "v", "positions"].iter().all(|name| compared[name] > 5), "{compared:?}");
    let case = Case::random("short", shape, 1, true);
    let [q, k, v, p] = [&case.q, &case.k, &case.v, &case.positions].map(|x| widen::<f64>(x));
    assert!(reference::local_attention(&q, &k, &v, &p[1..], shape, &case.options()).is_err());
    assert!(reference::local_attention(&q, &k[1..], &v, &p, shape, &case.options()).is_err());
}

#[test]
fn predicted_position_gradients_match_differences() {
    let mut compared = Compared::new();
    let of = Predictor::random(4, 3, 5, DType::F32, vec![7, 7, 30, 30]);
    let all = of.inputs().map(|x| widen::<f64>(x));
    let d = widen::<f64>(&of.d_positions);
    let linear = HostLinear { weight: &all[1], bias: Some(&all[2]) };
    let got = predict_positions_backward(&all[0], linear, &all[3], &of.sources, &d).expect("it fits");
    let gradients = [got.d_hidden, got.d_weight, got.d_bias, got.d_vector];
    let names = ["hidden", "weight", "bias", "vector"];
    let inputs: Vec<_> = (0..4).map(|n| Input::new(names[n], &all[n], &gradients[n])).collect();
    let loss = |x: &[Vec<f64>]| {
        let linear = HostLinear { weight: &x[1], bias: Some(&x[2]) };
        let got = predict_positions(&x[0], linear, &x[3], &of.sources).expect("it fits");
        got.iter().zip(&d).map(|(x, y)| x * y).sum::<f64>()
    };
    compare_differences("predictor", &inputs, usize::MAX, &mut compared, loss).expect("differences");
    assert!(names.iter().all(|name| compared[name] > 2), "{compared:?}");
    let short = HostLinear { weight: &all[1][1..], bias: None };
    assert!(predict_positions(&all[0], short, &all[3], &of.sources).is_err());
}

#[test]
fn predicted_positions_match_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("predicted positions");
    let profile = full();
    for (n, [batch, len, features, units]) in
        [[1, 1, 1, 1], [2, 5, 12, 20], [3, 7, 33, 70], [1, 40, 64, 600]].into_iter().enumerate()
    {
        for (m, form) in FORMS.into_iter().enumerate() {
            let dtype = [DType::F32, DType::F16, DType::BF16, DType::F32][n];
            let layout = [Layout::Dense, Layout::Window(2 * n as u64 + 1)][(n + m) % 2];
            let lengths = (n % 2 == 1).then(|| (0..batch as u32).map(|b| 9 + 40 * b).collect::<Vec<_>>());
            let sizes = [batch, len, features, units];
            let outcome = predicted_async(sizes, lengths, dtype, layout, form, m == 0, profile);
            let outcome = pollster::block_on(outcome);
            let setup = format!("{form:?} {dtype:?}");
            report.record(&format!("{batch}x{len}x{features}x{units}"), &setup, outcome);
        }
    }
    report.finish();
}

/// Sigmoids of large arguments are 0 and 1, with slope zero.
#[test]
fn predicted_positions_do_not_overflow() {
    let gpu = &full().gpu;
    let upload = |x: &[f32]| gpu.upload(x).expect("an upload");
    let (hidden, weight, vector) = (upload(&[1e30, -1e30]), upload(&[1.0]), upload(&[1e30]));
    let [positions, d_positions] = [upload(&[0.0; 2]), upload(&[1.0; 2])];
    let d_hidden = gpu.buffer(8).expect("a buffer");
    let column = |buffer| floats(buffer, [1, 1, 2, 1]);
    let linear = Linear { weight: TensorView::matrix(&weight, DType::F32, [1, 1]), bias: None };
    let vector = TensorView::vector(&vector, DType::F32, 1);
    let operator = PositionPredictor::with_pipelines(gpu.pipelines());
    let forward = PredictorForward::new(column(&hidden), linear, vector, 40, column(&positions));
    let backward = PredictorBackward::new(forward, column(&d_positions)).d_hidden(column(&d_hidden));
    let size = operator.backward_scratch_size(&backward).expect("a size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    gpu.submit(|e| {
        operator.forward(e, &forward, &mut scratch)?;
        operator.backward(e, &backward, &mut scratch)
    })
    .expect("it runs");
    assert_eq!(gpu.download::<f32>(&positions, 2).expect("a read-back"), [40.0, 0.0]);
    assert_eq!(gpu.download::<f32>(&d_hidden, 2).expect("a read-back"), [0.0, 0.0]);
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..12).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let (wide, keys, row) = ([2, 2, 4, 8], [2, 1, 6, 8], [2, 2, 4, 1]);
    let [q, k, v, p, out] = [view(0, wide), view(1, keys), view(2, keys), view(3, row), view(4, wide)];
    let pipelines = gpu.pipelines();
    let config = LocalConfig::new(2, 8, 2).kv_heads(1);
    let made = |config: LocalConfig| LocalAttention::with_pipelines(pipelines, config);
    let unmade = |config: LocalConfig, words: &[&str]| {
        let error = made(config).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    unmade(LocalConfig::new(2, 8, 0), &["sigma", "above 0"]);
    unmade(config.sigma(-1.0), &["sigma"]);
    unmade(config.sigma(f64::NAN), &["sigma"]);
    unmade(config.sigma(1e-30), &["sigma"]);
    unmade(config.sigma(1e30), &["sigma"]);
    unmade(config.scale(f64::INFINITY), &["scale", "finite"]);
    unmade(LocalConfig::new(2, 8, (1 << 29) + 1), &["half_window", "2^29"]);
    unmade(LocalConfig::new(3, 8, 2).kv_heads(2), &["heads"]);
    unmade(LocalConfig::new(0, 8, 2), &["heads"]);
    unmade(config.dtype(DType::U32), &["U32"]);
    assert!(made(LocalConfig::new(2, 8, 0).sigma(None)).is_ok());

    let operator = made(config).expect("an operator");
    let good = LocalForward::new([q, k, v], p, out);
    let size = operator.scratch_size(&good).expect("a size");
    let mut none = Scratch::new(gpu.device(), Default::default()).expect("nothing");
    let mut refused = |call: LocalForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &call, &mut none).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward(&mut pass, &call, &mut none).is_err());
        assert!(operator.prepare(&call, &mut none).is_err());
    };
    let of = |q, k, v, p, out| LocalForward::new([q, k, v], p, out);
    refused(of(typed(0, DType::BF16, wide), k, v, p, out), &["`q`", "F32", "BF16"]);
    refused(of(view(0, [2, 1, 4, 8]), k, v, p, out), &["`q`", "heads must be 2", "got 1"]);
    refused(of(q, view(1, [2, 2, 6, 8]), v, p, out), &["`k`", "heads must be 1", "got 2"]);
    refused(of(q, view(1, [2, 1, 6, 7]), v, p, out), &["`k`", "dim must be 8", "got 7"]);
    refused(of(q, k, view(2, [2, 1, 5, 8]), p, out), &["`v`", "length must be 6", "got 5"]);
    refused(of(q, k, v, view(3, [2, 3, 4, 1]), out), &["`positions`", "heads must be 2 or 1", "got 3"]);
    refused(of(q, k, v, view(3, [1, 2, 4, 1]), out), &["`positions`", "batch must be 2", "got 1"]);
    refused(of(q, k, v, view(3, [2, 2, 4, 2]), out), &["`positions`", "must be 1", "got 2"]);
    refused(of(q, k, v, typed(3, DType::F16, row), out), &["`positions`", "F32", "F16"]);
    refused(of(q, k, v, p, view(4, [2, 2, 3, 8])), &["`out`", "length must be 4", "got 3"]);
    refused(of(q, k, v, p, view(3, wide)), &["`out`", "`positions`"]);
    refused(good.lengths(view(5, [2, 1, 1, 1])), &["`lengths`", "U32", "F32"]);
    refused(good.lengths(typed(5, DType::U32, [3, 1, 1, 1])), &["`lengths`", "batch must be 2 or 1"]);
    refused(good.weights(view(5, [2, 2, 4, 5])), &["`weights`", "must be 6", "got 5"]);
    refused(good.weights(typed(5, DType::F16, [2, 2, 4, 6])), &["`weights`", "F32", "F16"]);
    refused(good.weights(view(4, [2, 2, 4, 6])), &["overlap"]);
    refused(good, &["scratch", "scores"]);

    let new = LocalBackward::new(good, view(6, wide));
    let mut refused = |call: LocalBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.backward(&mut encoder, &call, &mut none).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward(&mut pass, &call, &mut none).is_err());
        assert!(operator.prepare_backward(&call, &mut none).is_err());
    };
    refused(new, &["no gradient is requested"]);
    refused(new.d_q(view(7, keys)), &["`d_q`", "heads must be 2"]);
    refused(new.d_k(typed(7, DType::BF16, keys)), &["`d_k`", "F32", "BF16"]);
    refused(new.d_v(view(2, keys)), &["`d_v`", "`v`"]);
    refused(new.d_positions(view(7, [2, 1, 4, 1])), &["`d_positions`", "heads must be 2", "got 1"]);
    refused(new.d_positions(typed(7, DType::F16, row)), &["`d_positions`", "F32", "F16"]);
    refused(new.d_q(view(7, wide)).d_k(view(7, keys)), &["overlap"]);
    refused(new.d_v(view(7, keys).with_strides([0, 0, 0, 1])), &["`d_v`", "share memory"]);
    refused(LocalBackward::new(good, view(6, keys)).d_q(view(7, wide)), &["`d_out`", "heads"]);
    refused(new.d_q(view(7, wide)), &["scratch", "scores"]);
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    gpu.submit(|e| operator.forward(e, &good, &mut scratch)).expect("it runs");
}

#[test]
fn bad_predictions_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..12).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let (row, of_weight, of_vector) = ([2, 1, 4, 1], [1, 1, 5, 3], [1, 1, 1, 5]);
    let [hidden, weight, vector, p] =
        [view(0, [2, 1, 4, 3]), view(1, of_weight), view(2, of_vector), view(3, row)];
    let operator = PositionPredictor::with_pipelines(gpu.pipelines());
    let mut none = Scratch::new(gpu.device(), Default::default()).expect("nothing");
    let linear = Linear { weight, bias: None };
    let good = PredictorForward::new(hidden, linear, vector, 9, p);
    let mut refused = |call: PredictorForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &call, &mut none).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward(&mut pass, &call, &mut none).is_err());
        assert!(operator.prepare(&call, &mut none).is_err());
    };
    let of = PredictorForward::new;
    refused(of(view(0, [2, 2, 4, 3]), linear, vector, 9, p), &["`hidden`", "heads must be 1"]);
    refused(of(typed(0, DType::U32, [2, 1, 4, 3]), linear, vector, 9, p), &["`hidden`", "F32, F16 or BF16"]);
    let short = Linear { weight: view(1, [1, 1, 5, 4]), bias: None };
    refused(of(hidden, short, vector, 9, p), &["`linear.weight`", "must be 3", "got 4"]);
    let biased = Linear { weight, bias: Some(view(4, [1, 1, 1, 4])) };
    refused(of(hidden, biased, vector, 9, p), &["`linear.bias`", "must be 5", "got 4"]);
    refused(of(hidden, linear, view(2, [1, 1, 1, 6]), 9, p), &["`vector`", "must be 5", "got 6"]);
    refused(of(hidden, linear, vector, 9, view(3, [2, 1, 4, 2])), &["`positions`", "must be 1"]);
    refused(of(hidden, linear, vector, 9, typed(3, DType::F16, row)), &["`positions`", "F32"]);
    refused(of(hidden, linear, vector, 9, view(0, row)), &["`positions`", "`hidden`"]);
    refused(of(hidden, linear, vector, 1 << 40, p), &["kv_len", "2^32"]);
    refused(good.lengths(view(5, [2, 1, 1, 1])), &["`lengths`", "U32"]);
    refused(good, &["scratch", "projected"]);
    let new = PredictorBackward::new(good, view(6, row));
    let mut refused = |call: PredictorBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.backward(&mut encoder, &call, &mut none).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward(&mut pass, &call, &mut none).is_err());
        assert!(operator.prepare_backward(&call, &mut none).is_err());
    };
    refused(new, &["no gradient is requested"]);
    refused(new.d_hidden(view(7, row)), &["`d_hidden`", "must be 3"]);
    refused(new.d_weight(view(1, of_weight)), &["`d_weight`", "`linear.weight`"]);
    refused(new.d_bias(view(7, of_weight)), &["`d_bias`"]);
    refused(new.d_vector(view(7, [1, 1, 5, 1])), &["`d_vector`"]);
    refused(new.d_bias(view(7, of_vector)).d_vector(view(7, of_vector)), &["overlap"]);
    refused(new.d_vector(view(7, of_vector)), &["scratch"]);
}
