//! Native sparse attention: shapes, numbers, own keys, and what the branches are.

use wgpu_attention::reference::{
    NativeSparseInputs, native_sparse_attention, native_sparse_attention_backward, native_sparse_indices,
    native_sparse_scores, widen,
};
use wgpu_attention::selected::{
    NativeSparseAttention, NativeSparseBackward, NativeSparseBranches, NativeSparseConfig,
    NativeSparseForward,
};
use wgpu_attention::tuning::Target;
use wgpu_attention::{Config, DType, Error, KernelOptions, Scratch, TensorView};

use super::shape;
use crate::harness::device::full;
use crate::harness::native::{NativeCase, Numbers};
use crate::harness::operator_setup::setups;
use crate::harness::{FORMS, OperatorSetup, Report, due, rest};

fn numbers(compression: [usize; 2], selection: [usize; 2], always: [usize; 2], window: usize) -> Numbers {
    Numbers { compression, selection, always, window }
}

fn cases() -> Vec<NativeCase> {
    let of = |name: &str, sizes, numbers| NativeCase::random(name, shape(sizes), numbers);
    vec![
        of("the paper's numbers", [1, 4, 1, 40, 1200, 16, 8], numbers([32, 16], [64, 6], [1, 2], 100)),
        of("overlapping blocks", [2, 4, 2, 60, 60, 16, 8], numbers([8, 4], [8, 3], [1, 1], 9)),
        of("blocks of one size", [1, 6, 3, 33, 70, 16, 8], numbers([8, 8], [8, 4], [0, 1], 5)),
        of("one query", [3, 8, 2, 1, 300, 32, 33], numbers([16, 8], [16, 5], [1, 2], 20)),
        of("a head for each", [2, 2, 2, 20, 90, 7, 5], numbers([8, 2], [4, 7], [0, 0], 1)),
        of("fewer keys than a block", [2, 2, 1, 5, 9, 16, 8], numbers([16, 4], [4, 2], [1, 1], 3)),
        of("fewer blocks than the count", [1, 4, 4, 17, 17, 7, 5], numbers([4, 4], [4, 9], [2, 3], 50)),
        of("wide blocks", [1, 2, 1, 50, 130, 16, 8], numbers([8, 2], [24, 2], [1, 1], 8)),
    ]
}

#[test]
fn results_match_reference() {
    let mut report = Report::new("native sparse attention");
    for (n, case) in cases().into_iter().enumerate() {
        let own = [[false; 2], [true, false], [false, true], [true; 2]];
        for (m, own) in own.into_iter().enumerate() {
            let name = format!("{}, own {own:?}", case.name);
            // Each choice of separate keys once.
            if !(m == n % 4 && (n < 4 || due(&name)) || rest(&name)) {
                continue;
            }
            let case = case.clone().with_own(own);
            for setup in setups(&name, n) {
                let judged = case.forward(&setup).and_then(|ran| Ok(ran.ratio.max(case.backward(&setup)?.0)));
                report.record(&name, &setup, judged);
            }
        }
    }
    report.finish();
}

/// Central differences check the reference's gradients. The scores of blocks are counted by hand.
#[test]
fn reference_gradients_match_finite_differences() {
    let numbers = numbers([4, 2], [4, 2], [1, 1], 3);
    let shape = shape([1, 2, 1, 5, 13, 3, 2]);
    for own in [[false; 2], [true; 2]] {
        let case = NativeCase::random("differences", shape, numbers).with_own(own);
        let config = case.config(DType::F32, KernelOptions::new());
        let mut inputs = [&case.q, &case.k, &case.v, &case.gates].map(|x| widen::<f64>(x)).to_vec();
        for own in [&case.compressed, &case.window].into_iter().flatten() {
            inputs.extend(own.iter().map(|x| widen(x)));
        }
        let d_out = widen::<f64>(&case.d_out);
        let with = |inputs: &[Vec<f64>], f: &mut dyn FnMut(&NativeSparseInputs<f64>)| {
            let [compressed, window] =
                [4, 6].map(|n| inputs.get(n).map(|k| [k.as_slice(), inputs[n + 1].as_slice()]));
            let [q, k, v, gates] = std::array::from_fn(|n| inputs[n].as_slice());
            f(&NativeSparseInputs { q, k, v, gates, compressed, window });
        };
        let (mut indices, mut gradients) = (Vec::new(), Vec::new());
        with(&inputs, &mut |inputs| {
            indices = native_sparse_indices(inputs, shape, &config).expect("it fits");
            let got = native_sparse_attention_backward(inputs, &indices, &d_out, shape, &config);
            let got = got.expect("it fits");
            gradients = vec![got.d_q, got.d_k, got.d_v, got.d_gates];
            gradients.extend([got.d_compressed, got.d_window].into_iter().flatten().flatten());
        });
        let loss = |inputs: &[Vec<f64>]| {
            let mut sum = 0.0;
            with(inputs, &mut |inputs| {
                let got = native_sparse_attention(inputs, &indices, shape, &config).expect("it fits");
                sum = got.out.iter().zip(&d_out).map(|(x, d)| x * d).sum();
            });
            sum
        };
        assert_eq!(gradients.len(), inputs.len());
        for (n, gradient) in gradients.iter().enumerate() {
            for (at, got) in gradient.iter().enumerate() {
                let moved = |by: f64| {
                    let mut moved = inputs.clone();
                    moved[n][at] += by;
                    loss(&moved)
                };
                let slope = (moved(1e-6) - moved(-1e-6)) / 2e-6;
                assert!((got - slope).abs() < 1e-6, "{n}, {at}: {got} and {slope}");
            }
        }
    }
}

/// One head with q = 0, so that each complete compressed key has the same weight. Blocks of four
/// keys have three compressed keys, of which one is shared with each neighbour: 1, 2, 1 strides.
#[test]
fn scores_are_shares_of_strides() {
    let numbers = numbers([4, 2], [4, 2], [0, 1], 3);
    let shape = shape([1, 1, 1, 1, 13, 1, 1]);
    let case = NativeCase::random("shares", shape, numbers);
    let config = case.config(DType::F32, KernelOptions::new());
    let (k, v) = (widen::<f64>(&case.k), widen::<f64>(&case.v));
    let (compressed, window) = (None, None);
    let inputs = NativeSparseInputs { q: &[0.0], k: &k, v: &v, gates: &[1.0; 3], compressed, window };
    let scores = native_sparse_scores(&inputs, shape, &config).expect("it fits");
    // Compressed keys begin at 0, 2, 4, 6 and 8: five with a weight of 1/5.
    let want = [3.0, 4.0, 3.0].map(|strides| strides / 5.0);
    assert!(scores.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-12), "{scores:?}");
    assert_eq!(scores[3], f64::INFINITY);
    let indices = native_sparse_indices(&inputs, shape, &config).expect("it fits");
    assert_eq!(indices, [3, 1]);
}

/// A softcap bounds the scores of all branches. A block may have any length.
#[test]
fn softcaps_and_odd_lengths() {
    let mut report = Report::new("native sparse attention, softcap and odd lengths");
    let mut capped = cases().swap_remove(1);
    capped.softcap = Some(0.7);
    // In f32 only: the means of half types are rounded twice, on a device and on the host.
    let odd = numbers([15, 5], [35, 2], [1, 1], 8);
    let odd = NativeCase::random("odd lengths", shape([2, 2, 1, 50, 133, 16, 8]), odd);
    for (n, case) in [capped, odd].into_iter().enumerate() {
        for (m, form) in FORMS.into_iter().enumerate() {
            if m != n && !rest(&format!("{}, {form:?}", case.name)) {
                continue;
            }
            let setup = OperatorSetup::plain(full(), form);
            let judged = case.forward(&setup).and_then(|ran| Ok(ran.ratio.max(case.backward(&setup)?.0)));
            report.record(&case.name, &setup, judged);
        }
    }
    report.finish();
}

/// If every block is selected, the selected branch is causal attention to all keys. So is a window
/// that is as long as the sequence.
#[test]
fn all_blocks_are_all_keys() {
    let numbers = numbers([8, 4], [8, 9], [0, 0], 70);
    let case = NativeCase::random("all blocks", shape([1, 4, 2, 30, 70, 16, 8]), numbers);
    for form in FORMS {
        let ran = case.forward(&OperatorSetup::plain(full(), form)).unwrap_or_else(|e| panic!("{e}"));
        let each = ran.branches.len() / 3;
        let (selected, window) = (&ran.branches[each..2 * each], &ran.branches[2 * each..]);
        for (a, b) in selected.iter().zip(window) {
            assert!((a - b).abs() < 1e-5, "{form:?}: {a} and {b}");
        }
    }
}

/// Twenty runs of both passes give the same bits.
#[test]
fn runs_give_same_bits() {
    let case = cases().swap_remove(1).with_own([false, false]);
    let setup = OperatorSetup::plain(full(), Target::Software);
    let run = || {
        let ran = case.forward(&setup).unwrap_or_else(|e| panic!("{e}"));
        let (_, gradients) = case.backward(&setup).unwrap_or_else(|e| panic!("{e}"));
        (ran.out, ran.branches, ran.indices, gradients)
    };
    let first = run();
    for _ in 0..19 {
        assert!(run() == first);
    }
}

/// Every wrong call is refused, with the name of what is wrong.
#[test]
fn wrong_calls_are_refused() {
    let profile = full();
    let gpu = &profile.gpu;
    let buffer = gpu.buffer(1 << 20).expect("room");
    // Each tensor in its own part of the buffer.
    let at = |n: usize, dtype, shape: [usize; 4]| TensorView::new(&buffer, dtype, shape).with_offset(n << 12);
    let f32 = |n, shape| at(n, DType::F32, shape);
    let config = NativeSparseConfig::new(Config::new(4, 8).kv_heads(2)).compression(8, 4).selection(8, 4);
    let operator = NativeSparseAttention::with_pipelines(gpu.pipelines(), config).expect("an operator");
    let (q, k, v) = (f32(0, [1, 4, 5, 8]), f32(1, [1, 2, 20, 8]), f32(2, [1, 2, 20, 8]));
    let (gates, out) = (f32(3, [1, 4, 5, 3]), f32(4, [1, 4, 5, 8]));
    let call = NativeSparseForward::new(q, k, v, gates, out);
    let branches = NativeSparseBranches {
        out: f32(5, [3, 4, 5, 8]),
        lse: f32(6, [3, 4, 5, 1]),
        indices: at(7, DType::U32, [1, 2, 5, 4]),
    };
    let whole = call.branches(branches);
    operator.scratch_size(&whole).expect("a right call");
    let compressed = [f32(8, [1, 2, 4, 8]), f32(9, [1, 2, 4, 8])];
    operator.scratch_size(&call.compressed(compressed[0], compressed[1])).expect("a right call");

    let wrong = |call: NativeSparseForward, part: &str| {
        let error = operator.scratch_size(&call).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    };
    wrong(
        NativeSparseForward::new(f32(0, [1, 4, 21, 8]), k, v, f32(3, [1, 4, 21, 3]), f32(4, [1, 4, 21, 8])),
        "q_len",
    );
    wrong(NativeSparseForward::new(q, k, v, f32(3, [1, 4, 5, 2]), out), "gates");
    wrong(NativeSparseForward::new(q, k, v, gates, f32(0, [1, 4, 5, 8])), "out");
    wrong(call.compressed(compressed[0], f32(9, [1, 2, 3, 8])), "compressed v");
    wrong(call.window_keys(f32(8, [1, 2, 19, 8]), v), "window k");
    wrong(call.branches(NativeSparseBranches { out: f32(5, [1, 4, 5, 8]), ..branches }), "branches.out");
    wrong(call.branches(NativeSparseBranches { lse: f32(5, [3, 4, 5, 1]), ..branches }), "branches.lse");
    let short = at(7, DType::U32, [1, 2, 5, 3]);
    wrong(call.branches(NativeSparseBranches { indices: short, ..branches }), "branches.indices");

    let d_out = f32(10, [1, 4, 5, 8]);
    let wrong = |call: NativeSparseBackward, part: &str| {
        let error = operator.backward_scratch_size(&call).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    };
    let of = |forward| NativeSparseBackward::new(forward, d_out);
    let d_k = f32(11, [1, 2, 20, 8]);
    operator.backward_scratch_size(&of(whole).d_k(d_k)).expect("a right call");
    wrong(of(whole), "no gradient");
    wrong(of(call).d_k(d_k), "branches");
    wrong(of(whole).d_compressed(compressed[0], compressed[1]), "d_compressed k");
    wrong(of(whole).d_window_keys(d_k, d_k), "d_window k");
    wrong(of(whole).d_k(k), "d_k");
    wrong(of(whole).d_q(d_out), "d_q");
    wrong(of(whole).d_gates(f32(11, [1, 4, 5, 2])), "d_gates");

    let refused = |config: NativeSparseConfig| {
        NativeSparseAttention::with_pipelines(gpu.pipelines(), config).expect_err("a wrong configuration")
    };
    assert!(matches!(refused(config.window(0)), Error::Option { option: "window", .. }));
    assert!(matches!(refused(config.compression(8, 3)), Error::NotDivisible { .. }));

    // A scratch that is too small, before anything is recorded.
    let mut small = Scratch::new(gpu.device(), Default::default()).expect("no memory");
    let got = gpu.submit(|encoder| operator.forward(encoder, &call, &mut small));
    assert!(matches!(got, Err(Error::ScratchTooSmall { .. })), "{got:?}");
}
