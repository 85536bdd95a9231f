//! Gradients of additive attention. Differences check the reference, and the reference checks the
//! device.

use wgpu_attention::additive::{AdditiveAttention, AdditiveBackward, AdditiveConfig, AdditiveForward};
use wgpu_attention::tuning::{MatrixUnits, Target};
use wgpu_attention::{DType, KernelOptions, Scratch, Shape, TensorView};

use super::{SHAPE, case};
use crate::harness::backward::BackwardSetup;
use crate::harness::gradients::{Compared, Problem};
use crate::harness::{DropoutData, FORMS, HostData, Layout, Report, due, full, rest};
use crate::laws::property::Draws;
use crate::ops::attention::backward::{Draw, bits, check_draws, run};
use crate::small::single_masks;

#[test]
fn reference_gradients_match_finite_differences() {
    let mut compared = Compared::new();
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 3, kv_len: 5, head_dim: 3, value_dim: 2 };
    for (name, rules) in single_masks() {
        let fits = rules.bias.is_none() && rules.tensors() == 0 && rules.score_mod.is_none();
        if fits && rules.mask_mod.is_none() {
            let of = case(format!("differences {name}"), shape, true).with(|c| c.rules = rules.clone());
            Problem::new(of, 0, true).check(100, &mut compared);
        }
    }
    for each in [false, true] {
        let plain = case(format!("differences {each}"), shape, each);
        Problem::new(plain.clone(), 0, false).check(100, &mut compared);
        let dropped = plain.clone().with(|c| c.dropout = Some(DropoutData::Seeded { p: 0.4, seed: 3 }));
        Problem::new(dropped, 0, true).check(100, &mut compared);
        let biased = plain.with(|c| {
            c.rules.bias =
                Some(HostData::of([1, 4, 3, 5], |[_, h, i, j]| (h + 2 * i) as f32 / 4.0 - j as f32 / 8.0));
            c.rules.lengths = Some(HostData::new(vec![3, 5], [2, 1, 1, 1]));
        });
        Problem::new(biased, 0, true).check(100, &mut compared);
    }
    assert!(compared["score_vector"] > 50 && compared["k"] > 100 && compared["q"] > 100, "{compared:?}");
}

/// Queries, keys, hidden units and channels of values, about the sizes of tiles.
const SIZES: [[usize; 4]; 8] = [
    [1, 1, 1, 1],
    [1, 70, 20, 33],
    [3, 50, 64, 12],
    [33, 31, 7, 70],
    [16, 129, 33, 64],
    [70, 40, 12, 3],
    [5, 9, 150, 130],
    [65, 17, 4, 9],
];

#[test]
fn shapes() {
    let mut report = Report::new("additive, gradients of shapes");
    for (n, [q_len, kv_len, head_dim, value_dim]) in SIZES.into_iter().enumerate() {
        let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len, head_dim, value_dim };
        let name = format!("gradients {q_len}x{kv_len}x{head_dim}x{value_dim}");
        let problem = Problem::new(case(&name, shape, n % 2 == 0), 0, true);
        for (m, form) in FORMS.into_iter().enumerate() {
            let key = format!("additive {name} {form:?}");
            if n % 2 == m && due(&key) || rest(&key) {
                report.check_backward(&problem, &BackwardSetup::plain(full(), form));
            }
        }
    }
    report.finish();
}

/// Every sixth part of a mask always runs, the others by share, on alternating targets.
#[test]
fn masks() {
    let mut report = Report::new("additive, gradients of masks");
    for (n, (name, rules)) in single_masks().into_iter().enumerate() {
        let case = case(format!("gradients {name}"), SHAPE, true).with(|c| c.rules = rules.clone());
        let problem = Problem::new(case, 0, true);
        let key = format!("additive gradients of {name}");
        if n % 6 == 1 && due(&key) || rest(&key) {
            report.check_backward(&problem, &BackwardSetup::plain(full(), FORMS[n % 2]));
        }
    }
    report.finish();
}

#[test]
fn random_problems() {
    crate::harness::in_turn!();
    let draws = Draws { name: "additive, gradients of random problems", always: 40, most: 400, group: 20 };
    check_draws(&draws, |rng| Draw::random(rng).with_additive_scores());
}

/// Hidden elements, and queries without a key, may hold anything.
#[test]
fn hidden_numbers_have_no_effect() {
    let mut report = Report::new("additive, gradients next to NaN");
    for poison in [f32::NAN, f32::INFINITY] {
        let case = case(format!("hidden {poison}"), SHAPE, true).with(|c| {
            c.rules.lengths =
                Some(HostData::of([2, 1, 37, 1], |[b, _, i, _]| if i < 3 { 0 } else { 40 - b as u32 }));
            for row in (0..4).flat_map(|h| (41..70).map(move |j| h * 70 + j)) {
                c.k[row * 8..][..8].fill(poison);
                c.v[row * 12..][..12].fill(poison);
            }
            for row in (0..8).flat_map(|h| (0..3).map(move |i| h * 37 + i)) {
                c.q[row * 8..][..8].fill(poison);
            }
        });
        let problem = Problem::new(case, 0, true);
        for form in FORMS {
            report.check_backward(&problem, &BackwardSetup::plain(full(), form));
        }
    }
    report.finish();
}

/// Saturated and huge scores: where tanh is 1 there is no gradient. An lse that f32 rounds does no
/// harm.
#[test]
fn large_numbers() {
    crate::harness::in_turn!();
    let mut report = Report::new("additive, gradients of large numbers");
    let shape = Shape { q_len: 5, kv_len: 9, ..SHAPE };
    let saturated = case("saturated", shape, true).with(|c| c.q.iter_mut().for_each(|q| *q *= 30.0));
    let huge = case("huge", shape, true).with(|c| {
        c.rules.bias = Some(HostData::of([1, 1, 1, 9], |[.., j]| 9000.0 + (j % 3) as f32 / 2.0));
    });
    for case in [saturated, huge] {
        let problem = Problem::new(case, 0, true);
        for form in FORMS {
            report.check_backward(&problem, &BackwardSetup::plain(full(), form));
        }
    }
    report.finish();
}

/// Every run gives the same bits. The gradients of rows do so with any split of the work.
#[test]
fn bits_are_the_same() {
    crate::harness::in_turn!();
    let shape = Shape { q_len: 90, kv_len: 70, ..SHAPE };
    let problem = Problem::new(case("the same bits", shape, true).with(|c| c.rules.causal = true), 0, true);
    for form in FORMS {
        let setup = BackwardSetup { layout: Layout::Blhd, ..BackwardSetup::plain(full(), form) };
        let first = run(&problem, &setup, |kernel_options| kernel_options).expect("it runs");
        for _ in 0..5 {
            let again = run(&problem, &setup, |kernel_options| kernel_options).expect("it runs");
            assert!(bits(&again) == bits(&first), "{form:?}: other bits");
        }
        let truth = crate::harness::backward::truth(&problem, &setup);
        for limit in [1, 100_000, 3_000_000] {
            let cut =
                run(&problem, &setup, |kernel_options| kernel_options.work_limit(limit)).expect("it runs");
            assert!(cut[..3] == first[..3], "{form:?}: other bits in parts of {limit} operations");
            crate::harness::backward::judge(&truth, &cut)
                .unwrap_or_else(|e| panic!("{form:?}, {limit}: {e}"));
        }
    }
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..13).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let config = AdditiveConfig::new(4, 8).kv_heads(2).value_dim(6);
    let attention = AdditiveAttention::with_pipelines(gpu.pipelines(), config).expect("it is made");
    let [q, k, v] = [view(0, [2, 4, 3, 8]), view(1, [2, 2, 5, 8]), view(2, [2, 2, 5, 6])];
    let (vector, out, lse) = (view(3, [1, 4, 1, 8]), view(4, [2, 4, 3, 6]), view(5, [2, 4, 3, 1]));
    let d_out = view(6, [2, 4, 3, 6]);
    let forward = |vector, out| AdditiveForward::new(q, k, v, vector, out);
    let new = AdditiveBackward::new(forward(vector, out).lse(lse), d_out);
    let refused = |call: &AdditiveBackward, words: &[&str]| {
        let error = attention.backward_scratch_size(call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("nothing");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        assert!(attention.backward(&mut encoder, call, &mut scratch).is_err());
        assert!(attention.prepare_backward(call, &mut scratch).is_err());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(attention.backward(&mut pass, call, &mut scratch).is_err());
    };
    refused(&new, &["no gradient is requested", "d_score_vector"]);
    let d_q = view(7, [2, 4, 3, 8]);
    let good = new.d_q(d_q);
    refused(&new.d_q(view(7, [2, 4, 3, 6])), &["`d_q`", "dim must be 8", "got 6"]);
    refused(&new.d_k(view(7, [2, 4, 5, 8])), &["`d_k`", "heads must be 2", "got 4"]);
    refused(&new.d_v(view(7, [2, 2, 5, 8])), &["`d_v`", "dim must be 6", "got 8"]);
    refused(&new.d_score_vector(view(7, [1, 1, 1, 8])), &["`d_score_vector`", "heads must be 4", "got 1"]);
    refused(&new.d_score_vector(typed(7, DType::BF16, [1, 4, 1, 8])), &["`d_score_vector`", "F32", "BF16"]);
    refused(&new.d_q(typed(7, DType::BF16, [2, 4, 3, 8])), &["`d_q`", "F32", "BF16"]);
    refused(&good.d_k(view(7, [2, 2, 5, 8])), &["overlap"]);
    refused(&new.d_q(view(3, [2, 4, 3, 8])), &["`d_q`", "`score_vector`"]);
    refused(&new.d_q(view(6, [2, 4, 3, 8])), &["`d_q`", "`d_out`"]);
    refused(&new.d_q(d_q.with_strides([0, 8, 8, 1])), &["`d_q`", "share memory"]);
    refused(&good.d_lse(view(8, [2, 4, 3, 2])), &["`d_lse`"]);
    refused(&AdditiveBackward::new(forward(vector, out), d_out).d_q(d_q), &["without `lse`", ".lse("]);
    let other = |[vector, out, lse, d_out]: [_; 4]| {
        AdditiveBackward::new(forward(vector, out).lse(lse), d_out).d_q(d_q)
    };
    refused(&other([view(3, [1, 3, 1, 8]), out, lse, d_out]), &["`score_vector`", "heads"]);
    refused(&other([vector, view(4, [2, 4, 2, 6]), lse, d_out]), &["`out`", "length"]);
    refused(&other([vector, out, view(5, [2, 4, 2, 1]), d_out]), &["`lse`", "q_len"]);
    refused(&other([vector, out, typed(5, DType::F16, [2, 4, 3, 1]), d_out]), &["`lse`", "F32"]);
    refused(&other([vector, out, lse, view(6, [2, 4, 3, 5])]), &["`d_out`", "dim"]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let mut none = Scratch::new(gpu.device(), Default::default()).expect("nothing");
    let error = attention.backward(&mut encoder, &good, &mut none).expect_err("no scratch").to_string();
    assert!(error.contains("scratch"), "{error}");
    let size = attention.backward_scratch_size(&good).expect("it fits");
    let mut scratch = Scratch::new(gpu.device(), size).expect("memory");
    assert!(attention.backward(&mut encoder, &good, &mut scratch).is_ok());
    let kernel_options = KernelOptions::new().target(Target::Gpu).matrix_units(MatrixUnits::Always);
    let always = AdditiveAttention::with_pipelines(gpu.pipelines(), config.kernel_options(kernel_options))
        .expect("it is made");
    let error = always.backward_scratch_size(&good).expect_err("no matrix units").to_string();
    assert!(error.contains("matrix units"), "{error}");
}
