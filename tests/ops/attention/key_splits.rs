//! Keys of plain tensors, split among workgroups. At every number of splits the result equals that
//! of the unsplit call.

use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{DType, Shape};

use crate::harness::report::judge_outputs;
use crate::harness::run::run_with;
use crate::harness::{
    Case, DropoutData, FORMS, HostData, Layout, Report, Setup, Weights, defaults, due, full, rest,
};

/// The last number exceeds the number of keys.
const SPLITS: [usize; 5] = [1, 2, 3, 7, 128];

fn setup(n: usize, form: wgpu_attention::tuning::Target, dtype: DType) -> Setup {
    let profile = if n.is_multiple_of(2) || dtype == DType::F16 { full() } else { defaults() };
    Setup {
        dtype,
        layout: if n.is_multiple_of(2) { Layout::Window(2 * n as u64 + 1) } else { Layout::Dense },
        lse: !n.is_multiple_of(5),
        ..Setup::plain(profile, form, Algorithm::Fused)
    }
}

/// Checks `case` on both targets at every number of splits.
fn holds(report: &mut Report, case: &Case, dtype: DType, splits: &[usize]) {
    holds_where(report, case, dtype, splits, |_, _| true);
}

/// Like `holds`, where `always` selects usual runs by the indices of target and splits. Shares run
/// the others.
fn holds_where(
    report: &mut Report,
    case: &Case,
    dtype: DType,
    splits: &[usize],
    always: impl Fn(usize, usize) -> bool,
) {
    let stored = case.stored(dtype, DType::F32);
    let truth = stored.truth(dtype, Weights::None);
    for (f, form) in FORMS.into_iter().enumerate() {
        for (s, n) in splits.iter().enumerate() {
            let key = format!("{}, {form:?}", case.name);
            if !(always(f, s) && due(&key) || rest(&key)) {
                continue;
            }
            let setup = setup(*n, form, dtype);
            let judged = run_with(&stored, &setup, |kernel_options| kernel_options.splits(*n))
                .and_then(|got| judge_outputs(&case.expected, case.shape, &truth, &got, false));
            report.record(&format!("{}, {n} splits", case.name), &setup, judged);
        }
    }
}

fn shape(q_len: usize, kv_len: usize) -> Shape {
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len, head_dim: 12, value_dim: 21 }
}

#[test]
fn lengths() {
    crate::harness::in_turn!();
    let mut report = Report::new("splits, lengths");
    for kv_len in [1, 64, 65, 700] {
        for q_len in [1, 3, 35] {
            let case = Case::random(format!("splits {q_len} {kv_len}"), shape(q_len, kv_len));
            holds(&mut report, &case, DType::F32, &SPLITS);
            if q_len != 35 {
                let causal = case.with(|c| c.rules.causal = true);
                holds(&mut report, &causal, [DType::F32, DType::F16, DType::BF16][kv_len % 3], &[2, 7]);
            }
        }
    }
    report.finish();
}

/// Masks that limit the range of keys, which is then split. Also masks that test every pair, and
/// rows without a key.
#[test]
fn masks() {
    crate::harness::in_turn!();
    let mut report = Report::new("splits, masks");
    for (n, kv_len) in [64, 65, 700].into_iter().enumerate() {
        let shape = shape(3, kv_len);
        let [b, h, i, j] = shape.weights();
        let plain = Case::random(format!("splits, masks, {kv_len}"), shape);
        let named = |what: &str, change: &dyn Fn(&mut Case)| {
            plain.clone().with(|c| {
                c.name += &format!(", {what}");
                change(c);
            })
        };
        let logits = HostData::new(vec![0.5, -0.25, 3.0, f32::NEG_INFINITY], [1, h, 1, 1]);
        let cases = [
            named("window", &|c| (c.rules.causal, c.rules.window) = (true, Some([kv_len / 3, 0]))),
            named("lengths", &|c| {
                c.rules.lengths = Some(HostData::new(vec![0, kv_len as u32 / 2], [b, 1, 1, 1]))
            }),
            named("keep", &|c| {
                let keep =
                    |[b, h, i, j]: [usize; 4]| i != 1 && (b + h + i + j) % 3 != 0 && (i == 0 || j > 60);
                c.rules.attn_mask = Some(HostData::of([b, h, i, j], keep));
            }),
            named("logits", &|c| (c.rules.causal, c.rules.sinks) = (true, Some(logits.clone()))),
            named("logits and dead rows", &|c| {
                c.rules.sinks = Some(logits.clone());
                c.rules.lengths = Some(HostData::new(vec![0, 1, 64], [1, 1, i, 1]));
            }),
            named("bias and softcap", &|c| {
                let bias =
                    |[.., j]: [usize; 4]| if j % 9 == 4 { f32::NEG_INFINITY } else { (j % 5) as f32 - 2.0 };
                (c.rules.bias, c.softcap) = (Some(HostData::of([1, 1, 1, j], bias)), Some(3.0));
            }),
            named("steep", &|c| {
                // The largest score alternates between splits.
                let steep = |[.., i, j]: [usize; 4]| 60.0 * ((i + 2 * j) as f32 / kv_len as f32).sin();
                c.rules.bias = Some(HostData::of([1, 1, i, j], steep));
            }),
            named("blocks", &|c| {
                let map = HostData::of([1, 1, 1, j.div_ceil(32)], |[.., d]| [2, 0, 1][d % 3]);
                let keep = HostData::of([1, 1, 1, j], |[.., j]| j % 2 == 0);
                (c.rules.blocks, c.rules.attn_mask) = (Some((map, [64, 32])), Some(keep));
            }),
            named("dropout", &|c| c.dropout = Some(DropoutData::Seeded { p: 0.3, seed: 9 })),
            named("given dropout", &|c| {
                let keep = HostData::of(shape.weights(), |[b, h, i, j]| (b + 2 * h + 3 * i + 5 * j) % 7 < 4);
                (c.dropout, c.rules.causal) = (Some(DropoutData::Given { p: 0.4, keep }), true);
            }),
        ];
        for (m, case) in cases.iter().enumerate() {
            let dtype = match (n, m % 3) {
                (1, 0) => DType::F16,
                (0, 1) => DType::BF16,
                _ => DType::F32,
            };
            // An odd number of splits uses another device and layout than an even one.
            let splits = [[2, 7], [3, 128]][(n + m) % 2];
            holds_where(&mut report, case, dtype, &splits, |f, s| (m + f + s) % 2 == 0);
        }
    }
    report.finish();
}

/// A window far shorter than the keys before it, with the plan's splits. The plan counts only the
/// keys in the window.
#[test]
fn a_short_window_over_a_long_past() {
    crate::harness::in_turn!();
    let mut report = Report::new("splits, a short window");
    for (q_len, window) in [(1, 255), (3, 255), (1, 1500)] {
        let shape =
            Shape { batch: 1, heads: 2, kv_heads: 1, q_len, kv_len: 65536, head_dim: 8, value_dim: 8 };
        let case = Case::random(format!("one in {window}, {q_len} queries"), shape)
            .with(|c| (c.rules.causal, c.rules.window) = (true, Some([window, 0])));
        let truth = case.truth(DType::F32, Weights::None);
        for form in FORMS {
            let setup = Setup { lse: true, ..setup(1, form, DType::F32) };
            let judged = run_with(&case, &setup, |config| config)
                .and_then(|got| judge_outputs(&case.expected, shape, &truth, &got, false));
            report.record(&case.name, &setup, judged);
        }
    }
    report.finish();
}

/// More channels than a workgroup computes, one key head for many heads, and work split into
/// dispatches.
#[test]
fn slices_groups_and_dispatches() {
    crate::harness::in_turn!();
    let mut report = Report::new("splits, slices");
    for (heads, kv_heads, q_len, head_dim, value_dim) in
        [(2, 1, 2, 9, 300), (32, 1, 1, 64, 64), (3, 3, 70, 5, 70)]
    {
        let shape = Shape { batch: 1, heads, kv_heads, q_len, kv_len: 300, head_dim, value_dim };
        let case = Case::random(format!("splits, {shape:?}"), shape).with(|c| c.rules.causal = true);
        holds(&mut report, &case, DType::F32, &[2, 5]);
        for form in FORMS {
            let setup = setup(3, form, DType::F32);
            let whole = run_with(&case, &setup, |kernel_options| kernel_options.splits(5)).expect("a run");
            for limit in [1, 100_000] {
                let pieces =
                    run_with(&case, &setup, |kernel_options| kernel_options.splits(5).work_limit(limit));
                let same = pieces.and_then(|got| {
                    if got.bits() == whole.bits() {
                        Ok(0.0)
                    } else {
                        Err(format!("other bits, limit {limit}"))
                    }
                });
                report.record(&case.name, &setup, same);
            }
        }
    }
    report.finish();
}

/// NaN in hidden keys does not leak into any split's sums.
#[test]
fn bad_numbers_stay_hidden() {
    crate::harness::in_turn!();
    let mut report = Report::new("splits, hidden bad numbers");
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for hides in ["window", "keep", "lengths"] {
            // Keys 130 to 140 are hidden, at the edge of splits of 64 and inside others.
            let shape = Shape { kv_heads: 2, ..shape(3, 330) };
            let case = Case::random(format!("splits, {bad} behind {hides}"), shape).with(|c| {
                let (first, end) = match hides {
                    "keep" => {
                        c.rules.attn_mask =
                            Some(HostData::of([1, 1, 1, 330], |[.., j]| !(130..141).contains(&j)));
                        (130, 141)
                    }
                    "lengths" => {
                        c.rules.lengths = Some(HostData::new(vec![130], [1; 4]));
                        (130, 330)
                    }
                    _ => {
                        (c.rules.causal, c.rules.window) = (true, Some([186, 0]));
                        (0, 141)
                    }
                };
                let hidden = |n: usize, dim: usize| (first..end).contains(&(n / dim % 330));
                c.k.iter_mut().enumerate().filter(|(n, _)| hidden(*n, 12)).for_each(|(_, x)| *x = bad);
                c.v.iter_mut().enumerate().filter(|(n, _)| hidden(*n, 21)).for_each(|(_, x)| *x = bad);
            });
            // The expected result has no bad numbers, because hidden keys have weight 0.
            let clean = case.clone().with(|c| {
                for x in c.k.iter_mut().chain(&mut c.v) {
                    *x = if x.is_finite() { *x } else { 0.0 };
                }
            });
            let truth = clean.truth(DType::F32, Weights::None);
            for (f, form) in FORMS.into_iter().enumerate() {
                for n in [2, 5] {
                    if n % 2 != f && !rest(&format!("{}, {form:?}", case.name)) {
                        continue;
                    }
                    let setup = setup(n, form, DType::F32);
                    let judged = run_with(&case, &Setup { lse: true, ..setup }, |kernel_options| {
                        kernel_options.splits(n)
                    })
                    .and_then(|got| judge_outputs(&case.expected, shape, &truth, &got, false));
                    report.record(&format!("{}, {n} splits", case.name), &setup, judged);
                }
            }
        }
    }
    report.finish();
}

/// A bad number of one key of one head, in the middle of a split, shows.
#[test]
fn bad_numbers_show() {
    let mut report = Report::new("splits, bad numbers");
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (side, what) in ["k", "v"].into_iter().enumerate() {
            let shape = shape(3, 330);
            let case = Case::random(format!("splits, {bad} in {what}"), shape).with(|c| {
                let at = (330 + 77) * [12, 21][side] + 3;
                [&mut c.k, &mut c.v][side][at] = bad;
            });
            let want = case.reference::<f64>();
            assert!(want.out.iter().any(|x| !x.is_finite()), "the case has no effect");
            for (f, form) in FORMS.into_iter().enumerate() {
                for n in [2, 5] {
                    let always = n % 2 != f && bad == f32::INFINITY;
                    if !(always || rest(&format!("{}, {form:?}", case.name))) {
                        continue;
                    }
                    let setup = Setup { lse: true, ..setup(n, form, DType::F32) };
                    let got = run_with(&case, &setup, |kernel_options| kernel_options.splits(n));
                    let shows = got.and_then(|got| {
                        let same = |got: &f64, want: &f64| {
                            if want.is_finite() { (got - want).abs() < 1e-4 } else { !got.is_finite() }
                        };
                        let lse = got.lse.expect("lse");
                        let rows = lse.iter().zip(&want.lse).chain(got.out.iter().zip(&want.out));
                        match rows.enumerate().find(|(_, (got, want))| !same(got, want)) {
                            Some((n, (got, want))) => Err(format!("element {n} is {got}, not {want}")),
                            None => Ok(0.0),
                        }
                    });
                    report.record(&format!("{}, {n} splits", case.name), &setup, shows);
                }
            }
        }
    }
    report.finish();
}
