//! Distance biases and attention sinks. Their definition checks the reference, which checks every
//! path and target.

use wgpu_attention::reference::compare::{Tolerance, compare};
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{Alignment, DType, Shape};

use crate::harness::meaning::{dense, follows};
use crate::harness::{Case, FORMS, HostData, Layout, Report, Rules, Setup, Weights, defaults, full};
use crate::laws::numbers::{everywhere, expect};
use crate::ops::mask::masks::{LENGTHS, check, shape};

/// Multiples of an eighth, of both signs, so that sums of them are exact.
fn eighths([b, h, _, n]: [usize; 4]) -> f32 {
    ((b * 7 + h * 5 + n * 3) % 17) as f32 / 8.0 - 1.0
}

#[test]
fn distance_terms_match_meaning() {
    let mut report = Report::new("biases");
    for lengths in LENGTHS {
        let shape = shape(lengths);
        let [b, h, i, j] = shape.weights();
        let mut all: Vec<(String, Rules)> = Vec::new();
        for heads in [[1, 1], [1, h], [b, h]] {
            let [b, h] = heads;
            for symmetric in [false, true] {
                let slopes = Some(HostData::of([b, h, 1, 1], eighths));
                let name = format!("alibi {heads:?}, symmetric {symmetric}");
                all.push((name, Rules { slopes, symmetric, ..Default::default() }));
            }
            // Tables for the query's own position, for few distances, and for more than there are.
            for distances in [1, 7, 301] {
                let relative = Some(HostData::of([b, h, 1, distances], eighths));
                let name = format!("{distances} distances {heads:?}");
                all.push((name, Rules { relative, ..Default::default() }));
            }
        }
        let together = Rules {
            slopes: Some(HostData::of([1, h, 1, 1], eighths)),
            relative: Some(HostData::of([b, 1, 1, 5], eighths)),
            bias: Some(HostData::of([1, 1, i, j], |[.., i, j]| if i == j { f32::NEG_INFINITY } else { 0.5 })),
            window: Some([30, 12]),
            ..Default::default()
        };
        all.push(("together".into(), together));
        for (name, rules) in all {
            for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
                for causal in [false, true] {
                    let name = format!("{name}, {alignment:?}, causal {causal}, {lengths:?}");
                    let rules = Rules { alignment, causal, ..rules.clone() };
                    let case = Case::random(name, shape).with(|c| c.rules = rules);
                    follows(&case);
                    check(&mut report, &case);
                }
            }
        }
    }
    report.finish();
}

/// Terms in f16 or bf16, added to problems of any type. Other tests use f32 terms.
#[test]
fn added_terms_may_be_narrow() {
    crate::harness::in_turn!();
    let mut report = Report::new("biases in f16 and bf16");
    let shape = shape((21, 35));
    let bias =
        Rules { bias: Some(HostData::of([1, 4, 21, 35], eighths)), causal: true, ..Default::default() };
    let together = Rules {
        slopes: Some(HostData::of([1, 4, 1, 1], eighths)),
        relative: Some(HostData::of([2, 1, 1, 5], eighths)),
        sinks: Some(HostData::of([1, 4, 1, 1], eighths)),
        ..bias.clone()
    };
    for (n, rules) in [bias, together].into_iter().enumerate() {
        let case = Case::random(format!("added in f16 and bf16, {n}"), shape).with(|c| c.rules = rules);
        for form in FORMS {
            for (profile, path, dtype, bias) in [
                (full(), Algorithm::Staged, DType::F32, DType::F16),
                (full(), Algorithm::Fused, [DType::F16, DType::F32][n], DType::F16),
                (defaults(), [Algorithm::Staged, Algorithm::Fused][n], DType::F32, DType::BF16),
                (defaults(), [Algorithm::Fused, Algorithm::Staged][n], DType::BF16, DType::BF16),
            ] {
                let layout = Layout::Window(n as u64 | 1);
                let (lse, weights) = (true, Weights::None);
                let setup = Setup { profile, form, path, dtype, bias, layout, lse, weights };
                report.check_in(&case, &setup, &mut Default::default());
            }
        }
    }
    report.finish();
}

/// Returns `case` with one more key of value 0, which every query sees with the sink as its score.
fn sink_as_a_key(case: &Case) -> Case {
    let Shape { kv_len, head_dim, value_dim, .. } = case.shape;
    let shape = Shape { kv_len: kv_len + 1, ..case.shape };
    let longer = |data: &[f32], dim: usize| -> Vec<f32> {
        data.chunks_exact(kv_len * dim).flat_map(|head| [head, &vec![0.0; dim]].concat()).collect()
    };
    let pairs = dense(&case.rules, &case.shape);
    let (keep, bias, sinks) =
        (pairs.attn_mask.expect("keep"), pairs.bias.expect("bias"), pairs.sinks.expect("sinks"));
    let rules = Rules {
        attn_mask: Some(HostData::of(shape.weights(), |index| keep.host().at(index).unwrap_or(true))),
        bias: Some(HostData::of(shape.weights(), |[b, h, i, j]| {
            bias.host().at([b, h, i, j]).or(sinks.host().at([b, h, 0, 0])).expect("one of both")
        })),
        ..Default::default()
    };
    case.clone().with(|c| {
        (c.shape, c.rules) = (shape, rules);
        (c.k, c.v) = (longer(&case.k, head_dim), longer(&case.v, value_dim));
    })
}

fn sinks(value: impl Fn([usize; 4]) -> f32) -> Rules {
    Rules { sinks: Some(HostData::of([1, 4, 1, 1], value)), ..Default::default() }
}

/// Sinks near, above, far above and far below the scores, and none in some heads.
fn with_sinks() -> Vec<(&'static str, Rules)> {
    let beside = sinks(eighths);
    let keep = |[_, h, i, j]: [usize; 4]| i % 3 != h % 3 && (i + j) % 4 != 0;
    let map = |[_, h, i, j]: [usize; 4]| (h + i + 2 * j) as u32 % 3;
    vec![
        ("beside", beside.clone()),
        ("by batch", Rules { sinks: Some(HostData::of([2, 4, 1, 1], eighths)), ..beside.clone() }),
        ("one", Rules { sinks: Some(HostData::new(vec![1.5], [1; 4])), ..beside.clone() }),
        ("above", sinks(|_| 30.0)),
        ("far above", sinks(|_| 10_000.0)),
        ("far below", sinks(|_| -10_000.0)),
        ("none", sinks(|[_, h, ..]| if h % 2 == 0 { f32::NEG_INFINITY } else { 0.5 })),
        ("causal", Rules { causal: true, ..beside.clone() }),
        (
            "rows without a key",
            Rules { attn_mask: Some(HostData::of([1, 4, 21, 6], keep)), ..beside.clone() },
        ),
        ("blocks", Rules { blocks: Some((HostData::of([1, 4, 3, 2], map), [8, 4])), ..beside.clone() }),
        ("alibi", Rules { slopes: Some(HostData::of([1, 4, 1, 1], eighths)), ..beside }),
    ]
}

#[test]
fn a_sink_is_a_key_without_a_value() {
    let mut report = Report::new("sinks");
    let shape = shape((21, 6));
    for (name, rules) in with_sinks() {
        for softcap in [None, Some(2.0)] {
            let name = format!("sink {name}, softcap {softcap:?}");
            let case = Case::random(name, shape).with(|c| (c.rules, c.softcap) = (rules.clone(), softcap));
            follows(&case);
            let (own, key) = (case.reference::<f64>(), sink_as_a_key(&case).reference::<f64>());
            // Both sums have the same terms in another order.
            let same = |what: &str, a: &[f64], b: &[f64]| {
                compare(a, b, Tolerance { absolute: 1e-11 })
                    .unwrap_or_else(|e| panic!("{}, {what}: {e}", case.name));
            };
            same("out", &own.out, &key.out);
            same("lse", &own.lse, &key.lse);
            let (own, key) = (own.weights.expect("asked for"), key.weights.expect("asked for"));
            let weights: Vec<f64> = key.chunks_exact(7).flat_map(|row| row[..6].to_vec()).collect();
            same("weights", &own, &weights);
            check(&mut report, &case);
        }
    }
    report.finish();
}

#[test]
fn row_without_keys_has_sink_lse() {
    let case = Case::random("sink alone", shape((21, 6))).with(|c| {
        c.rules = sinks(|[_, h, ..]| h as f32 - 1.5);
        c.rules.attn_mask = Some(HostData::of([1, 1, 21, 1], |[_, _, i, _]| i % 3 != 1));
    });
    everywhere(&case, |got, _| {
        let alone = |row: usize| row % 21 % 3 == 1;
        for (row, out) in got.out.chunks_exact(6).enumerate() {
            expect(out.iter().all(|x| *x == 0.0) == alone(row), format!("row {row}: {out:?}"))?;
        }
        for (row, lse) in got.lse.iter().flatten().enumerate() {
            let sink = (row / 21 % 4) as f64 - 1.5;
            expect((*lse == sink) == alone(row), format!("lse of row {row}: {lse}"))?;
        }
        Ok(())
    });
}

#[test]
fn a_sink_of_minus_infinity_changes_nothing() {
    let plain = Case::random("no sink", shape((21, 6))).with(|c| c.rules.causal = true);
    let none = plain.clone().with(|c| c.rules.sinks = sinks(|_| f32::NEG_INFINITY).sinks);
    everywhere(&none, |got, setup| {
        let want = crate::harness::run(&plain.stored(setup.dtype, setup.bias), setup)?;
        expect(want.bits() == got.bits(), "other bits than without a sink")
    });
}

/// All scores are 0 and the sink is 0, so it has the weight of one of seven keys.
#[test]
fn sink_takes_equal_share() {
    let case = Case::random("equal shares", shape((21, 6))).with(|c| {
        c.q.fill(0.0);
        c.v.fill(7.0);
        c.rules = sinks(|_| 0.0);
    });
    everywhere(&case, |got, _| {
        let near = |got: &[f64], want: f64| got.iter().all(|x| (x - want).abs() < 1e-3);
        expect(near(&got.out, 6.0), "out is not six sevenths")?;
        expect(got.lse.iter().all(|lse| near(lse, 7f64.ln())), "lse is not ln 7")?;
        expect(got.weights.iter().all(|w| near(w, 1.0 / 7.0)), "a weight is not a seventh")
    });
}
