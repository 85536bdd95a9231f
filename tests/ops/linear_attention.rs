//! Linear attention: vectors, shapes, masks, states, gradients, limits and errors.

use wgpu_attention::linear_attention::{
    FeatureMap, LinearAttention, LinearBackward, LinearConfig, LinearForward, LinearState, RandomFeatures,
    UpdateRule, random_features,
};
use wgpu_attention::mask::FeatureMod;
use wgpu_attention::reference::compare::compare;
use wgpu_attention::reference::split_heads;
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, Scratch, Shape, TensorView};

use crate::harness::device::{Profile, device};
use crate::harness::linear::LinearCase;
use crate::harness::operator_setup::every_setup;
use crate::harness::{
    Case, FORMS, HostData, Layout, OperatorSetup, Report, Rng, Vector, defaults, full, rest,
};

pub const FAMILY: &str = "linear";
pub const NAMES: &[&str] = &[
    "linear_elu",
    "linear_elu_causal",
    "linear_elu_causal_bwd",
    "linear_elu_key_mask",
    "performer_hyperbolic",
    "performer_positive",
    "performer_positive_causal",
    "performer_relu",
    "performer_trig",
    "rfa_plain",
    "rfa_gated_causal",
];
pub const ONNX: &[&str] = &["onnx_linear_attention_linear"];

fn plain(form: Target) -> OperatorSetup {
    OperatorSetup::plain(full(), form)
}

/// Returns the setups of a case on both targets. With one causality, some of them always run.
fn setups(name: &str, causal: bool) -> Vec<OperatorSetup> {
    let mut all = Vec::new();
    for (n, form) in FORMS.into_iter().enumerate() {
        let always: &[usize] = match (n, causal) {
            (0, true) => &[1],
            (1, true) => &[0, 3],
            (0, false) => &[0, 2],
            _ => &[1],
        };
        let every = every_setup(form, [Layout::Dense, Layout::Window(7)]);
        for (n, setup) in every.into_iter().enumerate() {
            if always.contains(&n) || rest(&format!("{name}, {setup}")) {
                all.push(setup);
            }
        }
    }
    all
}

fn shape(sizes: [usize; 7]) -> Shape {
    let [batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim] = sizes;
    Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim }
}

fn from_vector(vector: &Vector) -> LinearCase {
    let [batch, heads, q_len, head_dim] = vector.shape4("q");
    let [_, kv_heads, kv_len, _] = vector.shape4("k");
    let sizes = [batch, heads, kv_heads, q_len, kv_len, head_dim, vector.shape4("v")[3]];
    let causal = vector.attrs["causal"].as_bool().unwrap_or(false);
    let map = if vector.has("w_rf") {
        let kind = match vector.attrs["feature_map"].as_str() {
            Some("positive") => RandomFeatures::Positive,
            Some("hyperbolic") => RandomFeatures::Hyperbolic,
            Some("trig") => RandomFeatures::Trigonometric,
            Some("relu") => {
                RandomFeatures::Relu { epsilon: vector.number("kernel_eps").expect("an epsilon") }
            }
            _ => RandomFeatures::Fourier,
        };
        FeatureMap::Random { kind, directions: vector.size("features") }
    } else {
        FeatureMap::Elu
    };
    let mut case = LinearCase::random(&vector.name, shape(sizes), map, causal);
    if vector.has("w_rf") {
        case.directions = vector.f32("w_rf");
    }
    if vector.has("gate") {
        case.rule = UpdateRule::Averaged;
        case.decay = vector.f32("gate");
    }
    (case.q, case.k, case.v) = (vector.f32("q"), vector.f32("k"), vector.f32("v"));
    case.eps = vector.number("eps");
    if vector.has("key_mask") {
        let mask = vector.bools("key_mask");
        case.key_mask = Some(HostData::new(mask.data, [batch, 1, 1, kv_len]));
    }
    if vector.has("dout") {
        case.d_out = vector.f32("dout");
    }
    case
}

#[test]
fn results_match_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("linear attention, vectors");
    for name in NAMES {
        let vector = Vector::load(FAMILY, name);
        let case = from_vector(&vector);
        let against = |tensor: &str, got: &[f64]| {
            let (want, tolerance) = vector.expected(tensor).expect("in the vector");
            compare(got, &want, tolerance).map_err(|e| format!("{tensor}, against the vector: {e}"))
        };
        let reference = case.reference::<f64>();
        let all = [("out", &reference.out), ("state", &reference.state), ("norm", &reference.norm)];
        for (tensor, got) in all.into_iter().filter(|(tensor, _)| vector.has(tensor)) {
            against(tensor, got).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
        }
        if vector.has("dq") {
            let gradients = case.gradients::<f64>(None, false);
            for (tensor, got) in ["dq", "dk", "dv"].into_iter().zip(&gradients) {
                against(tensor, got).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
            }
        }
        for form in FORMS {
            let setup = plain(form);
            let judged = case.forward(&setup).and_then(|(ratio, got)| {
                against("out", &got)?;
                if case.rule != UpdateRule::Linear {
                    return Ok(ratio.max(case.in_steps(&setup, &[4, 1, 1])?));
                }
                Ok(ratio.max(case.backward(&setup)?))
            });
            report.record(name, &setup, judged);
        }
    }
    report.finish();
}

/// The operator `LinearAttention` of ONNX opset 27, with the additive update rule.
#[test]
fn results_match_onnx_vector() {
    let mut report = Report::new("linear attention, ONNX");
    for name in ONNX {
        let vector = Vector::load(crate::peers::onnx::FAMILY, name);
        let [_, batch, length, width] = vector.shape4("q");
        let heads = vector.size("q_num_heads");
        let dim = width / heads;
        let of = Shape::new(batch, heads, length, dim);
        let mut case = LinearCase::random(*name, of, FeatureMap::Identity, true);
        let split = |tensor: &str| split_heads(&vector.f32(tensor), length, heads, dim).expect("it fits");
        (case.q, case.k, case.v) = (split("q"), split("k"), split("v"));
        case.normalised = false;
        case.scale = 1.0 / (dim as f64).sqrt();
        let (want, tolerance) = vector.expected("out").expect("an output");
        let want = split_heads(&want, length, heads, dim).expect("it fits");
        let reference = case.reference::<f64>();
        compare(&reference.out, &want, tolerance).expect("the reference");
        let (state, tolerance) = vector.expected("present_state").expect("a state");
        compare(&reference.state, &state, tolerance).expect("the reference's state");
        for form in FORMS {
            let setup = OperatorSetup { layout: Layout::Blhd, ..plain(form) };
            let judged = case.forward(&setup).and_then(|(ratio, got)| {
                compare(&got, &want, tolerance).map_err(|e| format!("against the vector: {e}"))?;
                Ok(ratio.max(case.in_steps(&setup, &[2, 1, 1])?).max(case.backward(&setup)?))
            });
            report.record(name, &setup, judged);
        }
    }
    report.finish();
}

/// Sizes around tiles and chunks.
const SIZES: [[usize; 7]; 6] = [
    [1, 1, 1, 1, 1, 1, 1],
    [2, 4, 2, 65, 65, 12, 20],
    [1, 2, 1, 64, 64, 64, 64],
    [1, 3, 1, 131, 131, 7, 5],
    [2, 1, 1, 33, 33, 40, 130],
    [1, 2, 2, 17, 17, 72, 16],
];

#[test]
fn every_size_matches_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("linear attention");
    for causal in [true, false] {
        for mut sizes in SIZES {
            if !causal {
                // Queries and keys have different lengths.
                sizes[3] = sizes[3] * 2 + 3;
            }
            let name = format!("causal {causal}, {sizes:?}");
            for setup in setups(&name, causal) {
                let case = LinearCase::random(name.clone(), shape(sizes), FeatureMap::Elu, causal)
                    .stored(setup.dtype);
                let judged = case.forward(&setup).map(|(ratio, _)| ratio);
                report.record(&case.name, &setup, judged);
            }
        }
    }
    report.finish();
}

#[test]
fn gradients_match_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("linear attention, gradients");
    for causal in [true, false] {
        for mut sizes in SIZES {
            if !causal {
                sizes[3] = sizes[3] / 2 + 1;
            }
            let name = format!("causal {causal}, {sizes:?}");
            for setup in setups(&name, causal) {
                let case = LinearCase::random(name.clone(), shape(sizes), FeatureMap::Elu, causal)
                    .stored(setup.dtype);
                report.record(&case.name, &setup, case.backward(&setup));
            }
        }
    }
    report.finish();
}

/// Returns cases with masks of keys, lengths, packed sequences, feature maps, and without
/// normalisation.
fn variations(causal: bool) -> Vec<LinearCase> {
    let of = |name: &str, sizes: [usize; 7], map| {
        let mut sizes = sizes;
        if !causal && !name.starts_with("packed") {
            sizes[3] += 10;
        }
        LinearCase::random(format!("{name}, causal {causal}"), shape(sizes), map, causal)
    };
    let mut rng = Rng::new(3);
    let mut bools = |shape: [usize; 4]| HostData::new(rng.bools(shape.iter().product(), 0.6), shape);
    let mask = bools([2, 1, 1, 150]);
    let heads_mask = bools([1, 2, 1, 70]);
    let poisoned = |case: LinearCase| {
        // Hidden keys may hold anything.
        case.with(|c| {
            let kv = c.shape.kv_heads;
            for row in 0..c.shape.batch * kv * c.shape.kv_len {
                let [b, h, j] = [row / c.shape.kv_len / kv, row / c.shape.kv_len % kv, row % c.shape.kv_len];
                let mask = c.key_mask.as_ref().expect("a mask");
                let b = if mask.shape[0] == 1 { 0 } else { b };
                let h = if mask.shape[1] == 1 { 0 } else { h };
                if !mask.data[(b * mask.shape[1] + h) * c.shape.kv_len + j] {
                    c.k[row * c.shape.head_dim] = f32::NAN;
                    c.v[row * c.shape.value_dim] = f32::INFINITY;
                }
            }
        })
    };
    vec![
        poisoned(
            of("key mask", [2, 4, 2, 150, 150, 12, 20], FeatureMap::Elu).with(|c| c.key_mask = Some(mask)),
        ),
        poisoned(
            of("key mask of heads", [2, 2, 2, 70, 70, 16, 16], FeatureMap::Relu)
                .with(|c| c.key_mask = Some(heads_mask)),
        ),
        of("lengths", [3, 2, 1, 90, 90, 8, 8], FeatureMap::Elu)
            .with(|c| c.lengths = Some(HostData::new(vec![0, 65, 1000], [3, 1, 1, 1]))),
        of("packed", [1, 2, 1, 200, 200, 16, 16], FeatureMap::Elu)
            .with(|c| c.starts = Some(vec![3, 3, 70, 71, 180])),
        of("packed, masked", [1, 2, 2, 100, 100, 9, 6], FeatureMap::Elu).with(|c| {
            c.starts = Some(vec![0, 30, 10, 400]);
            c.key_mask = Some(HostData::of([1, 1, 1, 100], |[_, _, _, j]| j % 7 != 0));
        }),
        of("relu", [1, 2, 2, 80, 80, 8, 8], FeatureMap::Relu),
        of("not normalised", [1, 2, 1, 80, 80, 8, 8], FeatureMap::Identity).with(|c| {
            c.normalised = false;
            c.scale = 0.3;
        }),
    ]
}

#[test]
fn masks_and_maps_match_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("linear attention, masks and maps");
    for causal in [true, false] {
        for case in variations(causal) {
            for form in FORMS {
                let setup = plain(form);
                // The usual runs alternate the target with the causality.
                let usual =
                    Rng::named(&case.name[..6]).word().is_multiple_of(2) == (causal == (form == Target::Gpu));
                if !usual && !rest(&format!("{}, {setup}", case.name)) {
                    continue;
                }
                report.record(&case.name, &setup, case.forward(&setup).map(|(ratio, _)| ratio));
                report.record(&format!("{}, backward", case.name), &setup, case.backward(&setup));
            }
        }
    }
    report.finish();
}

/// Returns the bytes of scratch of a case's calls, forward and backward.
fn scratch_bytes(case: &LinearCase, setup: &OperatorSetup) -> [u64; 2] {
    let gpu = &setup.profile.gpu;
    let shape = case.shape;
    let buffer = |shape: [usize; 4]| gpu.buffer(4 * shape.iter().product::<usize>()).expect("a buffer");
    let buffers = [shape.q(), shape.k(), shape.v(), shape.out()].map(|shape| (buffer(shape), shape));
    let [q, k, v, out] = buffers.each_ref().map(|(b, shape)| TensorView::new(b, DType::F32, *shape));
    let written = buffer(shape.k());
    let d_k = TensorView::new(&written, DType::F32, shape.k());
    let operator = LinearAttention::with_pipelines(gpu.pipelines(), case.config(setup)).expect("an operator");
    let call = LinearForward::new(q, k, v, out);
    let forward = operator.scratch_size(&call).expect("a size");
    let back = LinearBackward::new(call, out).d_k(d_k);
    [forward, operator.backward_scratch_size(&back).expect("a size")].map(|size| size.total())
}

#[test]
fn many_short_sequences_run_in_bounded_scratch() {
    crate::harness::in_turn!();
    let mut report = Report::new("linear attention, many short sequences");
    for (sizes, causal) in [
        // The state of a head is small. Its products within a chunk of 64 rows are 16 KiB.
        ([1025, 8, 8, 16, 16, 16, 16], true),
        ([512, 8, 4, 33, 33, 4, 8], true),
        // More heads than the workgroups of a dispatch along an axis, and more batch entries.
        ([70_000, 1, 1, 2, 2, 4, 4], true),
        ([1, 66_000, 66_000, 2, 2, 4, 4], false),
        ([70_000, 2, 1, 1, 3, 4, 4], false),
        // Large states.
        ([40, 32, 32, 3, 3, 96, 64], true),
    ] {
        let case = LinearCase::random(format!("{sizes:?}"), shape(sizes), FeatureMap::Elu, causal);
        let setup = OperatorSetup { profile: defaults(), ..plain(Target::Software) };
        report.record(&case.name, &setup, case.forward(&setup).map(|(ratio, _)| ratio));
        if sizes[0] != 1 {
            report.record(&format!("{}, backward", case.name), &setup, case.backward(&setup));
        }
        let [forward, backward] = scratch_bytes(&case, &setup);
        let mib = |n: u64| n << 20;
        let stats = 16 * (sizes[0] * sizes[1] * sizes[3]) as u64;
        assert!(forward <= mib(96), "{sizes:?}: {forward} bytes");
        assert!(backward <= mib(128) + stats, "{sizes:?}: {backward} bytes");
    }
    report.finish();
}

/// All options on a device with few workgroups per axis: 12 of up to 48 heads at a time.
#[test]
fn head_groups_match_the_reference() {
    let gpu = device(|limits| limits.max_compute_workgroups_per_dimension = 12);
    let profile: &'static Profile =
        Box::leak(Box::new(Profile { name: "few workgroups", gpu, matrix: false }));
    crate::harness::in_turn!();
    let mut report = Report::new("linear attention, groups of heads");
    let of = |name: &str, sizes: [usize; 7], causal| {
        LinearCase::random(format!("{name}, causal {causal}"), shape(sizes), FeatureMap::Elu, causal)
    };
    for causal in [true, false] {
        let mut rng = Rng::new(5);
        let mut bools = |shape: [usize; 4]| HostData::new(rng.bools(shape.iter().product(), 0.6), shape);
        let cases = [
            of("heads", [3, 8, 4, 20, 20, 8, 8], causal),
            of("many heads of an entry", [2, 30, 15, 20, 20, 8, 6], causal),
            of("entries", [25, 2, 1, 18, 18, 8, 8], causal),
            of("key mask", [5, 8, 4, 20, 20, 8, 8], causal).with(|c| c.key_mask = Some(bools([5, 4, 1, 20]))),
            of("key mask of heads", [5, 8, 4, 20, 20, 8, 8], causal)
                .with(|c| c.key_mask = Some(bools([1, 4, 1, 20]))),
            of("key mask of entries", [13, 2, 2, 20, 20, 8, 8], causal)
                .with(|c| c.key_mask = Some(bools([13, 1, 1, 20]))),
            of("lengths", [13, 2, 2, 20, 20, 8, 8], causal)
                .with(|c| c.lengths = Some(HostData::of([13, 1, 1, 1], |[b, ..]| b as u32 * 2))),
            of("packed", [1, 32, 16, 60, 60, 8, 8], causal).with(|c| c.starts = Some(vec![3, 20, 20, 55])),
        ];
        for case in cases {
            for layout in [Layout::Dense, Layout::Blhd] {
                let setup = OperatorSetup { profile, layout, ..plain(Target::Software) };
                report.record(&case.name, &setup, case.forward(&setup).map(|(ratio, _)| ratio));
                let accumulates = layout == Layout::Blhd;
                let setup = OperatorSetup { accumulates, ..setup };
                report.record(&format!("{}, backward", case.name), &setup, case.backward(&setup));
            }
        }
        for (kind, heads) in [(RandomFeatures::Positive, 1), (RandomFeatures::Trigonometric, 4)] {
            let map = FeatureMap::Random { kind, directions: 8 };
            let mut case =
                LinearCase::random(format!("{kind:?}"), shape([5, 8, 4, 20, 20, 8, 8]), map, causal);
            case.directions = random_features(7, 8 * heads, 8).expect("sizes");
            let setup = OperatorSetup { profile, ..plain(Target::Software) };
            report.record(&case.name, &setup, case.forward(&setup).map(|(ratio, _)| ratio));
            report.record(&format!("{}, backward", case.name), &setup, case.backward(&setup));
        }
    }
    // With the caller's states, and token by token.
    let case = of("steps", [5, 8, 4, 37, 37, 8, 8], true);
    for steps in [&[20, 17][..], &[30, 3, 1, 3]] {
        let setup = OperatorSetup { profile, ..plain(Target::Software) };
        report.record(&format!("steps {steps:?}"), &setup, case.in_steps(&setup, steps));
    }
    let mut rng = Rng::new(9);
    let gated = of("gated", [5, 8, 4, 9, 9, 8, 8], true).with(|c| {
        c.rule = UpdateRule::Gated;
        c.normalised = false;
        c.decay = (0..5 * 4 * 9).map(|_| rng.unit() as f32).collect();
    });
    let setup = OperatorSetup { profile, ..plain(Target::Software) };
    report.record(&gated.name, &setup, gated.forward(&setup).map(|(ratio, _)| ratio));
    report.finish();
}

const KINDS: [RandomFeatures; 5] = [
    RandomFeatures::Positive,
    RandomFeatures::Hyperbolic,
    RandomFeatures::Trigonometric,
    RandomFeatures::Relu { epsilon: 1e-3 },
    RandomFeatures::Fourier,
];

#[test]
fn random_features_match_the_reference() {
    let mut report = Report::new("linear attention, random features");
    for (n, kind) in KINDS.into_iter().enumerate() {
        for causal in [true, false] {
            let sizes = [[1, 4, 2, 70, 70, 12, 20], [2, 2, 2, 66, 66, 8, 8]][(n + usize::from(causal)) % 2];
            let map = FeatureMap::Random { kind, directions: 24 };
            let mut case =
                LinearCase::random(format!("{kind:?}, causal {causal}"), shape(sizes), map, causal);
            if n % 2 == 0 {
                // Each head has different directions.
                let more = random_features(8, 24 * (sizes[2] - 1), sizes[5]).expect("sizes");
                case.directions.extend(more);
            }
            let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
            let other = |form, dtype| OperatorSetup {
                dtype,
                gradient: dtype,
                layout: Layout::Window(7),
                accumulates: true,
                ..plain(form)
            };
            // Few kernels run in a type other than F32.
            let setup = match (n, causal) {
                (0, true) => other(Target::Software, f16),
                (1, false) => other(Target::Gpu, bf16),
                (4, true) => OperatorSetup { gradient: f32, ..other(Target::Gpu, bf16) },
                (n, causal) => plain(FORMS[(n + usize::from(causal)) % 2]),
            };
            let case = case.stored(setup.dtype);
            report.record(&case.name, &setup, case.forward(&setup).map(|(ratio, _)| ratio));
            report.record(&format!("{}, backward", case.name), &setup, case.backward(&setup));
        }
    }
    report.finish();
}

/// Exponents of hundreds, with the largest near the end. All terms are relative to the largest so
/// far.
#[test]
fn exponentials_do_not_overflow() {
    crate::harness::in_turn!();
    let mut report = Report::new("linear attention, large exponents");
    for kind in [RandomFeatures::Positive, RandomFeatures::Hyperbolic] {
        let map = FeatureMap::Random { kind, directions: 16 };
        for causal in [true, false] {
            let name = format!("{kind:?}, causal {causal}, growing");
            let case = LinearCase::random(name, shape([1, 2, 1, 140, 140, 8, 8]), map, causal).with(|c| {
                for (n, k) in c.k.iter_mut().enumerate() {
                    *k *= 0.1 * (n / 8) as f32;
                }
            });
            for form in FORMS {
                report.record(&case.name, &plain(form), case.forward(&plain(form)).map(|(ratio, _)| ratio));
                if causal {
                    let steps = case.in_steps(&plain(form), &[1, 70, 69]);
                    report.record(&format!("{}, steps", case.name), &plain(form), steps);
                }
            }
        }
    }
    report.finish();
}

/// FAVOR+ estimates softmax attention. The mean error falls with the root of the number of
/// directions.
#[test]
fn favor_approaches_softmax_attention() {
    let mut of = LinearCase::random("favor", shape([1, 2, 2, 48, 48, 8, 8]), FeatureMap::Elu, false);
    // With larger norms, rare and large features dominate the variance. So few directions would
    // miss them.
    of.q.iter_mut().chain(&mut of.k).for_each(|x| *x *= 0.35);
    let mut soft = Case::random("favor", of.shape);
    (soft.q, soft.k, soft.v) = (of.q.clone(), of.k.clone(), of.v.clone());
    let want = soft.reference::<f64>().out;
    let error = |directions: usize| {
        let draws = 24;
        let sum: f64 = (0..draws)
            .map(|seed| {
                let map = FeatureMap::Random { kind: RandomFeatures::Positive, directions };
                let drawn = random_features(seed, directions, 8).expect("sizes");
                let case = LinearCase { map, directions: drawn, ..of.clone() };
                let (_, got) = case.forward(&plain(Target::Auto)).expect("within the tolerance");
                got.iter().zip(&want).map(|(a, b)| (a - b).powi(2)).sum::<f64>() / want.len() as f64
            })
            .sum();
        (sum / draws as f64).sqrt()
    };
    let (few, many) = (error(32), error(512));
    // A quarter, within a factor of 1.5, because draws vary.
    println!("root mean square error {few:.4} of 32 directions, {many:.4} of 512");
    assert!(many < 0.375 * few && many > 0.167 * few, "{few} of 32 directions, {many} of 512");
}

#[test]
fn steps_with_state_equal_one_call() {
    let mut report = Report::new("linear attention, steps");
    let case = LinearCase::random("steps", shape([2, 4, 2, 70, 70, 12, 20]), FeatureMap::Elu, true);
    for form in FORMS {
        for steps in [&[70][..], &[1, 1, 66, 1, 1], &[64, 6], &[3, 65, 2]] {
            report.record(&format!("{steps:?}"), &plain(form), case.in_steps(&plain(form), steps));
        }
    }
    report.finish();
}

/// Rules whose state is not a sum: token by token, in one call and in steps.
#[test]
fn update_rules_match_the_reference() {
    let mut report = Report::new("linear attention, update rules");
    let rules = [UpdateRule::Gated, UpdateRule::Delta, UpdateRule::GatedDelta, UpdateRule::Averaged];
    for (n, rule) in rules.into_iter().enumerate() {
        let delta = matches!(rule, UpdateRule::Delta | UpdateRule::GatedDelta);
        let map = if delta { FeatureMap::Identity } else { FeatureMap::Elu };
        let sizes = shape([2, 4, 2, 37, 37, 8, 70]);
        let case = LinearCase::random(format!("{rule:?}"), sizes, map, true).with(|c| {
            let tokens = 2 * 2 * 37;
            let mut rng = Rng::new(n as u64);
            c.rule = rule;
            c.normalised = !delta;
            c.scale = 0.4;
            // The delta rule needs keys of length 1.
            if delta {
                for k in c.k.chunks_exact_mut(8) {
                    let length = k.iter().map(|x| x * x).sum::<f32>().sqrt();
                    k.iter_mut().for_each(|x| *x /= length);
                }
                c.beta = (0..tokens).map(|_| rng.unit() as f32).collect();
            }
            c.decay = match rule {
                UpdateRule::Gated => (0..tokens * 8).map(|_| -0.3 * rng.unit() as f32).collect(),
                UpdateRule::GatedDelta => (0..tokens).map(|_| -0.3 * rng.unit() as f32).collect(),
                UpdateRule::Averaged => (0..tokens).map(|_| 0.5 + 0.5 * rng.unit() as f32).collect(),
                _ => Vec::new(),
            };
        });
        for (dtype, layout) in [(DType::F32, Layout::Dense), (DType::BF16, Layout::Window(3))] {
            let setup = OperatorSetup { dtype, gradient: dtype, layout, ..plain(Target::Auto) };
            let case = case.stored(dtype);
            report.record(&case.name, &setup, case.forward(&setup).map(|(ratio, _)| ratio));
            if dtype == DType::F32 {
                let steps = case.in_steps(&setup, &[30, 1, 1, 5]);
                report.record(&format!("{}, steps", case.name), &setup, steps);
            }
        }
    }
    report.finish();
}

/// Softplus, as a custom function.
#[test]
fn custom_feature_map_matches_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("linear attention, a feature map of one's own");
    let text = "fn softplus(x: f32) -> f32 { return max(x, 0.0) + log(1.0 + exp(-abs(x))); }
        fn feature_map(x: f32) -> f32 { return softplus(x) + 0.1; }";
    let own = FeatureMod::new(text).expect("a feature map");
    for causal in [true, false] {
        let map = FeatureMap::Custom(own);
        let case = LinearCase::random("own", shape([1, 2, 1, 70, 70, 9, 8]), map, causal).with(|c| {
            let value = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p() + 0.1;
            c.own = Some([value, |x| 1.0 / (1.0 + (-x).exp())]);
        });
        let setup = plain(FORMS[usize::from(causal)]);
        report.record(&case.name, &setup, case.forward(&setup).map(|(ratio, _)| ratio));
        report.record("own, backward", &setup, case.backward(&setup));
        if causal {
            report.record("own, steps", &setup, case.in_steps(&setup, &[60, 1, 9]));
        }
    }
    report.finish();
    for (text, words) in [
        ("fn other(x: f32) -> f32 { return x; }", "missing"),
        ("fn feature_map(x: f32, y: f32) -> f32 { return x; }", "feature_map"),
        ("fn feature_map(x: f32) -> f32 { return z; }", "line 1"),
        ("var<private> y: f32;\nfn feature_map(x: f32) -> f32 { return y; }", "private"),
        ("struct Uniforms { a: f32 }\nfn feature_map(x: f32) -> f32 { return uniforms().a; }", "Uniforms"),
    ] {
        let error = FeatureMod::new(text).expect_err("refused").to_string();
        assert!(error.starts_with("`feature_map`") && error.contains(words), "{error}");
    }
}

/// In half precision, a naive elu + 1 cancels at −8. Its value is 3e-4, not 0, and so is its slope.
#[test]
fn elu_does_not_cancel() {
    for x in [-8.0f32, -12.0] {
        let mut case = LinearCase::random("cancel", shape([1, 1, 1, 5, 5, 4, 4]), FeatureMap::Elu, false);
        case.eps = Some(0.0);
        case.q.fill(x);
        case.k.fill(x);
        let case = case.stored(DType::F16);
        let setup = OperatorSetup { dtype: DType::F16, ..plain(Target::Auto) };
        let (_, got) = case.forward(&setup).expect("within the tolerance");
        let mean = case.v.chunks_exact(4).map(|v| f64::from(v[0])).sum::<f64>() / 5.0;
        assert!((got[0] - mean).abs() < 2e-3, "{} is not {mean}", got[0]);
        case.backward(&setup).expect("within the tolerance");
    }
}

/// Runs a case forward and backward, on both targets.
fn check(report: &mut Report, case: &LinearCase) {
    for form in FORMS {
        let judged = case.forward(&plain(form)).and_then(|ran| Ok(ran.0.max(case.backward(&plain(form))?)));
        report.record(&case.name, &plain(form), judged);
    }
}

/// A number as large as the sum of weights.
#[test]
fn large_eps_lowers_means() {
    let mut report = Report::new("linear attention, a large eps");
    for causal in [false, true] {
        let name = format!("a large eps, causal {causal}");
        let mut case = LinearCase::random(&name, shape([1, 2, 1, 20, 20, 6, 8]), FeatureMap::Elu, causal);
        case.eps = Some(8.0);
        check(&mut report, &case);
    }
    report.finish();
}

/// A mean of no weights is `0 / 0`.
#[test]
fn queries_without_features_are_zero() {
    let mut report = Report::new("linear attention, queries without features");
    for causal in [false, true] {
        let name = format!("queries without features, causal {causal}");
        let mut case = LinearCase::random(&name, shape([1, 2, 1, 20, 20, 6, 8]), FeatureMap::Relu, causal);
        case.eps = Some(0.0);
        case.k.iter_mut().for_each(|k| *k = k.abs());
        for (n, row) in case.q.chunks_exact_mut(6).enumerate() {
            let sign = if n % 2 == 0 { 1.0 } else { -1.0 };
            row.iter_mut().for_each(|q| *q = sign * q.abs());
        }
        check(&mut report, &case);
    }
    report.finish();
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..14).map(|_| gpu.buffer(8192).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let (wide, keys, values, outs) = ([2, 4, 5, 8], [2, 2, 5, 8], [2, 2, 5, 6], [2, 4, 5, 6]);
    let [q, k, v, out] = [view(0, wide), view(1, keys), view(2, values), view(3, outs)];
    let config = LinearConfig::new(4, 8).kv_heads(2).value_dim(6);
    let made = |config: LinearConfig| LinearAttention::with_pipelines(gpu.pipelines(), config);
    let unmade = |config: LinearConfig, words: &[&str]| {
        let error = made(config).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    let random = |kind, directions| FeatureMap::Random { kind, directions };
    unmade(LinearConfig::new(3, 8).kv_heads(2), &["heads"]);
    unmade(LinearConfig::new(4, 0), &["head_dim"]);
    unmade(config.dtype(DType::U32), &["U32"]);
    unmade(config.eps(-1.0), &["eps", "at least 0"]);
    unmade(config.eps(f64::NAN), &["eps"]);
    unmade(config.scale(f64::INFINITY), &["scale", "finite"]);
    unmade(config.update_rule(UpdateRule::Gated), &["without causality"]);
    unmade(config.causal(true).update_rule(UpdateRule::Delta), &["delta rule with normalisation"]);
    unmade(config.feature_map(random(RandomFeatures::Positive, 0)), &["directions"]);
    unmade(config.feature_map(random(RandomFeatures::Relu { epsilon: -1.0 }, 4)), &["epsilon"]);
    unmade(config.feature_map(random(RandomFeatures::Positive, 4)).eps(0.1), &["eps"]);
    unmade(config.feature_map(random(RandomFeatures::Positive, 4)).normalised(false), &["normalisation"]);
    let scaled = config.causal(true).update_rule(UpdateRule::Gated);
    unmade(scaled.feature_map(random(RandomFeatures::Positive, 4)), &["update rule"]);

    // An update rule with a norm has at most 2048 features. Other operators have any number.
    let relu = |config: LinearConfig, directions| {
        config.feature_map(random(RandomFeatures::Relu { epsilon: 0.0 }, directions))
    };
    unmade(relu(scaled, 2049), &["features", "2049", "2048"]);
    for config in [relu(scaled, 2048), relu(scaled.normalised(false), 2049), relu(config, 2049)] {
        made(config).expect("an operator");
    }

    let mut none = Scratch::new(gpu.device(), Default::default()).expect("nothing");
    let mut refused = |config: LinearConfig, call: LinearForward, words: &[&str]| {
        let operator = made(config).expect("an operator");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &call, &mut none).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward(&mut pass, &call, &mut none).is_err());
        assert!(operator.prepare(&call, &mut none).is_err());
    };
    let good = LinearForward::new(q, k, v, out);
    let of = LinearForward::new;
    refused(config, of(typed(0, DType::BF16, wide), k, v, out), &["`q`", "F32", "BF16"]);
    refused(config, of(view(0, [2, 2, 5, 8]), k, v, out), &["`q`", "heads must be 4", "got 2"]);
    refused(config, of(q, view(1, [2, 2, 5, 7]), v, out), &["`k`", "dim must be 8", "got 7"]);
    refused(config, of(q, k, view(2, [2, 2, 4, 6]), out), &["`v`", "length must be 5", "got 4"]);
    refused(config, of(q, k, v, view(3, [2, 4, 5, 5])), &["`out`", "dim must be 6", "got 5"]);
    refused(config, of(q, k, v, view(0, outs)), &["`out`", "`q`"]);
    let short = of(view(0, [2, 4, 4, 8]), k, v, view(3, [2, 4, 4, 6]));
    refused(config.causal(true), short, &["`k`", "length must be 4", "got 5"]);
    refused(config, good.key_mask(view(4, [2, 1, 1, 5])), &["`key_mask`", "Bool", "F32"]);
    refused(
        config,
        good.key_mask(typed(4, DType::Bool, [2, 1, 1, 4])),
        &["`key_mask`", "must be 5", "got 4"],
    );
    refused(
        config,
        good.key_mask(typed(4, DType::Bool, [2, 1, 1, 1])),
        &["`key_mask`", "must be 5", "got 1"],
    );
    refused(config, good.lengths(typed(4, DType::Bool, [2, 1, 1, 1])), &["`lengths`", "U32"]);
    refused(config, good.lengths(typed(4, DType::U32, [3, 1, 1, 1])), &["`lengths`", "batch must be 2 or 1"]);
    refused(config, good.packed(typed(4, DType::U32, [1, 1, 1, 3])), &["`q`", "batch must be 1", "got 2"]);
    refused(config, good.packed(typed(4, DType::U32, [1, 1, 1, 1])), &["`packed`", "must be 2", "got 1"]);
    let one = of(view(0, [1, 4, 5, 8]), view(1, [1, 2, 5, 8]), view(2, [1, 2, 5, 6]), view(3, [1, 4, 5, 6]));
    let both = one.packed(typed(4, DType::U32, [1, 1, 1, 3])).lengths(typed(5, DType::U32, [1; 4]));
    refused(config, both, &["`lengths` with packed sequences"]);
    refused(config, good.directions(view(4, [1, 1, 4, 8])), &["`directions` for this feature map"]);
    let favor = config.feature_map(random(RandomFeatures::Positive, 4));
    refused(favor, good, &["without directions"]);
    refused(favor, good.directions(view(4, [1, 1, 3, 8])), &["`directions`", "must be 4", "got 3"]);
    refused(favor, good.directions(view(4, [1, 3, 4, 8])), &["`directions`", "heads must be 2 or 1"]);
    refused(favor, good.directions(typed(4, DType::F16, [1, 1, 4, 8])), &["`directions`", "F32", "F16"]);
    let state = LinearState { state: view(6, [2, 2, 8, 6]), norm: view(7, [2, 2, 8, 1]), log_scale: None };
    refused(config, good.begins(true), &["`begins`"]);
    let wrong = LinearState { state: view(6, [2, 2, 8, 5]), ..state };
    refused(config, good.state(wrong), &["`state.state`", "must be 6", "got 5"]);
    let wrong = LinearState { norm: view(7, [2, 2, 7, 1]), ..state };
    refused(config, good.state(wrong), &["`state.norm`", "must be 8", "got 7"]);
    let wrong = LinearState { log_scale: Some(view(8, [2, 2, 1, 1])), ..state };
    refused(config, good.state(wrong), &["`log_scale`"]);
    let wrong = LinearState { norm: view(6, [2, 2, 8, 1]), ..state };
    refused(config, good.state(wrong), &["overlap"]);
    let wrong = LinearState { norm: view(2, [2, 2, 8, 1]), ..state };
    refused(config, good.state(wrong), &["`state.norm`", "`v`"]);
    let gated = config.causal(true).update_rule(UpdateRule::Gated);
    refused(gated, good, &["without `decay`"]);
    refused(config, good.decay(view(4, [2, 2, 5, 1])), &["decay"]);
    refused(gated, good.decay(view(4, [2, 2, 5, 3])), &["`decay`", "must be 8", "got 3"]);
    refused(gated, good.decay(view(4, [2, 2, 5, 1])).beta(view(5, [2, 2, 5, 1])), &["beta"]);
    let masked = good.decay(view(4, [2, 2, 5, 1])).lengths(typed(5, DType::U32, [2, 1, 1, 1]));
    refused(gated, masked, &["with an update rule"]);
    let delta = gated.update_rule(UpdateRule::GatedDelta).normalised(false);
    refused(delta, good.decay(view(4, [2, 2, 5, 1])), &["without `beta`"]);
    refused(config, good, &["scratch"]);

    let (d_out, d_q) = (view(9, outs), view(10, wide));
    let new = LinearBackward::new(good, d_out);
    let mut refused = |config: LinearConfig, call: LinearBackward, words: &[&str]| {
        let operator = made(config).expect("an operator");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.backward(&mut encoder, &call, &mut none).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward(&mut pass, &call, &mut none).is_err());
    };
    let of = |forward| LinearBackward::new(forward, d_out).d_q(d_q);
    refused(config, new, &["no gradient is requested"]);
    refused(config, new.d_q(view(10, keys)), &["`d_q`", "heads must be 4"]);
    refused(config, new.d_k(typed(10, DType::F16, keys)), &["`d_k`", "F32", "F16"]);
    refused(config, new.d_v(view(2, values)), &["`d_v`", "`v`"]);
    refused(config, new.d_q(d_q).d_k(view(10, keys)), &["overlap"]);
    refused(config, of(good.key_mask(typed(4, DType::Bool, [2, 1, 1, 4]))), &["`key_mask`"]);
    refused(config, LinearBackward::new(good, view(9, wide)).d_q(d_q), &["`d_out`", "dim must be 6"]);
    refused(config, of(good.state(state)), &["a call that continues from a `state`", "begins(true)"]);
    refused(config, of(good.state(state).begins(true)), &["scratch"]);
    refused(gated, new.d_q(d_q), &["backward pass of an update rule"]);
    // The bits of a number have no derivative.
    let bits = FeatureMod::new("fn feature_map(x: f32) -> f32 { return f32(bitcast<u32>(x) & 7u); }");
    let own = FeatureMap::Custom(bits.expect("a feature map"));
    refused(config.feature_map(own), new.d_q(d_q), &["feature_map"]);
    refused(config, new.d_q(d_q), &["scratch"]);
}
