//! Attention within buckets of a hash: vectors, gradients, limits, bad input.

use wgpu_attention::lsh::{LshAttention, LshBackward, LshConfig, LshForward};
use wgpu_attention::reference::compare::Tolerance;
use wgpu_attention::reference::{
    self, LshHashed, LshShape, Options, lsh_attention, lsh_attention_backward, lsh_buckets, lsh_pairs, widen,
};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, Mask, Scratch, Shape, TensorView};

use crate::harness::case::{largest, widened};
use crate::harness::gradients::{Compared, Input, compare_differences};
use crate::harness::lsh::{Case, Setup};
use crate::harness::run::Layout;
use crate::harness::{FORMS, Judged, Profile, Report, Rng, Vector, defaults, due, full, matrices, rest};

pub const FAMILY: &str = "linear";
pub const NAMES: &[&str] = &["reformer_chunked", "reformer_union", "reformer_union_causal"];

/// Returns the vector's case. Without chunks, one chunk has all tokens.
fn case(name: &str) -> (Case, Vector) {
    let vector = Vector::load(FAMILY, name);
    let [batch, heads, length, head_dim] = vector.shape4("qk");
    let shape = LshShape { batch, heads, length, head_dim, value_dim: head_dim };
    let chunk = if vector.attrs["kind"] == "chunked" { vector.size("chunk") } else { length };
    let case = Case::random(name, shape, [vector.size("rounds"), vector.size("n_buckets"), chunk]);
    let causal = vector.attrs["causal"] == true;
    let [qk, v, rotations] = ["qk", "v", "rotations"].map(|name| vector.f32(name));
    (Case { qk, v, rotations, causal, ..case }, vector)
}

/// Reorders from the vectors' order `[rounds, batch, heads, n]`.
fn by_head<T: Copy>(case: &Case, x: &[T]) -> Vec<T> {
    let LshShape { batch, heads, .. } = case.shape;
    let n = x.len() / case.rounds / batch / heads;
    let at = |m: usize| {
        let (i, round, head) = (m % n, m / n % case.rounds, m / n / case.rounds);
        x[(round * batch * heads + head) * n + i]
    };
    (0..x.len()).map(at).collect()
}

fn vector_buckets(case: &Case, vector: &Vector) -> Vec<u32> {
    by_head(case, &vector.integers("buckets")).into_iter().map(|x| x as u32).collect()
}

#[test]
fn reference_matches_vectors() {
    for name in NAMES {
        let (case, vector) = case(name);
        let [qk, v, rotations] = [&case.qk, &case.v, &case.rotations].map(|x| widen::<f64>(x));
        let buckets = lsh_buckets(&qk, &rotations, case.shape, case.rounds, case.n_buckets, None);
        let buckets = buckets.expect("it fits");
        assert_eq!(buckets, vector_buckets(&case, &vector), "{name}");
        let near = |a: &[f64], b: &[f64]| {
            a.len() == b.len()
                && a.iter().zip(b).all(|(a, b)| a == b || (a - b).abs() < 1e-7 * (1.0 + b.abs()))
        };
        // Without chunks, and with one chunk of all tokens.
        for chunk in [Some(case.chunk), None].into_iter().take(if vector.has("lse") { 2 } else { 1 }) {
            let hashed = LshHashed { chunk, ..case.hashed(&buckets, None) };
            let got = lsh_attention(&qk, &v, &hashed, case.shape).expect("it fits");
            assert!(near(&got.out, &vector.f64("out")), "{name}");
            let pairs = lsh_pairs(&hashed, case.shape).expect("it fits");
            if vector.has("lse") {
                assert!(near(&got.lse, &vector.f64("lse")), "{name}");
                let all = case.shape.length * case.shape.length;
                let any: Vec<bool> = pairs
                    .chunks_exact(case.rounds * all)
                    .flat_map(|head| (0..all).map(|n| (0..case.rounds).any(|r| head[r * all + n])))
                    .collect();
                assert_eq!(any, vector.bools("pairs").data, "{name}");
            } else {
                assert!(near(&got.lse_rounds, &by_head(&case, &vector.f64("lse_rounds"))), "{name}");
                let want = vector_pairs(&case, &vector);
                assert_eq!(pairs, want, "{name}");
            }
        }
    }
}

/// Reads `pairs_rounds`, which has five axes.
fn vector_pairs(case: &Case, vector: &Vector) -> Vec<bool> {
    let flat = vector.flat_bools("pairs_rounds");
    by_head(case, &flat)
}

#[test]
fn every_target_matches_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("lsh vectors");
    for name in NAMES {
        let (case, vector) = case(name);
        let buckets = vector_buckets(&case, &vector);
        for profile in [full(), defaults()] {
            for form in FORMS {
                let layout = if profile.name == "full" { Layout::Dense } else { Layout::Window(5) };
                let setup = Setup::plain(profile, form, layout);
                // Both devices have the same kernels.
                if profile.name != "full" && !rest(&format!("{name}, {setup}")) {
                    continue;
                }
                let check = || {
                    let got = case.run(&setup, None)?;
                    if got.buckets != buckets {
                        return Err(format!("buckets {:?}", got.buckets));
                    }
                    for (name, got) in [("out", &got.out), ("lse", &got.lse)] {
                        if let Some((want, tolerance)) = vector.expected(name) {
                            Judged { want, tolerance }.judge(got).map_err(|e| format!("{name}: {e}"))?;
                        }
                    }
                    // With these buckets as input, the same bits.
                    let given = case.run(&setup, Some(&buckets))?;
                    if given.out != got.out || given.gradients != got.gradients {
                        return Err("given buckets give something else".into());
                    }
                    case.judge(&got, &setup)
                };
                report.record(name, &setup, check());
            }
        }
    }
    report.finish();
}

#[test]
fn every_shape_matches_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("lsh");
    // The software target compiles a kernel per channel count: these are the vectors'.
    let shape = LshShape { batch: 2, heads: 2, length: 67, head_dim: 8, value_dim: 8 };
    let even = LshShape { length: 64, ..shape };
    let odd = LshShape { head_dim: 13, value_dim: 21, ..shape };
    let one = LshShape { batch: 1, heads: 1, length: 1, head_dim: 1, value_dim: 1 };
    let cases = [
        // Lengths that the chunk does not divide; one round and several.
        ("one round", Case::random("lsh 1", odd, [1, 4, 8])),
        ("two rounds", Case::random("lsh 2", shape, [2, 6, 16])),
        ("two rounds, causal", Case::random("lsh 3", even, [2, 4, 16]).causal()),
        ("three rounds", Case::random("lsh 4", even, [3, 18, 8]).causal()),
        // Two chunks, each of which looks back to the other; one chunk; more buckets than tokens.
        ("two chunks", Case::random("lsh 5", shape, [2, 2, 34])),
        ("one chunk", Case::random("lsh 6", shape, [2, 4, 100])),
        ("many buckets", Case::random("lsh 7", LshShape { length: 9, ..shape }, [2, 300, 4])),
        ("one token", Case::random("lsh 8", one, [2, 2, 1])),
        // Padding: one sequence is all padding, another one has less than a chunk of tokens.
        (
            "lengths",
            Case::random("lsh 9", LshShape { batch: 4, ..shape }, [2, 4, 16]).lengths(&[67, 0, 9, 41]),
        ),
        ("lengths, causal", Case::random("lsh 10", shape, [1, 2, 8]).causal().lengths(&[17, 66])),
    ];
    let [f16, bf16] = [DType::F16, DType::BF16];
    for (n, (name, case)) in cases.iter().enumerate() {
        for (m, form) in FORMS.into_iter().enumerate() {
            for profile in [full(), defaults()] {
                let plain = Setup::plain(profile, form, Layout::Window(2 * n as u64 + 1));
                let setups = [
                    Setup { accumulates: n % 2 == 0, ..plain },
                    Setup { dtype: f16, gradient: f16, layout: Layout::Blhd, ..plain },
                    Setup { dtype: bf16, rotations: bf16, layout: Layout::Dense, ..plain },
                ];
                for (s, setup) in setups.into_iter().enumerate() {
                    // Two rounds run on each target, in f16 and bf16 on one. The others run on one
                    // target.
                    let usual = match *name {
                        "two rounds" => s == 0 || s == 1 + m,
                        "two chunks" | "one chunk" | "lengths" => s == 0,
                        // On the GPU target, whose kernel does not depend on the channels.
                        "one round" | "many buckets" | "one token" => s == 0 && m == 0,
                        _ => s == 0 && m == n % 2,
                    };
                    let key = format!("lsh {name}, {setup}");
                    if !(usual && profile.name == "full" && due(&key) || rest(&key)) {
                        continue;
                    }
                    report.record(name, &setup, case.outcome(&setup));
                }
            }
        }
    }
    report.finish();
}

#[test]
fn random_problems_match_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("lsh, random");
    for n in 0..24 {
        if n >= 4 && !rest(&format!("lsh random {n}")) {
            continue;
        }
        let rng = &mut Rng::new(n ^ 0x15b);
        let shape = LshShape {
            batch: rng.between(1, 3),
            heads: rng.between(1, 3),
            length: rng.between(1, 90),
            head_dim: 8,
            value_dim: 8,
        };
        // Other sizes need other kernels. So do non-causal cases, of which there are enough.
        let sizes = [2, 2 * rng.between(1, 6), rng.between(1, 40)];
        let mut case = Case::random(&format!("lsh random {n}"), shape, sizes);
        case.causal = n < 4 || rng.chance(0.5);
        if rng.chance(0.4) {
            let length = |_| rng.between(0, shape.length + 3) as u32;
            case.lengths = Some((0..shape.batch).map(length).collect());
        }
        let setup = Setup {
            accumulates: n % 3 == 0,
            ..Setup::plain(full(), FORMS[n as usize % 2], Layout::Window(2 * n + 1))
        };
        report.record(&format!("{shape:?}, {sizes:?}, {:?}", case.lengths), &setup, case.outcome(&setup));
    }
    report.finish();
}

#[test]
fn matrix_units_attend_within_buckets() {
    let listed = |profile: &&Profile| profile.compiles_fast() && rest("lsh on matrix units");
    for profile in matrices().filter(listed) {
        let shape = LshShape { batch: 1, heads: 2, length: 80, head_dim: 16, value_dim: 16 };
        let case = Case::random("lsh matrix", shape, [2, 4, 32]);
        let setup = Setup { dtype: DType::F16, ..Setup::plain(profile, Target::Software, Layout::Dense) };
        let case = case.stored(&setup);
        let got = case.run(&setup, None).expect("a run");
        let [qk, v] = [&case.qk, &case.v].map(|x| widen::<f64>(x));
        let exact = lsh_attention(&qk, &v, &case.hashed(&got.buckets, None), shape).expect("it fits");
        let (naive, _) = case.naive(&got.buckets, DType::F16);
        let Judged { want, tolerance } =
            Judged::new(&widened(&naive.out, DType::F16), exact.out, largest(v.clone()));
        // Matrix units round weights to f16.
        let absolute = tolerance.absolute + 2f64.powi(-11) * largest(v);
        Judged { want, tolerance: Tolerance { absolute } }.judge(&got.out).expect("near");
    }
}

/// With one bucket and one chunk, it is attention to every other token. Two chunks that look back
/// to each other give the same.
#[test]
fn one_bucket_gives_attention() {
    crate::harness::in_turn!();
    let shape = LshShape { batch: 2, heads: 2, length: 40, head_dim: 8, value_dim: 8 };
    for (causal, chunk) in [(false, 40), (true, 40), (false, 20), (true, 64)] {
        let mut case = Case::random("lsh one bucket", shape, [2, 2, chunk]);
        // All buckets have equal scores, so the lowest one wins.
        case.rotations.fill(0.0);
        case.causal = causal;
        let [qk, v] = [&case.qk, &case.v].map(|x| widen::<f64>(x));
        let unit = |x: &[f64]| {
            let length = x.iter().map(|x| x * x).sum::<f64>().sqrt();
            x.iter().map(|x| x / length).collect::<Vec<f64>>()
        };
        let keys: Vec<f64> = qk.chunks_exact(8).flat_map(unit).collect();
        let mask = if causal { Mask::causal() } else { Mask::none() };
        let options = Options::new().mask(mask.exclude_self());
        let mut want =
            reference::attention(&qk, &keys, &v, Shape::new(2, 2, 40, 8), &options).expect("it fits").out;
        if causal {
            // The first token sees only itself.
            for head in 0..4 {
                let row = head * 40 * 8..head * 40 * 8 + 8;
                want[row.clone()].copy_from_slice(&v[row]);
            }
        }
        for form in FORMS {
            let setup = Setup::plain(full(), form, Layout::Dense);
            let got = case.run(&setup, None).expect("a run");
            assert!(got.buckets.iter().all(|bucket| *bucket == 0));
            let near = got.out.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5);
            assert!(near, "{form:?}, causal {causal}, chunk {chunk}");
            case.judge(&got, &setup).expect("as the reference");
        }
    }
}

/// A sequence in a batch of longer ones gives the same result as alone.
#[test]
fn padding_changes_nothing() {
    crate::harness::in_turn!();
    let shape = LshShape { batch: 2, heads: 1, length: 50, head_dim: 8, value_dim: 8 };
    let case = Case::random("lsh padding", shape, [2, 4, 8]).lengths(&[50, 21]);
    let setup = Setup::plain(full(), Target::Auto, Layout::Dense);
    let got = case.run(&setup, None).expect("a run");
    let cut = |x: &[f32]| x[50 * 8..50 * 8 + 21 * 8].to_vec();
    let alone = Case {
        shape: LshShape { batch: 1, length: 21, ..shape },
        qk: cut(&case.qk),
        v: cut(&case.v),
        d_out: cut(&case.d_out),
        d_lse: case.d_lse[50..71].to_vec(),
        lengths: None,
        ..case.clone()
    };
    let alone = alone.run(&setup, None).expect("a run");
    let near = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(near(&got.out[400..400 + 168], &alone.out), "out");
    assert!(near(&got.gradients[0][400..400 + 168], &alone.gradients[0]), "d_qk");
    assert!(near(&got.gradients[1][400..400 + 168], &alone.gradients[1]), "d_v");
    // Rows that are not tokens have results of zero.
    assert!(got.out[568..].iter().all(|x| *x == 0.0));
    assert!(got.gradients.iter().all(|x| x[568..].iter().all(|x| *x == 0.0)));
    assert!(got.lse[71..].iter().all(|x| *x == f64::NEG_INFINITY));
}

/// Scores whose exponentials need the maximum, tokens of length 0, and NaN where it belongs.
#[test]
fn extreme_numbers() {
    let shape = LshShape { batch: 1, heads: 1, length: 30, head_dim: 8, value_dim: 8 };
    let mut case = Case::random("lsh extreme", shape, [2, 4, 8]);
    case.qk.iter_mut().for_each(|x| *x *= 300.0);
    case.qk[..16].fill(0.0);
    for form in FORMS {
        let setup = Setup::plain(full(), form, Layout::Dense);
        case.outcome(&setup).unwrap_or_else(|e| panic!("{form:?}: {e}"));
    }
    case.v[17] = f32::NAN;
    let run =
        |case: &Case| case.run(&Setup::plain(full(), Target::Auto, Layout::Dense), None).expect("a run");
    let got = run(&case);
    assert!(got.out.iter().any(|x| x.is_nan()) && got.out.iter().any(|x| !x.is_nan()));
    // Token 5 sees itself.
    case.qk[5 * 8] = f32::NAN;
    let got = run(&case);
    assert!(got.lse[5].is_nan() && got.lse.iter().any(|x| !x.is_nan()));
}

#[test]
fn rotations_are_the_same_for_the_same_seed() {
    let config = LshConfig::new(2, 16, 3, 8, 4);
    let [a, b, c] = [7, 7, 8].map(|seed| config.rotations(seed));
    assert!(a.len() == 3 * 16 * 4 && a == b && a != c);
    let mean = a.iter().sum::<f32>() / a.len() as f32;
    let square = a.iter().map(|x| x * x).sum::<f32>() / a.len() as f32;
    assert!(mean.abs() < 0.2 && (square - 1.0).abs() < 0.3, "{mean} {square}");
}

#[test]
fn reference_gradients_match_finite_differences() {
    let mut compared = Compared::new();
    let shape = LshShape { batch: 1, heads: 2, length: 9, head_dim: 3, value_dim: 2 };
    for (causal, lengths) in [(false, None), (true, None), (false, Some([7]))] {
        let mut case = Case::random("lsh differences", shape, [2, 4, 3]);
        case.causal = causal;
        case.lengths = lengths.map(|lengths: [u32; 1]| lengths.to_vec());
        let [qk, v, rotations, d_out, d_lse] =
            [&case.qk, &case.v, &case.rotations, &case.d_out, &case.d_lse].map(|x| widen::<f64>(x));
        // Buckets are computed once, because they have no gradient.
        let buckets = lsh_buckets(&qk, &rotations, shape, 2, 4, case.lengths.as_deref()).expect("it fits");
        let hashed = case.hashed(&buckets, None);
        let got = lsh_attention_backward(&qk, &v, &d_out, Some(&d_lse), &hashed, shape).expect("it fits");
        let inputs = [Input::new("qk", &qk, &got.d_qk), Input::new("v", &v, &got.d_v)];
        let loss = |x: &[Vec<f64>]| {
            let got = lsh_attention(&x[0], &x[1], &case.hashed(&buckets, None), shape).expect("it fits");
            let dot = |x: &[f64], y: &[f64]| -> f64 {
                x.iter().zip(y).filter(|(x, _)| x.abs() < 1e4).map(|(x, y)| x * y).sum()
            };
            dot(&got.out, &d_out) + dot(&got.lse, &d_lse)
        };
        compare_differences("lsh", &inputs, usize::MAX, &mut compared, loss).expect("differences");
    }
    assert!(["qk", "v"].iter().all(|name| compared[name] > 0), "{compared:?}");
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..12).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let (wide, turn, hash) = ([1, 2, 10, 8], [1, 3, 8, 2], [1, 2, 3, 10]);
    let [qk, v, rotations, out] = [view(0, wide), view(1, wide), view(2, turn), view(3, wide)];
    let buckets = typed(4, DType::U32, hash);
    let config = LshConfig::new(2, 8, 3, 4, 4);
    let pipelines = gpu.pipelines();
    let not = |config: LshConfig, words: &[&str]| {
        let error = LshAttention::with_pipelines(pipelines, config).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    not(LshConfig::new(0, 8, 3, 4, 4), &["heads is 0"]);
    not(LshConfig::new(2, 8, 0, 4, 4), &["rounds is 0"]);
    not(LshConfig::new(2, 8, 65, 4, 4), &["rounds", "at most 64"]);
    not(LshConfig::new(2, 8, 3, 5, 4), &["`n_buckets` is 5", "multiple of 2"]);
    not(LshConfig::new(2, 8, 3, 65536, 4), &["n_buckets", "65534"]);
    not(LshConfig::new(2, 8, 3, 4, 0), &["chunk is 0"]);
    not(config.scale(f64::NAN), &["scale"]);
    not(config.dtype(DType::U32), &["F32, F16 or BF16"]);
    let operator = LshAttention::with_pipelines(pipelines, config).expect("an operator");
    let good = LshForward::new(qk, v, rotations, buckets, out);
    let size = operator.scratch_size(&good).expect("a size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    let mut refused = |call: LshForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward(&mut pass, &call, &mut scratch).is_err());
        assert!(operator.prepare(&call, &mut scratch).is_err());
    };
    let of = LshForward::new;
    refused(of(typed(0, DType::BF16, wide), v, rotations, buckets, out), &["`qk`", "F32", "BF16"]);
    refused(of(view(0, [1, 3, 10, 8]), v, rotations, buckets, out), &["`qk`", "heads must be 2", "got 3"]);
    refused(of(qk, view(1, [1, 2, 9, 8]), rotations, buckets, out), &["`v`", "length must be 10", "got 9"]);
    refused(of(qk, v, view(2, [1, 3, 8, 4]), buckets, out), &["`rotations`", "must be 2", "got 4"]);
    refused(of(qk, v, view(2, [1, 2, 8, 2]), buckets, out), &["`rotations`", "must be 3", "got 2"]);
    refused(of(qk, v, typed(2, DType::U32, turn), buckets, out), &["`rotations`", "F32, F16 or BF16"]);
    refused(of(qk, v, rotations, view(4, hash), out), &["`buckets`", "U32", "F32"]);
    refused(of(qk, v, rotations, typed(4, DType::U32, [1, 2, 2, 10]), out), &["`buckets`", "must be 3"]);
    refused(of(qk, v, rotations, buckets, view(0, wide)), &["`out`", "`qk`"]);
    refused(of(qk, v, rotations, typed(0, DType::U32, hash), out), &["`buckets`", "`qk`"]);
    refused(LshForward::with_buckets(qk, v, typed(3, DType::U32, hash), out), &["`out`", "`buckets`"]);
    refused(good.lse(view(5, wide)), &["`lse`", "must be 1", "got 8"]);
    refused(good.lse(view(3, [1, 2, 10, 1])), &["overlap"]);
    refused(good.lengths(view(5, [1, 1, 1, 1])), &["`lengths`", "U32", "F32"]);
    refused(good.lengths(typed(5, DType::U32, [2, 1, 1, 1])), &["`lengths`", "batch must be 1", "got 2"]);
    let long = [view(0, [1, 2, 64, 8]), view(1, [1, 2, 64, 8]), view(3, [1, 2, 64, 8])];
    refused(of(long[0], long[1], rotations, typed(4, DType::U32, [1, 2, 3, 64]), long[2]), &["scratch"]);

    let [lse, d_out] = [view(5, [1, 2, 10, 1]), view(6, wide)];
    let back = LshBackward::new(good.lse(lse), d_out);
    let mut refused = |call: LshBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.backward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward(&mut pass, &call, &mut scratch).is_err());
        assert!(operator.prepare_backward(&call, &mut scratch).is_err());
    };
    refused(back, &["no gradient is requested"]);
    refused(LshBackward::new(good, d_out).d_qk(view(7, wide)), &["without `lse`", ".lse("]);
    refused(back.d_qk(view(7, [1, 2, 9, 8])), &["`d_qk`", "length must be 10", "got 9"]);
    refused(back.d_qk(typed(7, DType::Bool, wide)), &["`d_qk`", "F32, F16 or BF16"]);
    refused(back.d_v(view(6, wide)), &["`d_v`", "`d_out`"]);
    refused(back.d_v(view(4, wide)), &["`d_v`", "`buckets`"]);
    refused(back.d_v(view(7, wide)).d_qk(view(7, wide)), &["overlap"]);
    refused(back.d_v(view(7, wide)).d_lse(view(8, wide)), &["`d_lse`", "must be 1"]);
    refused(back.d_v(view(7, wide).with_strides([0, 0, 0, 1])), &["`d_v`", "share memory"]);
    refused(back.d_v(view(7, wide)), &["scratch"]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    assert!(operator.forward(&mut encoder, &good, &mut scratch).is_ok());
}
