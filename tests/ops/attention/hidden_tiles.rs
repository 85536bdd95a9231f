//! Tiles that a mask's tensors hide. Results with skipped tiles equal the reference, and skipping
//! saves their time.

use std::time::{Duration, Instant};

use wgpu_attention::mask::{Blocks, DeviceMask};
use wgpu_attention::reference::classify;
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{
    Attention, Backward, Config, DType, Forward, KernelOptions, Mask, Scratch, Shape, TensorView,
};

use crate::harness::backward::BackwardSetup;
use crate::harness::classify::classified;
use crate::harness::device::is_software;
use crate::harness::gradients::Problem;
use crate::harness::{
    Case, DropoutData, FORMS, HostData, Layout, Profile, Report, Rules, Setup, due, full, matrices, rest, say,
};
use crate::ops::attention::matrix::finish;

/// Several scans of eight tiles of 64 keys, and partial tiles of rows and keys.
const LONG: Shape =
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 45, kv_len: 1210, head_dim: 8, value_dim: 12 };
/// Several tiles of queries and of keys.
const SQUARE: Shape = Shape { q_len: 203, kv_len: 203, ..LONG };
/// Several scans of query tiles.
const TALL: Shape = Shape { q_len: 1210, kv_len: 45, heads: 2, kv_heads: 1, ..LONG };

fn documents(
    shape: &Shape,
    heads: [usize; 2],
    query: impl Fn([usize; 4]) -> u32,
    key: impl Fn([usize; 4]) -> u32,
) -> Rules {
    let [b, _, i, j] = shape.weights();
    let documents = [HostData::of([b, heads[0], i, 1], query), HostData::of([b, heads[1], 1, j], key)];
    Rules { documents: Some(documents), ..Default::default() }
}

/// Document numbers in order, out of order and far apart. Some numbers only queries or only keys
/// have, and some differ by head.
fn of_documents(shape: &Shape) -> Vec<(&'static str, Rules)> {
    let [_, h, q_len, kv_len] = shape.weights();
    let part = move |n: usize, len: usize| (n * 9 / len) as u32;
    let side = |shuffle: fn(u32) -> u32| {
        documents(
            shape,
            [1, 1],
            |[b, _, i, _]| shuffle(part(i, q_len) + b as u32),
            |[.., j]| shuffle(part(j, kv_len)),
        )
    };
    vec![
        ("in order", side(|n| n)),
        ("out of order", side(|n| [3, 8, 0, 5, 9, 1, 7, 2, 6, 4][n as usize % 10])),
        ("extreme numbers", side(|n| [u32::MAX, 0, 7, u32::MAX - 1, 1][n as usize % 5])),
        ("interleaved", documents(shape, [1, 1], |[.., i, _]| (i % 3) as u32, |[.., j]| (j % 4) as u32)),
        (
            "nothing in common",
            documents(shape, [1, 1], |[.., i, _]| 2 * part(i, q_len), |[.., j]| 2 * part(j, kv_len) + 1),
        ),
        (
            "one row apart",
            documents(
                shape,
                [1, 1],
                |[.., i, _]| u32::from(i == q_len - 1),
                |[.., j]| u32::from(j == kv_len - 1),
            ),
        ),
        (
            "by head",
            documents(
                shape,
                [h, h],
                |[_, h, i, _]| part(i, q_len) + h as u32,
                |[_, h, _, j]| part(j, kv_len) + 2 * h as u32,
            ),
        ),
    ]
}

/// Padding on the left, on the right, of all keys, and by head.
fn of_keys(shape: &Shape) -> Vec<(&'static str, HostData<bool>)> {
    let [b, h, _, j] = shape.weights();
    let len = |b: usize| j / (2 + 3 * b);
    vec![
        ("right", HostData::of([b, 1, 1, j], |[b, .., j]| j < len(b))),
        ("left", HostData::of([b, 1, 1, j], |[b, .., k]| k + len(b) >= j)),
        ("everything", HostData::of([b, 1, 1, j], |[b, ..]| b == 1)),
        ("by head", HostData::of([1, h, 1, j], |[_, h, _, j]| j / 40 % 4 == h)),
        ("by head, groups apart", HostData::of([1, h, 1, j], |[_, h, _, j]| j / 70 % 2 == h / 2)),
    ]
}

/// A row for each query: a staircase, a single pair in a corner of a tile, and rows without keys.
fn of_pairs(shape: &Shape) -> Vec<(&'static str, HostData<bool>)> {
    let [_, h, i, j] = shape.weights();
    vec![
        ("staircase", HostData::of([1, 1, i, j], |[.., i, j]| i / 32 == j / 64 % 4)),
        ("corner", HostData::of([1, 1, i, j], |[.., i, j]| i == 33 && j % 128 == 127 || (i, j) == (3, 0))),
        ("by head", HostData::of([1, h, i, j], |[_, h, i, j]| i % 5 != 0 && j / 64 % 4 == h)),
        ("by query", HostData::of([1, 1, i, 1], |[.., i, _]| i / 48 % 2 == 0)),
    ]
}

/// Returns rules that hide the keys outside `seen`.
fn ruled(seen: &HostData<bool>, rule: usize) -> Rules {
    let seen = seen.clone();
    match rule {
        0 => Rules { key_padding_mask: Some(seen), ..Default::default() },
        1 => Rules { attn_mask: Some(seen), ..Default::default() },
        _ => {
            let bias =
                |(n, seen): (usize, &bool)| if *seen { (n % 3) as f32 * 0.5 } else { f32::NEG_INFINITY };
            let data = seen.data.iter().enumerate().map(bias).collect();
            Rules { bias: Some(HostData::new(data, seen.shape)), ..Default::default() }
        }
    }
}

/// Returns all these rules, sorted by the kernels that they need.
fn all_rules(shape: &Shape) -> Vec<(String, Rules)> {
    let mut all: Vec<_> =
        of_documents(shape).into_iter().map(|(name, rules)| (format!("documents {name}"), rules)).collect();
    for (n, (name, seen)) in of_keys(shape).into_iter().chain(of_pairs(shape)).enumerate() {
        let rules =
            |rule: usize| (format!("{} {name}", ["padding", "attn_mask", "bias"][rule]), ruled(&seen, rule));
        all.push(rules(n % 2));
        all.push(rules(2));
    }
    let [.., j] = shape.weights();
    let causal = Rules { causal: true, ..of_documents(shape).swap_remove(0).1 };
    let padding = HostData::of([1, 1, 1, j], |[.., j]| j % 150 < 75);
    let steps = HostData::of([1, 1, 1, j], |[.., j]| if j / 64 % 2 == 0 { 0.25 } else { f32::NEG_INFINITY });
    all.push(("documents and causal".into(), causal.clone()));
    all.push((
        "documents, padding and bias".into(),
        Rules { key_padding_mask: Some(padding), bias: Some(steps), ..causal },
    ));
    all
}

fn setup(profile: &'static Profile, form: Target, dtype: DType) -> Setup {
    Setup { dtype, layout: Layout::Blhd, ..Setup::plain(profile, form, Algorithm::Fused) }
}

#[test]
fn forward_equals_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("hidden tiles");
    for (n, shape) in [LONG, SQUARE].into_iter().enumerate() {
        for (m, (name, rules)) in all_rules(&shape).into_iter().enumerate() {
            let case = Case::random(format!("hidden tiles {n}, {name}"), shape).with(|c| c.rules = rules);
            if (n + m) % 2 != 0 && !rest(&case.name) {
                continue;
            }
            for form in FORMS {
                let dtype = [DType::F32, DType::F16, DType::BF16];
                let dtype = if name == "documents out of order" || name.starts_with("bias") {
                    &dtype[..]
                } else {
                    &dtype[..1]
                };
                for dtype in dtype {
                    let key = format!("hidden tiles {form:?} {dtype:?} {}", case.rules.names().join(" "));
                    if *dtype == DType::F32 || name == "documents out of order" && due(&key) || rest(&key) {
                        let mut setup = setup(full(), form, *dtype);
                        if *dtype == DType::F16 {
                            setup = Setup { layout: Layout::Window(3), bias: DType::F16, ..setup };
                        }
                        report.check_in(&case, &setup, &mut Default::default());
                    }
                }
            }
        }
    }
    report.finish();
}

/// Keys that no query of their heads sees hold NaN and infinities.
#[test]
fn hidden_garbage_has_no_effect() {
    crate::harness::in_turn!();
    let mut report = Report::new("hidden tiles, garbage");
    for (name, rules) in all_rules(&SQUARE) {
        let case = Case::random(format!("hidden garbage, {name}"), SQUARE).with(|c| c.rules = rules);
        let weights = case.reference::<f64>().weights.expect("weights");
        let Shape { heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = SQUARE;
        let mut seen = vec![false; SQUARE.batch * kv_heads * kv_len];
        for (n, weight) in weights.iter().enumerate() {
            seen[n / kv_len / q_len / (heads / kv_heads) * kv_len + n % kv_len] |= *weight != 0.0;
        }
        let mut spoilt = case.clone();
        for row in (0..seen.len()).filter(|row| !seen[*row]) {
            let garbage = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][row % 3];
            spoilt.k[row * head_dim..][..head_dim].fill(garbage);
            spoilt.v[row * value_dim..][..value_dim].fill(garbage);
        }
        for form in FORMS {
            report.check_in(&spoilt, &setup(full(), form, DType::F32), &mut Default::default());
        }
    }
    report.finish();
}

#[test]
fn backward_equals_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("hidden tiles, gradients");
    for (n, shape) in [SQUARE, TALL].into_iter().enumerate() {
        for (m, (name, rules)) in all_rules(&shape).into_iter().enumerate() {
            let case = Case::random(format!("hidden tiles of gradients {n}, {name}"), shape).with(|c| {
                c.rules = rules;
                c.dropout = (m % 5 == 4).then_some(DropoutData::Seeded { p: 0.25, seed: 7 });
            });
            if (n + m) % 2 != 0 && !rest(&case.name) {
                continue;
            }
            let (rules, drops) = (case.rules.names().join(" "), case.dropout.is_some());
            let problem = Problem::new(case, 0, m / 2 % 2 == 0);
            for form in FORMS {
                // Cases that share kernels run together. Documents always run.
                let key = format!("hidden tiles, gradients, {form:?}, {rules}, dropout {drops}");
                if (rules != "documents" || drops) && !due(&key) && !rest(&key) {
                    continue;
                }
                let plain = BackwardSetup { added: [false; 5], ..BackwardSetup::plain(full(), form) };
                let dtype = if name == "documents out of order" { DType::F16 } else { DType::F32 };
                report.check_backward(&problem, &BackwardSetup { dtype, ..plain });
            }
        }
    }
    report.finish();
}

#[test]
fn matrix_units_equal_reference() {
    let mut report = Report::new("hidden tiles on matrix units");
    let shape = Shape { head_dim: 16, value_dim: 16, ..SQUARE };
    for profile in matrices() {
        for (name, rules) in all_rules(&shape) {
            let case = Case::random(format!("hidden tiles on matrix units, {name}"), shape)
                .with(|c| c.rules = rules);
            let key =
                format!("hidden tiles on matrix units, {}, {}", case.rules.names().join(" "), profile.name);
            let usual = ["documents", "attn_mask"].contains(&case.rules.names().join(" ").as_str());
            if profile.compiles_fast() && usual && due(&key) || rest(&key) {
                report.check_in(&case, &Setup::matrix(profile, Layout::Blhd), &mut Default::default());
                let setup = BackwardSetup { added: [false; 5], ..BackwardSetup::matrix(profile) };
                report.check_backward(&Problem::new(case, 0, true), &setup);
            }
        }
    }
    finish(report);
}

#[test]
fn block_maps_equal_reference() {
    crate::harness::in_turn!();
    for (name, rules) in all_rules(&SQUARE) {
        for (size, heads) in [([64, 64], [1, 1]), ([29, 64], [2, 4]), ([5, 17], [1, 4])] {
            let want = classify(&rules.host(), SQUARE, size, heads).expect("a map");
            let got = pollster::block_on(classified(full(), &rules, &SQUARE, size, heads)).expect("a map");
            assert_eq!(got, want, "{name}, {size:?}, {heads:?}");
        }
    }
}

const TOKENS: usize = 2048;
/// Documents of this many tokens, and keys that are not padding.
const SEEN: usize = TOKENS / 16;

/// Returns the least times of three runs of each call. The calls alternate.
fn least_times<const N: usize>(mut calls: [Box<dyn FnMut() + '_>; N]) -> [Duration; N] {
    let mut least = [Duration::MAX; N];
    for round in 0..4 {
        for (call, least) in calls.iter_mut().zip(&mut least) {
            let since = Instant::now();
            call();
            // The first round compiles.
            *least = if round == 0 { Duration::MAX } else { since.elapsed().min(*least) };
        }
    }
    least
}

/// A sixteenth of the pairs is visible. The call takes less than half the time of all pairs,
/// forward and backward. Measured: a sixth and less.
#[test]
fn skipped_tiles_take_no_time() {
    crate::harness::in_turn!();
    let gpu = &full().gpu;
    // Enough work for every processor of a GPU.
    let (heads, form) = if is_software() { (2, Target::Software) } else { (64, Target::Gpu) };
    let config = Config::new(heads, 64).kernel_options(KernelOptions::fixed().target(form));
    let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
    let x = gpu.upload(&vec![0.01f32; heads * TOKENS * 64]).expect("a buffer");
    let ids = gpu.upload(&(0..TOKENS as u32).map(|n| n / SEEN as u32).collect::<Vec<_>>()).expect("numbers");
    let padding =
        gpu.upload(&(0..TOKENS).map(|n| u8::from(n >= TOKENS - SEEN)).collect::<Vec<_>>()).expect("padding");
    let bias = |n| if n < SEEN { 0.5 } else { f32::NEG_INFINITY };
    let bias = gpu.upload(&(0..TOKENS).map(bias).collect::<Vec<f32>>()).expect("a bias");
    let outputs = [(); 5].map(|()| gpu.buffer(4 * heads * TOKENS * 64).expect("a buffer"));
    let [out, lse, d_q, d_k, d_v] = outputs.each_ref();
    let view = |buffer, dim| TensorView::new(buffer, DType::F32, [1, heads, TOKENS, dim]);
    let of_keys = |buffer, dtype| TensorView::new(buffer, dtype, [1, 1, 1, TOKENS]);
    let documents = Mask::none()
        .documents(TensorView::new(&ids, DType::U32, [1, 1, TOKENS, 1]), of_keys(&ids, DType::U32));
    let starts = gpu.upload(&(0..=16).map(|n| n * SEEN as u32).collect::<Vec<_>>()).expect("starts");
    let starts = TensorView::new(&starts, DType::U32, [1, 1, 1, 17]);
    let masks: [(&str, DeviceMask); 5] = [
        ("no mask", Mask::none()),
        ("packed", Mask::none().packed(starts, starts)),
        ("documents", documents),
        ("key_padding_mask", Mask::none().key_padding_mask(of_keys(&padding, DType::Bool))),
        ("bias", Mask::none().bias(of_keys(&bias, DType::F32))),
    ];
    let x = view(&x, 64);
    for backward in [false, true] {
        let times = least_times(masks.map(|(_, mask)| {
            let forward = Forward::new(x, x, x, view(out, 64)).lse(view(lse, 1)).mask(mask);
            let gradients = Backward::new(forward, x);
            let gradients = gradients.d_q(view(d_q, 64)).d_k(view(d_k, 64)).d_v(view(d_v, 64));
            let size = if backward {
                attention.backward_scratch_size(&gradients).expect("a size")
            } else {
                attention.scratch_size(&forward).expect("a size")
            };
            let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
            let attention = &attention;
            Box::new(move || {
                gpu.submit(|encoder| match backward {
                    true => attention.backward(encoder, &gradients, &mut scratch),
                    false => attention.forward(encoder, &forward, &mut scratch),
                })
                .expect("a call");
                gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an idle device");
            }) as Box<dyn FnMut() + '_>
        }));
        // Documents compare numbers, which packed sequences need not. Measured: 1.3 forward, 1.0
        // backward.
        let of_packed = times[2].as_secs_f64() / times[1].as_secs_f64();
        assert!(of_packed < 2.0, "documents, backward {backward}: {:?} of {:?}", times[2], times[1]);
        for ((name, _), time) in masks.iter().zip(times) {
            let ratio = time.as_secs_f64() / times[0].as_secs_f64();
            say(&format!("{name}, backward {backward}: {time:.1?}, {ratio:.2} of no mask"));
            assert!(
                ratio < 0.5 || *name == "no mask",
                "{name}, backward {backward}: {time:?} of {:?}",
                times[0]
            );
        }
    }
    let map = gpu.buffer(4 * (TOKENS / 64).pow(2)).expect("a map");
    let blocks = Blocks::new(TensorView::new(&map, DType::U32, [1, 1, TOKENS / 64, TOKENS / 64]), [64, 64]);
    let mut scratch = Scratch::new(
        gpu.device(),
        attention.scratch_size(&Forward::new(x, x, x, view(out, 64))).expect("a size"),
    )
    .expect("scratch");
    let idle = || gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an idle device");
    let [dense, of_map] = least_times([
        Box::new(|| {
            gpu.submit(|e| attention.forward(e, &Forward::new(x, x, x, view(out, 64)), &mut scratch))
                .expect("a call");
            idle();
        }),
        Box::new(|| {
            gpu.submit(|e| attention.classify(e, &documents, [1, TOKENS, TOKENS], &blocks)).expect("a map");
            idle();
        }),
    ]);
    let ratio = of_map.as_secs_f64() / dense.as_secs_f64();
    say(&format!("classify: {of_map:.1?}, {ratio:.2} of no mask"));
    assert!(ratio < 0.5, "classify: {of_map:?} of {dense:?}");
}
