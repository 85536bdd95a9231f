//! Attention over keys and values that are projected along the length: vectors, gradients, limits,
//! bad input.

use wgpu_attention::linformer::{Linformer, LinformerBackward, LinformerForward};
use wgpu_attention::reference::compare::Tolerance;
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::tuning::{MatrixUnits, Target};
use wgpu_attention::{Attention, Config, DType, Forward, KernelOptions, Scratch, Shape, TensorView};

use crate::harness::gradients::{Compared, Input, compare_differences};
use crate::harness::linformer::{Case, Setup};
use crate::harness::run::Layout;
use crate::harness::{FORMS, Judged, Profile, Report, Vector, defaults, due, full, matrices, rest};

pub const FAMILY: &str = "linear";
pub const NAMES: &[&str] = &["linformer_per_head", "linformer_shared"];

fn case(name: &str) -> (Case, Vector) {
    let vector = Vector::load(FAMILY, name);
    let [batch, heads, q_len, head_dim] = vector.shape4("q");
    let shape = Shape { kv_len: vector.shape4("k")[2], ..Shape::new(batch, heads, q_len, head_dim) };
    let case = Case::random(name, shape, vector.size("rank"), vector.attrs["per_head"] == true);
    let [q, k, v, e, f] = ["q", "k", "v", "e", "f"].map(|name| vector.f32(name));
    (Case { q, k, v, e, f, ..case }, vector)
}

#[test]
fn reference_matches_vectors() {
    for name in NAMES {
        let (case, vector) = case(name);
        let got = case.forward::<f64>(widen);
        let near =
            |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-7);
        assert!(near(&got.out, &vector.f64("out")), "{name}");
        assert!(near(&got.weights.expect("weights"), &vector.f64("weights")), "{name}");
    }
}

#[test]
fn every_target_matches_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("linformer vectors");
    for name in NAMES {
        let (case, vector) = case(name);
        for profile in [full(), defaults()] {
            for form in FORMS {
                for layout in [Layout::Dense, Layout::Window(5)] {
                    let setup = Setup { weights: true, ..Setup::plain(profile, form, layout) };
                    let usual = profile.name == "full" && layout == Layout::Dense;
                    if !usual && !rest(&format!("{name}, {setup}")) {
                        continue;
                    }
                    let check = || {
                        let got = case.run(&setup, MatrixUnits::Auto)?;
                        for (name, got) in [("out", Some(got.out)), ("weights", got.weights)] {
                            let (want, tolerance) = vector.expected(name).ok_or("not in the vector")?;
                            let got = got.ok_or("not written")?;
                            Judged { want, tolerance }.judge(&got).map_err(|e| format!("{name}: {e}"))?;
                        }
                        case.outcome(&setup)
                    };
                    report.record(name, &setup, check());
                }
            }
        }
    }
    report.finish();
}

#[test]
fn every_shape_matches_the_reference() {
    let mut report = Report::new("linformer");
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 7, kv_len: 67, head_dim: 12, value_dim: 21 };
    let wide = Shape { batch: 3, kv_heads: 4, kv_len: 130, head_dim: 16, value_dim: 8, ..shape };
    let one = Shape { batch: 3, heads: 1, kv_heads: 1, q_len: 1, kv_len: 1, head_dim: 1, value_dim: 1 };
    let cases = [
        ("shared", Case::random("shared", shape, 9, false)),
        ("per head", Case::random("per head", wide, 16, true)),
        ("one projection for both", Case::random("both", wide, 65, false).sharing()),
        ("masked", Case::random("masked", shape, 5, true).masked(true)),
        ("masked, one projection", Case::random("masked both", wide, 12, false).sharing().masked(false)),
        ("one of everything", Case::random("one", one, 1, false)),
    ];
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    for (n, (name, case)) in cases.iter().enumerate() {
        for (m, form) in FORMS.into_iter().enumerate() {
            for profile in [full(), defaults()] {
                let plain = Setup::plain(profile, form, Layout::Dense);
                let setups = [
                    plain,
                    Setup { layout: Layout::Blhd, weights: true, ..plain },
                    Setup { layout: Layout::Window(2 * n as u64 + 1), accumulates: true, ..plain },
                    Setup { dtype: f16, projection: f16, gradient: f16, layout: Layout::Blhd, ..plain },
                    Setup { dtype: bf16, gradient: bf16, ..plain },
                    Setup { dtype: f16, projection: f32, layout: Layout::Window(3), ..plain },
                ];
                let setups_len = setups.len();
                for (s, setup) in setups.into_iter().enumerate() {
                    let usual = s == (n + 2 * m) % setups_len && (profile.name == "full") == (s % 2 == 1);
                    let key = format!("linformer {name}, {setup}");
                    let always = *name == "masked";
                    if !(usual && (always || due(&key)) || rest(&key)) {
                        continue;
                    }
                    report.record(name, &setup, case.outcome(&setup));
                }
            }
        }
    }
    report.finish();
}

/// With `Always`, the attention uses matrix units.
#[test]
fn matrix_units_attend_to_projected_keys() {
    let listed = |profile: &&Profile| profile.compiles_fast() && rest("linformer on matrix units");
    for profile in matrices().filter(listed) {
        let case = Case::random("matrix", Shape::new(1, 2, 40, 16), 32, false);
        let setup = Setup { dtype: DType::F16, ..Setup::plain(profile, Target::Software, Layout::Dense) };
        let case = case.stored(&setup);
        let got = case.run(&setup, MatrixUnits::Always).expect("a run");
        let Judged { want, tolerance } = case.truth(&setup).out;
        // Matrix units round weights to f16.
        let absolute = tolerance.absolute + 2f64.powi(-11) * 4.0;
        Judged { want, tolerance: Tolerance { absolute } }.judge(&got.out).expect("near");
    }
}

/// With the identity as its projections, it equals attention.
#[test]
fn identity_projection_equals_attention() {
    crate::harness::in_turn!();
    let profile = full();
    let shape = Shape { q_len: 20, ..Shape::new(2, 2, 33, 16) };
    let mut case = Case::random("identity", shape, 33, false);
    case.e = (0..33 * 33).map(|n| f32::from(u8::from(n / 33 == n % 33))).collect();
    case.f = case.e.clone();
    let options = Options::new();
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| widen::<f64>(x));
    let want = reference::attention(&q, &k, &v, shape, &options).expect("it fits");
    assert_eq!(case.forward::<f64>(widen).out, want.out);
    for form in FORMS {
        let setup = Setup::plain(profile, form, Layout::Dense);
        let got = case.run(&setup, MatrixUnits::Auto).expect("a run");
        // The products add zeros to each key, so the result has the bits of plain attention.
        let gpu = &profile.gpu;
        let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| gpu.upload(x).expect("an upload"));
        let out = gpu.buffer(4 * case.d_out.len()).expect("a buffer");
        let config = Config::new(2, 16).kernel_options(KernelOptions::new().target(form));
        let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("attention");
        let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
        let (of_q, of_k) = (shape.q(), shape.k());
        let call = Forward::new(view(&q, of_q), view(&k, of_k), view(&v, of_k), view(&out, of_q));
        let size = attention.scratch_size(&call).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        gpu.submit(|e| attention.forward(e, &call, &mut scratch)).expect("attention");
        let plain: Vec<f32> = gpu.download(&out, case.d_out.len()).expect("out");
        assert!(plain.iter().zip(&got.out).all(|(a, b)| f64::from(*a) == *b), "{form:?}");
    }
}

#[test]
fn reference_gradients_match_finite_differences() {
    let mut compared = Compared::new();
    let shape = Shape { batch: 2, heads: 2, kv_heads: 1, q_len: 3, kv_len: 5, head_dim: 2, value_dim: 3 };
    for (per_head, masked) in [(false, false), (true, true), (false, true)] {
        let mut case = Case::random("differences", shape, 3, per_head);
        if masked {
            case = case.masked(false);
        }
        let all = [&case.q, &case.k, &case.v, &case.e, &case.f].map(|x| widen::<f64>(x));
        let (d_out, d_lse) = (widen::<f64>(&case.d_out), widen::<f64>(&case.d_lse));
        let gradients = case.backward(false);
        let names = ["q", "k", "v", "e", "f"];
        let inputs: Vec<_> = (0..5).map(|n| Input::new(names[n], &all[n], &gradients[n])).collect();
        let loss = |x: &[Vec<f64>]| {
            let by = case.projections(&x[3], &x[4]);
            let got = reference::linformer(&x[0], &x[1], &x[2], &by, shape, &Options::new());
            let got = got.expect("it fits");
            let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
            dot(&got.out, &d_out) + dot(&got.lse, &d_lse)
        };
        compare_differences("linformer", &inputs, usize::MAX, &mut compared, loss).expect("differences");
    }
    assert!(["q", "k", "v", "e", "f"].iter().all(|name| compared[name] > 0), "{compared:?}");
    let case = Case::random("short", shape, 3, false);
    let [q, k, v, e] = [&case.q, &case.k, &case.v, &case.e].map(|x| widen::<f64>(x));
    let by = case.projections(&e[1..], &e);
    assert!(reference::linformer(&q, &k, &v, &by, shape, &Options::new()).is_err());
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..14).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let (wide, keys, low, row) = ([1, 2, 4, 8], [1, 2, 6, 8], [1, 1, 3, 6], [1, 2, 4, 1]);
    let [q, k, v, e, out] = [view(0, wide), view(1, keys), view(2, keys), view(3, low), view(4, wide)];
    let pipelines = gpu.pipelines();
    assert!(Linformer::with_pipelines(pipelines, Config::new(2, 8), 0).is_err());
    assert!(Linformer::with_pipelines(pipelines, Config::new(0, 8), 3).is_err());
    let operator = Linformer::with_pipelines(pipelines, Config::new(2, 8), 3).expect("an operator");
    let good = LinformerForward::new(q, k, v, e, out);
    let size = operator.scratch_size(&good).expect("a size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    let mut refused = |call: LinformerForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward(&mut pass, &call, &mut scratch).is_err());
        assert!(operator.prepare(&call, &mut scratch).is_err());
    };
    let of = |q, k, v, e, out| LinformerForward::new(q, k, v, e, out);
    refused(of(typed(0, DType::BF16, wide), k, v, e, out), &["`q`", "F32", "BF16"]);
    refused(of(q, view(1, [1, 2, 6, 7]), v, e, out), &["`k`", "dim must be 8", "got 7"]);
    refused(of(q, k, view(2, [1, 2, 5, 8]), e, out), &["`v`", "length must be 6", "got 5"]);
    refused(of(q, k, v, view(3, [1, 1, 2, 6]), out), &["`e`", "must be 3", "got 2"]);
    refused(of(q, k, v, view(3, [1, 1, 3, 5]), out), &["`e`", "must be 6", "got 5"]);
    refused(of(q, k, v, view(3, [1, 3, 3, 6]), out), &["`e`", "must be 2", "got 3"]);
    refused(of(q, k, v, typed(3, DType::U32, low), out), &["`e`", "F32, F16 or BF16", "U32"]);
    refused(of(q, k, v, e, view(3, wide)), &["`out`", "`e`"]);
    refused(good.f(view(5, [2, 1, 3, 6])), &["`f`", "batch must be 1", "got 2"]);
    refused(good.f(view(4, low)), &["`out`", "`f`"]);
    refused(good.key_mask(view(6, [1, 1, 1, 6])), &["`key_mask`", "Bool", "F32"]);
    refused(good.key_mask(typed(6, DType::Bool, [1, 1, 1, 5])), &["`key_mask`", "must be 6", "got 5"]);
    refused(good.key_mask(typed(6, DType::Bool, [1, 2, 1, 6])), &["`key_mask`", "heads"]);
    refused(good.lse(view(7, wide)), &["`lse`", "must be 1", "got 8"]);
    refused(good.weights(view(7, [1, 2, 4, 6])), &["`weights`", "must be 3", "got 6"]);
    refused(good.key_mask(typed(6, DType::Bool, [1, 1, 1, 6])), &["scratch", "kept"]);

    let [lse, d_out] = [view(7, row), view(8, wide)];
    let back = LinformerBackward::new(good.lse(lse), d_out);
    let mut refused = |call: LinformerBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.backward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward(&mut pass, &call, &mut scratch).is_err());
        assert!(operator.prepare_backward(&call, &mut scratch).is_err());
    };
    refused(back, &["no gradient is requested"]);
    refused(back.d_f(view(9, low)), &["`f`", "d_e"]);
    refused(back.d_q(view(9, keys)), &["`d_q`", "length must be 4", "got 6"]);
    refused(back.d_q(typed(9, DType::BF16, wide)), &["`d_q`", "F32", "BF16"]);
    refused(back.d_k(view(1, keys)), &["`d_k`", "`k`"]);
    refused(back.d_e(view(9, [1, 2, 3, 6])), &["`d_e`", "heads must be 1", "got 2"]);
    refused(back.d_e(view(9, low)).d_k(view(9, keys)), &["overlap"]);
    refused(back.d_lse(typed(10, DType::F16, row)).d_e(view(9, low)), &["`d_lse`", "F32", "F16"]);
    refused(LinformerBackward::new(good.lse(view(7, wide)), d_out).d_e(view(9, low)), &["`lse`"]);
    refused(LinformerBackward::new(good, d_out).d_e(view(9, low)), &["without `lse`", ".lse("]);
    refused(LinformerBackward::new(good.lse(lse), view(8, keys)).d_e(view(9, low)), &["`d_out`"]);
    refused(back.d_v(view(9, keys).with_strides([0, 0, 0, 1])), &["`d_v`", "share memory"]);
    refused(back.d_v(view(9, keys)), &["scratch"]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    assert!(operator.forward(&mut encoder, &good, &mut scratch).is_ok());
}
