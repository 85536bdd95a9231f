//! The indexer: vectors, shapes, masks, types, gradients and errors.

use wgpu_attention::mask::{Alignment, DeviceMask};
use wgpu_attention::reference::compare::compare;
use wgpu_attention::reference::{IndexerInputs, indexer_backward, indexer_indices, indexer_scores, widen};
use wgpu_attention::selected::{Indexer, IndexerBackward, IndexerForward};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, Mask, Scratch, Shape, TensorView};

use crate::harness::case::{HostData, Rules};
use crate::harness::indexer::{IndexerCase, IndexerSetup, indexer_shape};
use crate::harness::{FORMS, Layout, Report, Rng, Vector, defaults, full, rest};

pub const FAMILY: &str = "indexer";
pub const NAMES: &[&str] = &[
    "indexer_all_zero",
    "indexer_bwd",
    "indexer_decode_k64",
    "indexer_f16",
    "indexer_few_keys",
    "indexer_negative_weights",
    "indexer_one_head_minus_zero",
    "indexer_scaled_normal",
    "indexer_ties",
];

fn plain(form: Target) -> IndexerSetup {
    IndexerSetup {
        profile: full(),
        form,
        dtypes: [DType::F32; 2],
        wide_gradients: true,
        layout: Layout::Dense,
        group: None,
    }
}

fn causal(alignment: Alignment) -> Rules {
    Rules { causal: true, alignment, ..Rules::default() }
}

fn from_vector(vector: &Vector) -> IndexerCase {
    let [batch, heads, q_len, head_dim] = vector.shape4("q_idx");
    let [.., kv_len, _] = vector.shape4("k_idx");
    let alignment = match vector.attrs["causal"].as_str() {
        Some("bottom_right") => Alignment::BottomRight,
        _ => Alignment::TopLeft,
    };
    let shape = indexer_shape([batch, heads, q_len, kv_len, head_dim]);
    let mut case = IndexerCase::random(&vector.name, shape, causal(alignment), vector.size("k"));
    (case.q, case.k, case.w) = (vector.f32("q_idx"), vector.f32("k_idx"), vector.f32("w_idx"));
    case.scale = vector.number("scale").expect("a factor");
    case.exact = vector.attrs["exact"].as_bool().expect("a flag");
    if vector.has("dscores") {
        case.d_scores = vector.f32("dscores");
    }
    case
}

#[test]
fn results_match_vectors() {
    let mut report = Report::new("indexer, vectors");
    for name in NAMES {
        let vector = Vector::load(FAMILY, name);
        let case = from_vector(&vector);
        let scores = case.scores::<f64>();
        let (want, tolerance) = vector.expected("scores").expect("in the vector");
        compare(&scores, &want, tolerance).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
        let indices = indexer_indices(&scores, case.shape.kv_len, case.selected).expect("it fits");
        let of_vector: Vec<u32> = vector.f64("indices").iter().map(|n| *n as i32 as u32).collect();
        assert_eq!(indices, of_vector, "{name}, reference");
        let backward = vector.has("dscores");
        let names = ["dq_idx", "dk_idx", "dw_idx"];
        let against = |tensor: &str, got: &[f64]| {
            let (want, tolerance) = vector.expected(tensor).expect("in the vector");
            compare(got, &want, tolerance).map_err(|e| format!("{tensor}, against the vector: {e}"))
        };
        if backward {
            let got = case.gradients::<f64>(&case.d_scores);
            for (tensor, got) in names.into_iter().zip([got.d_q, got.d_k, got.d_w]) {
                against(tensor, &got).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
            }
        }
        let own = if vector.is_f16("q_idx") { DType::F16 } else { DType::F32 };
        for form in FORMS {
            let setup = IndexerSetup { dtypes: [own, DType::F32], ..plain(form) };
            // Exact scores give the indices of the vector. The other vectors have gaps between
            // neighbours, so that rounding does not change the order.
            report.record(name, &setup, case.forward(&setup));
            if backward {
                let judged = case.backward(&setup, false).and_then(|(ratio, got)| {
                    for (tensor, got) in names.into_iter().zip(&got) {
                        against(tensor, got)?;
                    }
                    Ok(ratio)
                });
                report.record(name, &setup, judged);
            }
        }
    }
    report.finish();
}

/// Returns the rules of a mask by number.
fn rules(number: usize, shape: &Shape, rng: &mut Rng) -> Rules {
    let Shape { batch, q_len, kv_len, .. } = *shape;
    let numbers = |rng: &mut Rng, shape: [usize; 4], most: usize| {
        let data = (0..shape.iter().product()).map(|_| rng.below(most) as u32).collect();
        HostData::new(data, shape)
    };
    let starts = |rng: &mut Rng, end: usize| {
        let mut starts: Vec<u32> = (0..4).map(|_| rng.below(end + 2) as u32).collect();
        starts.sort_unstable();
        HostData::new(starts, [1, 1, 1, 4])
    };
    match number {
        0 => Rules::default(),
        1 => causal(Alignment::BottomRight),
        2 => causal(Alignment::TopLeft),
        3 => Rules {
            window: Some([rng.below(kv_len), 0]),
            lengths: Some(numbers(rng, [batch, 1, 1, 1], kv_len + 3)),
            ..causal(Alignment::BottomRight)
        },
        4 => Rules { lengths: Some(numbers(rng, [batch, 1, q_len, 1], kv_len + 3)), ..Rules::default() },
        5 => Rules {
            query_offsets: Some(numbers(rng, [batch, 1, 1, 1], kv_len)),
            ..causal(Alignment::BottomRight)
        },
        6 => Rules {
            packed: Some([starts(rng, q_len), starts(rng, kv_len)]),
            ..causal(Alignment::BottomRight)
        },
        _ => Rules {
            packed: Some([starts(rng, q_len), starts(rng, kv_len)]),
            lengths: Some(numbers(rng, [1, 1, q_len, 1], kv_len)),
            ..causal(Alignment::TopLeft)
        },
    }
}

struct Draw {
    case: IndexerCase,
    setup: IndexerSetup,
}

impl std::fmt::Display for Draw {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let IndexerCase { shape, rules, selected, exact, .. } = &self.case;
        write!(f, "{}, {shape:?}, {:?}, k {selected}, exact {exact}", self.setup, rules.names())
    }
}

impl Draw {
    fn random(form: Target, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0x1dec_5e1e);
        let heads = rng.pick(&[1, 2, 3, 4, 7, 16, 33, 64, 70]);
        let most = if heads > 16 { 40 } else { 150 };
        let kv_len = rng.between(1, most);
        let q_len = rng.pick(&[1, 2, 9, kv_len.min(35)]);
        let head_dim = rng.pick(&[1, 4, 6, 16, 36]);
        let shape = indexer_shape([rng.pick(&[1, 1, 2]), heads, q_len, kv_len, head_dim]);
        let rules = rules(seed as usize % 8, &shape, rng);
        let selected = rng.pick(&[1, 5, 64, 70, kv_len, kv_len + 3]);
        let mut case = IndexerCase::random(format!("indexer {seed}"), shape, rules, selected);
        if rng.chance(0.3) {
            case = case.with_ties();
        } else if rng.chance(0.2) {
            case.scale = -case.scale;
        }
        let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let group = (head_dim.is_multiple_of(4) && rng.chance(0.25)).then(|| rng.pick(&[head_dim, 4]));
        let setup = IndexerSetup {
            profile,
            form,
            dtypes: rng.pick(&[[f32, f32], [f16, f32], [bf16, f32], [f16, f16], [f32, bf16]]),
            wide_gradients: rng.chance(0.5),
            layout: if rng.chance(0.5) { Layout::Dense } else { Layout::Window(rng.word()) },
            group,
        };
        Draw { case, setup }
    }
}

#[test]
fn results_match_reference() {
    Report::draws("indexer", 2, Draw::random, |draw| draw.case.forward(&draw.setup));
}

#[test]
fn gradients_match_reference() {
    Report::draws("indexer backward", 2, Draw::random, |draw| {
        let setup = IndexerSetup { group: None, ..draw.setup };
        let of_lists = draw.case.backward(&setup, true)?.0;
        Ok(of_lists.max(draw.case.backward(&setup, false)?.0))
    });
}

/// Central differences check the reference's gradients.
#[test]
fn reference_gradients_match_finite_differences() {
    let shape = indexer_shape([2, 3, 4, 5, 6]);
    let case = IndexerCase::random("differences", shape, causal(Alignment::TopLeft), 2);
    let got = case.gradients::<f64>(&case.d_scores);
    let inputs = [&case.q, &case.k, &case.w].map(|x| widen::<f64>(x));
    let loss = |[q, k, w]: &[Vec<f64>; 3]| {
        let inputs = IndexerInputs { q, k, w, scale: f64::from(case.scale as f32), mask: case.rules.host() };
        let scores = indexer_scores(&inputs, shape).expect("it fits");
        let seen = scores.iter().zip(&case.d_scores).filter(|(score, _)| score.is_finite());
        seen.map(|(score, d)| score * f64::from(*d)).sum::<f64>()
    };
    for (n, gradient) in [&got.d_q, &got.d_k, &got.d_w].into_iter().enumerate() {
        for at in 0..inputs[n].len() {
            let moved = |by: f64| {
                let mut moved = inputs.clone();
                moved[n][at] += by;
                loss(&moved)
            };
            let slope = (moved(1e-6) - moved(-1e-6)) / 2e-6;
            assert!((gradient[at] - slope).abs() < 1e-6, "{n}, {at}: {} and {slope}", gradient[at]);
        }
    }
}

/// At x = 0 the gradient is 0. Keys that the mask hides have none.
#[test]
fn zero_products_have_no_gradient() {
    let shape = indexer_shape([1, 1, 1, 3, 1]);
    let inputs = IndexerInputs { q: &[1.0], k: &[0.0, 2.0, -1.0], w: &[3.0], scale: 1.0, mask: Mask::none() };
    let got = indexer_backward(&inputs, shape, &[1.0, 1.0, 1.0]).expect("it fits");
    assert_eq!((got.d_q, got.d_k, got.d_w), (vec![6.0], vec![0.0, 3.0, 0.0], vec![2.0]));
    let case = IndexerCase {
        q: vec![1.0],
        k: vec![0.0, 2.0, -1.0],
        w: vec![3.0],
        d_scores: vec![1.0; 3],
        scale: 1.0,
        ..IndexerCase::random("zero", shape, Rules::default(), 2)
    };
    for form in FORMS {
        let (_, got) = case.backward(&plain(form), false).expect("a run");
        assert_eq!(got, [vec![6.0], vec![0.0, 3.0, 0.0], vec![2.0]]);
    }
}

/// NaN is the best score, and an infinite one is next. −∞ counts as hidden.
#[test]
fn special_scores_have_an_order() {
    let gpu = &full().gpu;
    let keys = [1.0, f32::NAN, f32::INFINITY, 0.5, f32::NEG_INFINITY];
    let buffers = [&[1.0f32][..], &keys, &[1.0]].map(|x| gpu.upload(x).expect("a buffer"));
    let [q, k, w] = [0, 1, 2].map(|n| &buffers[n]);
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    let out = gpu.buffer(4 * 6).expect("a buffer");
    let indices = TensorView::new(&out, DType::U32, [1, 1, 1, 6]);
    let weights = gpu.upload(&[-1.0f32]).expect("a buffer");
    for form in FORMS {
        let indexer =
            Indexer::with_pipelines(gpu.pipelines()).kernel_options(KernelOptions::new().target(form));
        for (w, want) in [(w, [1, 2, 0, 3, 4, u32::MAX]), (&weights, [1, 4, 3, 0, u32::MAX, u32::MAX])] {
            let q = view(q, [1, 1, 1, 1]);
            let call = IndexerForward::new(q, view(k, [1, 1, 5, 1]), view(w, [1, 1, 1, 1])).indices(indices);
            let size = indexer.scratch_size(&call).expect("a size");
            let mut scratch = Scratch::new(gpu.device(), size).expect("a scratch");
            gpu.submit(|e| indexer.forward(e, &call, &mut scratch)).expect("a recording");
            assert_eq!(gpu.download::<u32>(&out, 6).expect("a read-back"), want, "{form:?}");
        }
    }
}

/// More scores than a span may have, and more results than a workgroup sorts.
#[test]
fn long_calls_are_cut() {
    crate::harness::in_turn!();
    let mut report = Report::new("long indexers");
    let long = |name: &str, sizes, selected| {
        IndexerCase::random(name, indexer_shape(sizes), causal(Alignment::BottomRight), selected)
    };
    for (n, form) in FORMS.into_iter().enumerate() {
        let setup = plain(form);
        let many = long("many scores", [1, 1, 1100, 16_000, 4], 3);
        if n == 0 || rest("many scores") {
            report.record("many scores", &setup, many.forward(&setup));
            let narrow = IndexerSetup { dtypes: [DType::F16, DType::F32], wide_gradients: false, ..setup };
            let few = IndexerCase { selected: 2, ..many.clone() };
            report.record("many gradients", &narrow, few.backward(&narrow, true).map(|(ratio, _)| ratio));
        }
        let results = long("many results", [1, 2, 3, 5000, 8], 4500).with_ties();
        report.record("many results", &setup, results.forward(&setup));
    }
    report.finish();
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..12).map(|_| gpu.buffer(8192).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let indexer = Indexer::with_pipelines(gpu.pipelines());
    let mut none = Scratch::new(gpu.device(), Default::default()).expect("nothing");
    let (queries, keys, weights, list) = ([2, 4, 5, 8], [2, 1, 9, 8], [2, 1, 5, 4], [2, 1, 5, 3]);
    let [q, k, w] = [view(0, queries), view(1, keys), view(2, weights)];
    let indices = typed(3, DType::U32, list);
    let call = IndexerForward::new(q, k, w);
    let good = call.indices(indices);
    let says = |error: wgpu_attention::Error, words: &[&str]| {
        let error = error.to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    let mut refused = |call: IndexerForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        says(indexer.forward(&mut encoder, &call, &mut none).expect_err("an error"), words);
        assert!(indexer.prepare(&call, &mut none).is_err());
    };
    let of = IndexerForward::new;
    refused(call, &["no output", "`indices`"]);
    refused(good, &["scratch"]);
    refused(of(typed(0, DType::U32, queries), k, w).indices(indices), &["`q`", "F32, F16 or BF16"]);
    refused(of(q, view(1, [2, 2, 9, 8]), w).indices(indices), &["`k`", "heads must be 1"]);
    refused(of(q, view(1, [2, 1, 9, 4]), w).indices(indices), &["`k`", "dim must be 8"]);
    refused(of(q, k, view(2, [2, 1, 5, 3])).indices(indices), &["`w`", "dim must be 4"]);
    refused(of(q, typed(1, DType::U32, keys), w).indices(indices), &["`k`", "F32, F16 or BF16"]);
    refused(good.scale(f32::NAN), &["scale", "finite"]);
    refused(call.indices(typed(3, DType::F32, list)), &["`indices`", "U32"]);
    refused(call.indices(typed(3, DType::U32, [2, 1, 4, 3])), &["`indices`", "length must be 5"]);
    refused(call.values(view(4, list)), &["`values`", "`indices`"]);
    refused(good.values(view(4, [2, 1, 5, 4])), &["`values`", "dim must be 3"]);
    refused(good.scores(typed(4, DType::F16, [2, 1, 5, 9])), &["`scores`", "F32"]);
    refused(good.scores(view(4, [2, 1, 5, 8])), &["`scores`", "must be 9"]);
    refused(good.scores(view(3, [2, 1, 5, 9])), &["`scores`", "`indices`"]);
    refused(call.indices(typed(0, DType::U32, list)), &["`indices`", "`q`"]);
    // Keys of 8 bits.
    let words = typed(1, DType::U32, [2, 1, 9, 2]);
    let of_words = of(q, words, w).indices(indices);
    refused(of_words, &["`k`"]);
    refused(of_words.key_scales(view(5, [2, 1, 9, 3])), &["head_dim / 4", "2", "3"]);
    refused(of_words.key_scales(view(5, [2, 1, 8, 1])), &["`k_scales`", "length must be 9"]);
    refused(good.key_scales(view(5, [2, 1, 9, 1])), &["`k`", "U32"]);
    let odd = of(view(0, [2, 4, 5, 6]), words, w).indices(indices);
    refused(odd.key_scales(view(5, [2, 1, 9, 1])), &["head_dim", "6", "4"]);
    // Masks.
    let none_of = DeviceMask::none;
    let slopes = view(6, [1, 1, 1, 1]);
    refused(good.mask(none_of().alibi(slopes)), &["mask", "single pairs"]);
    refused(good.mask(none_of().sink_logits(slopes)), &["mask", "single pairs"]);
    refused(good.mask(none_of().exclude_self()), &["mask", "single pairs"]);
    let keep = typed(6, DType::Bool, [1, 1, 1, 9]);
    refused(good.mask(none_of().key_padding_mask(keep)), &["mask", "single pairs"]);
    let lengths = typed(6, DType::U32, [2, 4, 1, 1]);
    refused(good.mask(none_of().lengths(lengths)), &["`lengths`", "heads must be 1"]);
    let lengths = typed(3, DType::U32, [2, 1, 1, 1]);
    refused(good.mask(none_of().lengths(lengths)), &["`indices`", "`lengths`"]);

    let backward = |forward, d_scores| IndexerBackward::new(forward, d_scores);
    let mut refused = |call: IndexerBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        says(indexer.backward(&mut encoder, &call, &mut none).expect_err("an error"), words);
        assert!(indexer.prepare_backward(&call, &mut none).is_err());
    };
    let dense = backward(call, view(7, [2, 1, 5, 9]));
    refused(dense, &["no gradient"]);
    refused(dense.d_q(view(8, queries)), &["scratch"]);
    refused(dense.d_q(view(8, [2, 4, 5, 4])), &["`d_q`", "dim must be 8"]);
    refused(dense.d_k(typed(8, DType::F16, keys)), &["`d_k`", "F32"]);
    refused(dense.d_w(view(8, [2, 1, 5, 3])), &["`d_w`", "dim must be 4"]);
    refused(dense.d_w(view(2, weights)), &["`d_w`", "`w`"]);
    refused(dense.d_q(view(8, queries)).d_k(view(8, keys)), &["`d_q`", "`d_k`"]);
    refused(backward(call, view(7, list)).d_w(view(8, weights)), &["`d_scores`", "must be 9"]);
    refused(dense.indices(indices).d_w(view(8, weights)), &["`d_scores`", "must be 3"]);
    let listed = backward(call, view(7, list)).d_w(view(8, weights));
    refused(listed.indices(typed(3, DType::F32, list)), &["`indices`", "U32"]);
    let packed = of(q, words, w).key_scales(view(5, [2, 1, 9, 1]));
    refused(backward(packed, view(7, [2, 1, 5, 9])).d_w(view(8, weights)), &["8 bits"]);
}
