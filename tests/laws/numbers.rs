//! Hand-made cases at the edges of arithmetic. The exact answers are written down here.

use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};
use wgpu_attention::reference::{Options, attention, widen};
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{Alignment, DType, HostTensor, Mask, Shape};

use crate::harness::report::judge_outputs;
use crate::harness::run::{Got, run_with, setups};
use crate::harness::{Case, DropoutData, FORMS, HostData, Report, Setup, Weights, defaults, full, run};

/// Runs `case` in every setup and compares it with the reference. `check` checks the result
/// further.
pub fn everywhere(case: &Case, check: impl Fn(&Got, &Setup) -> Result<(), String>) {
    let mut report = Report::new("numbers");
    report.check(case);
    exactly(case, &mut report, check);
    report.finish();
}

/// Runs only `check`, for cases that no tolerance fits.
fn exactly(case: &Case, report: &mut Report, check: impl Fn(&Got, &Setup) -> Result<(), String>) {
    for setup in setups(case) {
        let stored = case.stored(setup.dtype, setup.bias);
        let outcome = run(&stored, &setup).and_then(|got| check(&got, &setup)).map(|()| 0.0);
        report.record(&case.name, &setup, outcome);
    }
}

pub fn expect(holds: bool, what: impl std::fmt::Display) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what.to_string()) }
}

/// Checks that exactly the `dead` rows of `[.., q_len, width]` are exactly `value`.
fn rows_are(x: &[f64], width: usize, value: f64, dead: impl Fn(usize) -> bool) -> Result<(), String> {
    for (row, values) in x.chunks_exact(width).enumerate() {
        let all = values.iter().all(|x| x.to_bits() == value.to_bits());
        expect(all == dead(row), format!("row {row} of width {width}: {values:?}, dead: {}", dead(row)))?;
    }
    Ok(())
}

/// Checks that exactly the dead rows have output 0, lse −∞ and weights 0.
fn dead_rows(got: &Got, case: &Case, dead: impl Fn(usize) -> bool + Copy) -> Result<(), String> {
    rows_are(&got.out, case.shape.value_dim, 0.0, dead)?;
    got.lse.as_ref().map_or(Ok(()), |lse| rows_are(lse, 1, f64::NEG_INFINITY, dead))?;
    let per_head = got.weights.as_ref().filter(|w| w.len() == case.shape.weights().iter().product::<usize>());
    per_head.map_or(Ok(()), |w| rows_are(w, case.shape.kv_len, 0.0, dead))
}

const SHAPE: Shape = Shape::new(2, 3, 9, 8);

#[test]
fn rows_hidden_by_keep_are_exactly_zero() {
    let case = Case::random("dead rows by keep", SHAPE);
    let keep = HostData::of([1, 1, 9, 9], |[_, _, i, j]| i % 4 != 1 && j <= i);
    let case = case.with(|c| c.rules.attn_mask = Some(keep));
    everywhere(&case, |got, _| dead_rows(got, &case, |row| row % 9 % 4 == 1));
}

#[test]
fn rows_hidden_by_lengths_are_exactly_zero() {
    let lengths = HostData::of([2, 1, 9, 1], |[b, _, i, _]| if (b + i) % 3 == 0 { 0 } else { 1 + i as u32 });
    let case = Case::random("dead rows by lengths", SHAPE).with(|c| c.rules.lengths = Some(lengths));
    everywhere(&case, |got, _| dead_rows(got, &case, |row| (row / 27 + row % 9) % 3 == 0));
}

#[test]
fn rows_hidden_by_bias_are_zero() {
    let bias =
        HostData::of(
            [1, 3, 9, 9],
            |[_, h, i, j]| {
                if i == 2 + h || (i + j) % 3 == 0 { f32::NEG_INFINITY } else { 0.5 }
            },
        );
    let case = Case::random("dead rows by bias", SHAPE).with(|c| c.rules.bias = Some(bias));
    everywhere(&case, |got, _| dead_rows(got, &case, |row| row % 9 == 2 + row / 9 % 3));
}

#[test]
fn extra_queries_have_no_key() {
    // Bottom-right alignment: query i sees keys up to i − 6.
    let shape = Shape { q_len: 9, kv_len: 3, ..SHAPE };
    let case = Case::random("causal, fewer keys", shape).with(|c| c.rules.causal = true);
    everywhere(&case, |got, _| dead_rows(got, &case, |row| row % 9 < 6));
}

#[test]
fn everything_hidden_is_all_zero() {
    let hidden =
        [("keep", HostData::new(vec![false], [1; 4])), ("keys", HostData::new(vec![false; 9], [1, 1, 1, 9]))];
    for (name, part) in hidden {
        let case = Case::random(format!("all hidden by {name}"), SHAPE).with(|c| match name {
            "keep" => c.rules.attn_mask = Some(part),
            _ => c.rules.key_padding_mask = Some(part),
        });
        everywhere(&case, |got, _| dead_rows(got, &case, |_| true));
    }
    let none = HostData::new(vec![0; 2], [2, 1, 1, 1]);
    let case = Case::random("all hidden by lengths", SHAPE).with(|c| c.rules.lengths = Some(none));
    everywhere(&case, |got, _| dead_rows(got, &case, |_| true));
}

#[test]
fn lengths_beyond_the_keys_are_all_keys() {
    let case = Case::random("lengths beyond", SHAPE);
    let lengths = HostData::new(vec![9, 10, 1 << 20, i32::MAX as u32, 1 << 31, u32::MAX], [2, 3, 1, 1]);
    let long = case.clone().with(|c| c.rules.lengths = Some(lengths));
    let mut report = Report::new("numbers");
    exactly(&long, &mut report, |got, setup| {
        let plain = run(&case.stored(setup.dtype, setup.bias), setup)?;
        expect(plain.bits() == got.bits(), "a length past the end changes the result")
    });
    report.check(&long);
    report.finish();
}

#[test]
fn single_key_gives_its_value() {
    let case = Case::random("one key", Shape { kv_len: 1, q_len: 5, ..SHAPE });
    everywhere(&case, |got, setup| {
        let v = case.stored(setup.dtype, setup.bias).v;
        let rows = got.out.chunks_exact(5 * 8).zip(v.chunks_exact(8));
        let same = rows.flat_map(|(head, v)| head.chunks_exact(8).zip(std::iter::repeat(v)));
        expect(
            same.into_iter().all(|(row, v)| row.iter().zip(v).all(|(o, v)| *o == f64::from(*v))),
            "not the value",
        )?;
        expect(got.weights.iter().flatten().all(|w| *w == 1.0), "the weight is not 1")
    });
}

#[test]
fn scores_of_ten_thousand_are_exact() {
    // The score q·k is ±10⁴ or 0 exactly. The gaps are so large that every row picks its largest
    // scores.
    let shape = Shape { q_len: 3, kv_len: 8, head_dim: 4, value_dim: 4, ..SHAPE };
    let mut case = Case::random("large scores", shape);
    case.scale = Some(1.0);
    for (n, q) in case.q.iter_mut().enumerate() {
        *q = if n % 4 == 0 { [100.0, -100.0, 100.0][n / 4 % 3] } else { 0.0 };
    }
    for (n, k) in case.k.iter_mut().enumerate() {
        *k = if n % 4 == 0 { [100.0, 0.0, -100.0, 100.0][n / 4 % 4] } else { 0.0 };
    }
    for (n, v) in case.v.iter_mut().enumerate() {
        *v = (n % 16) as f32;
    }
    everywhere(&case, |got, _| {
        let finite = got.out.iter().all(|x| x.is_finite());
        let lse = got.lse.iter().flatten().all(|x| (x.abs() - 10_000.0).abs() < 2.0);
        // Keys 0, 3, 4, 7 tie for 100, keys 2 and 6 for −100.
        let quarter = got.weights.iter().flatten().all(|w| *w == 0.0 || *w == 0.25 || *w == 0.5);
        expect(finite && lse && (quarter || got.weights.as_ref().is_none()), "not exact")
    });
}

#[test]
fn a_score_far_below_the_others_has_weight_zero() {
    let bias = HostData::of([1, 1, 1, 9], |[.., j]| if j == 4 { 0.0 } else { -20_000.0 });
    let case = Case::random("far below", SHAPE).with(|c| c.rules.bias = Some(bias));
    everywhere(&case, |got, _| {
        let one = |(n, w): (usize, &f64)| *w == if n % 9 == 4 { 1.0 } else { 0.0 };
        expect(got.weights.iter().flatten().enumerate().all(one), "not one key")
    });
}

/// Masks of PyTorch use `finfo.min`. It hides a key if other keys are visible. Alone it acts like
/// any other score.
#[test]
fn lowest_bias_hides_unless_alone() {
    crate::harness::in_turn!();
    let shape = Shape { kv_len: 70, ..Shape::new(2, 3, 40, 8) };
    // Every third query has scores of about 100, after the lowest ones or, in the second head,
    // before them. Kernels that compute queries together must not let it change the others.
    let lowest = |[_, h, i, j]: [usize; 4]| i % 3 != 1 || (j < 37) != (h == 1);
    let case = Case::random("lowest bias", shape).with(|c| {
        c.rules.bias = Some(HostData::of([1, 3, 40, 70], |at| if lowest(at) { f32::MIN } else { 100.0 }));
    });
    everywhere(&case, |got, _| {
        let alone = |row: usize| row % 40 % 3 != 1;
        got.lse.as_ref().map_or(Ok(()), |lse| rows_are(lse, 1, f64::from(f32::MIN), alone))?;
        let per_head = got.weights.as_ref().filter(|w| w.len() == 2 * 3 * 40 * 70);
        for (row, weights) in per_head.iter().flat_map(|w| w.chunks_exact(70)).enumerate() {
            for (j, weight) in weights.iter().enumerate() {
                let hidden = !alone(row) && lowest([0, row / 40 % 3, 1, j]);
                expect((*weight == 0.0) == hidden, format!("row {row}, key {j}: weight {weight}"))?;
            }
        }
        Ok(())
    });
}

/// Two masks of `f32::MIN` hide like one of −∞, in the reference too. One alone is a finite score.
#[test]
fn sums_below_the_lowest_float_hide() {
    let shape = Shape { kv_len: 41, ..Shape::new(2, 3, 41, 8) };
    // Queries 0, 4, … have the bias at every key, the others at the first 20. The table hides the
    // distances that are not behind the query.
    let hidden = |[i, j]: [usize; 2]| (i % 4 == 0 || j < 20) && j >= i;
    let low = |[_, _, i, j]: [usize; 4]| if i % 4 == 0 || j < 20 { f32::MIN } else { 0.0 };
    let table = HostData::of([1, 3, 1, 81], |[.., n]| if n < 40 { 0.0 } else { f32::MIN });
    let case = Case::random("two lowest biases", shape).with(|c| {
        c.rules.bias = Some(HostData::of([1, 1, 41, 41], low));
        c.rules.relative = Some(table.clone());
        c.rules.alignment = Alignment::TopLeft;
    });
    // Query 0 sees nothing, because both masks cover all its keys. The test compares with the
    // reference directly, because tolerances would not show it.
    let dead = |row: usize| row.is_multiple_of(41);
    let options = Options::new().weights(true).mask(
        Mask::none()
            .bias(HostTensor::new(&[f32::MIN], [1; 4]))
            .relative(HostTensor::new(&[f32::MIN], [1; 4])),
    );
    let ones = vec![1.0; shape.q().iter().product()];
    let want = attention::<f64>(&ones, &ones, &ones, shape, &options).expect("a truth");
    assert!(want.out.iter().chain(want.weights.iter().flatten()).all(|x| *x == 0.0));
    assert!(want.lse.iter().all(|lse| *lse == f64::NEG_INFINITY));
    everywhere(&case, |got, _| {
        dead_rows(got, &case, dead)?;
        let per_head = got.weights.as_ref().filter(|w| w.len() == 2 * 3 * 41 * 41);
        for (n, weight) in per_head.into_iter().flatten().enumerate().filter(|(_, w)| **w != 0.0) {
            let at = [n / 41 % 41, n % 41];
            expect(!hidden(at), format!("query and key {at:?}: weight {weight}"))?;
        }
        Ok(())
    });
    // A slope times a distance, and two terms that are finite alone.
    let causal = Case::random("a steep slope", shape).with(|c| {
        c.rules.causal = true;
        c.rules.slopes = Some(HostData::new(vec![2e38; 3], [1, 3, 1, 1]));
        c.rules.bias = Some(HostData::of([1, 1, 41, 41], |[.., i, j]| if i == j { f32::MIN } else { -2e38 }));
    });
    // A query's own key has f32::MIN, the key before it −4e38, earlier keys less.
    everywhere(&causal, |got, _| {
        let per_head = got.weights.as_ref().filter(|w| w.len() == 2 * 3 * 41 * 41);
        for (n, weight) in per_head.into_iter().flatten().enumerate() {
            let own = n / 41 % 41 == n % 41;
            expect(*weight == f64::from(u8::from(own)), format!("element {n}: weight {weight}"))?;
        }
        Ok(())
    });
}

#[test]
fn single_lowest_bias_gives_its_value() {
    let shape = Shape { kv_len: 1, ..Shape::new(2, 3, 9, 8) };
    let case = Case::random("lowest bias, one key", shape)
        .with(|c| c.rules.bias = Some(HostData::new(vec![f32::MIN], [1; 4])));
    everywhere(&case, |got, setup| {
        let v = crate::harness::stored(&case.v, setup.dtype);
        for (row, out) in got.out.chunks_exact(8).enumerate() {
            let value = v[row / 9 * 8..][..8].iter().map(|v| f64::from(*v));
            expect(value.eq(out.iter().copied()), format!("row {row}: {out:?}"))?;
        }
        expect(got.lse.iter().flatten().all(|lse| *lse == f64::from(f32::MIN)), "lse is not the bias")
    });
}

#[test]
fn softcap_bounds_huge_scores() {
    for cap in [0.25, 2.0, 50.0] {
        let mut case = Case::random(format!("softcap {cap} of huge scores"), SHAPE);
        case.q.iter_mut().for_each(|q| *q *= 1000.0);
        case.softcap = Some(cap);
        everywhere(&case, |got, _| expect(got.out.iter().all(|x| x.is_finite()), "not finite"));
        // In the range where tanh is almost the identity, the cap would multiply its error.
        let mut case = Case::random(format!("softcap {cap} of small scores"), SHAPE);
        case.q.iter_mut().for_each(|q| *q *= 0.01);
        case.softcap = Some(cap);
        everywhere(&case, |_, _| Ok(()));
    }
}

/// Checks that the rows that show a NaN are exactly the rows that see one.
fn nan_rows(name: &str, change: impl FnOnce(&mut Case), dead: impl Fn([usize; 3]) -> bool) {
    let case = Case::random(name, SHAPE).with(change);
    let mut report = Report::new("numbers");
    exactly(&case, &mut report, |got, _| {
        let row_of = |row: usize| [row / 27, row / 9 % 3, row % 9];
        for (row, out) in got.out.chunks_exact(8).enumerate() {
            let nan = out.iter().all(|x| x.is_nan());
            let clean = out.iter().all(|x| x.is_finite());
            expect(if dead(row_of(row)) { nan } else { clean }, format!("row {:?}: {out:?}", row_of(row)))?;
        }
        for (row, lse) in got.lse.iter().flatten().enumerate() {
            expect(lse.is_nan() == dead(row_of(row)), format!("lse of row {:?}: {lse}", row_of(row)))?;
        }
        // In a row with NaN, the weights of hidden keys are unspecified.
        let weights = got.weights.iter().filter(|w| w.len() == 2 * 3 * 9 * 9);
        for (row, weights) in weights.flat_map(|w| w.chunks_exact(9)).enumerate() {
            let shows = weights.iter().any(|w| w.is_nan());
            expect(shows == dead(row_of(row)), format!("weights of row {:?}: {weights:?}", row_of(row)))?;
        }
        Ok(())
    });
    report.finish();
}

#[test]
fn nan_in_a_query_stays_in_its_row() {
    let poison = |case: &mut Case| case.q[((3 + 1) * 9 + 4) * 8 + 2] = f32::NAN;
    nan_rows("nan in a query", poison, |row| row == [1, 1, 4]);
    let capped = |case: &mut Case| {
        poison(case);
        case.softcap = Some(5.0);
    };
    nan_rows("nan in a query, softcap", capped, |row| row == [1, 1, 4]);
}

#[test]
fn nan_in_key_reaches_visible_rows() {
    let poison = |case: &mut Case| case.k[(2 * 9 + 5) * 8] = f32::NAN;
    nan_rows("nan in a key", poison, |[b, h, _]| [b, h] == [0, 2]);
    let causal = |case: &mut Case| {
        poison(case);
        case.rules.causal = true;
    };
    nan_rows("nan in a key, causal", causal, |[b, h, i]| [b, h] == [0, 2] && i >= 5);
    let hidden = |case: &mut Case| {
        poison(case);
        case.rules.attn_mask = Some(HostData::of([1, 1, 9, 9], |[_, _, i, j]| i % 2 == 0 || j != 5));
    };
    nan_rows("nan in a key, keep", hidden, |[b, h, i]| [b, h] == [0, 2] && i % 2 == 0);
    let padding = |case: &mut Case| {
        poison(case);
        case.rules.key_padding_mask = Some(HostData::of([1, 1, 1, 9], |[.., j]| j != 5));
    };
    nan_rows("nan in a key, keys", padding, |_| false);
}

#[test]
fn nan_in_a_bias_shows_in_its_row() {
    let poison = |case: &mut Case| {
        let nan_at = |[_, _, i, j]: [usize; 4]| if [i, j] == [3, 1] { f32::NAN } else { 0.0 };
        case.rules.bias = Some(HostData::of([1, 1, 9, 9], nan_at));
    };
    nan_rows("nan in a bias", poison, |[_, _, i]| i == 3);
}

#[test]
fn nan_in_a_slope_shows_in_its_head() {
    let slope = |case: &mut Case| {
        case.rules.slopes = Some(HostData::new(vec![0.5, f32::NAN, 0.25], [1, 3, 1, 1]));
    };
    nan_rows("nan in a slope", slope, |[_, h, _]| h == 1);
}

#[test]
fn relative_bias_nan_reaches_its_rows() {
    // The distance of three keys after the query.
    let nan_at = |[.., n]: [usize; 4]| if n == 4 + 3 { f32::NAN } else { 0.25 };
    let table = |case: &mut Case| case.rules.relative = Some(HostData::of([1, 1, 1, 9], nan_at));
    nan_rows("nan in a table", table, |[_, _, i]| i + 3 < 9);
}

#[test]
fn nan_in_a_sink_shows_in_its_head() {
    let case = Case::random("nan in a sink", SHAPE).with(|c| {
        c.rules.sinks = Some(HostData::new(vec![0.5, 2.0, f32::NAN], [1, 3, 1, 1]));
    });
    let mut report = Report::new("numbers");
    exactly(&case, &mut report, |got, _| {
        for (row, out) in got.out.chunks_exact(8).enumerate() {
            let dead = row / 9 % 3 == 2;
            let right = out.iter().all(|x| if dead { x.is_nan() } else { x.is_finite() });
            expect(right, format!("row {row}: {out:?}"))?;
        }
        let mut lse = got.lse.iter().flatten().enumerate();
        expect(lse.all(|(row, lse)| lse.is_nan() == (row / 9 % 3 == 2)), "lse")
    });
    report.finish();
}

#[test]
fn rows_past_length_are_never_seen() {
    crate::harness::in_turn!();
    let case = |nan: bool| {
        let lens = [4, 9];
        let mut case = Case::random("nan past the length", SHAPE);
        case.rules.lengths = Some(HostData::new(lens.map(|n| n as u32).to_vec(), [2, 1, 1, 1]));
        for (n, (k, v)) in case.k.iter_mut().zip(&mut case.v).enumerate() {
            if nan && n / 8 % 9 >= lens[n / 8 / 27] {
                (*k, *v) = (f32::NAN, f32::NAN);
            }
        }
        case
    };
    let (clean, poisoned) = (case(false), case(true));
    let mut report = Report::new("numbers");
    exactly(&poisoned, &mut report, |got, setup| {
        let want = run(&clean.stored(setup.dtype, setup.bias), setup)?;
        expect(want.bits() == got.bits(), "memory past the length changes the result")
    });
    report.finish();
}

#[test]
fn nan_in_a_value_shows_in_its_channel() {
    let mut case = Case::random("nan in a value", SHAPE);
    case.v[3] = f32::NAN; // batch 0, head 0, key 0, channel 3
    let mut report = Report::new("numbers");
    exactly(&case, &mut report, |got, _| {
        let seen = |(n, x): (usize, &f64)| x.is_nan() == (n < 72 && n % 8 == 3);
        expect(got.out.iter().enumerate().all(seen), "NaN elsewhere")?;
        expect(got.lse.iter().flatten().all(|x| x.is_finite()), "a value changed lse")
    });
    report.finish();
}

#[test]
fn hidden_values_contribute_nothing() {
    type Hide = fn(&mut Case);
    let hidden: [(&str, Hide); 5] = [
        ("nothing", |_| ()),
        ("causal", |c| c.rules.causal = true),
        ("keep", |c| {
            c.rules.attn_mask = Some(HostData::of([1, 3, 9, 9], |[_, h, i, j]| (h + i) % 2 == 0 || j != 5))
        }),
        ("keys", |c| {
            c.rules.key_padding_mask = Some(HostData::of([2, 1, 1, 9], |[b, .., j]| b == 0 || j != 5))
        }),
        ("lengths", |c| c.rules.lengths = Some(HostData::of([1, 1, 9, 1], |[_, _, i, _]| i as u32))),
    ];
    let mut report = Report::new("numbers");
    for (name, hide) in hidden {
        for (what, value) in [("NaN", f32::NAN), ("infinity", f32::INFINITY)] {
            let case = Case::random(format!("value {what} hidden by {name}"), SHAPE).with(|c| {
                // Key 5, one channel of every head.
                c.v.iter_mut().skip(5 * 8 + 3).step_by(9 * 8).for_each(|v| *v = value);
                hide(c);
            });
            // The reference has NaN and infinity where queries see them. The harness permits them
            // only there.
            report.check(&case);
        }
    }
    report.finish();
}

#[test]
fn two_runs_give_the_same_bits() {
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 33, kv_len: 67, head_dim: 20, value_dim: 12 };
    let mut case = Case::random("same bits", shape);
    (case.rules.causal, case.rules.alignment) = (true, Alignment::BottomRight);
    case.dropout = Some(DropoutData::Seeded { p: 0.2, seed: 7 });
    let mut report = Report::new("numbers");
    exactly(&case, &mut report, |got, setup| {
        let again = run(&case.stored(setup.dtype, setup.bias), setup)?;
        expect(again.bits() == got.bits(), "another run, other bits")
    });
    report.finish();
}

#[test]
fn optional_outputs_do_not_change_the_result() {
    let case = Case::random("outputs", Shape { q_len: 17, kv_len: 30, ..SHAPE });
    for setup in setups(&case).into_iter().filter(|s| s.dtype == DType::F32) {
        let with = |lse, weights| run(&case, &Setup { lse, weights, ..setup }).expect("a run").out;
        let plain = with(false, Weights::None);
        assert_eq!(plain, with(true, Weights::None), "{setup}");
        if setup.path == Algorithm::Staged {
            assert_eq!(plain, with(false, Weights::Mean(DType::F32)), "{setup}");
        }
    }
}

#[test]
fn dropout_keeps_the_expected_share_and_scales_it() {
    crate::harness::in_turn!();
    let shape = Shape::new(1, 4, 64, 4);
    let case = Case::random("dropout share", shape).with(|c| {
        c.dropout = Some(DropoutData::Seeded { p: 0.25, seed: 0x0123_4567_89ab_cdef });
        c.q.fill(0.0);
    });
    everywhere(&case, |got, _| {
        let Some(weights) = got.weights.as_ref().filter(|w| w.len() == 4 * 64 * 64) else { return Ok(()) };
        let kept = weights.iter().filter(|w| **w > 0.0).count() as f64 / weights.len() as f64;
        // 16384 draws: five standard deviations are 0.017.
        expect((kept - 0.75).abs() < 0.017, format!("{kept} kept"))
    });
}

/// A mean of values is at most the largest of them. This is true on every path, on both targets,
/// with any key splits.
#[test]
fn values_near_range_ends_match() {
    crate::harness::in_turn!();
    let mut report = Report::new("values near the ends of the range");
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let sizes = [
        (f32, 2e38, 2),
        (f32, 4e36, 100),
        (f32, 3e38, 300),
        (f32, 1e-30, 300),
        (bf16, 3e38, 300),
        (bf16, 1e-30, 100),
        (f16, 6e4, 300),
        (f16, 1e-4, 100),
    ];
    for (dtype, size, kv_len) in sizes {
        for q_len in [1, 40] {
            let shape = Shape { kv_heads: 1, kv_len, ..Shape::new(1, 2, q_len, 8) };
            let case = Case::random(format!("values of {size:e}, {q_len} by {kv_len}"), shape).with(|c| {
                c.rules.causal = q_len == 1;
                c.v.iter_mut().enumerate().for_each(|(n, v)| *v = size * (1.0 - (n % 5) as f32 * 0.2));
                // Scores that rise slowly. Weights are relative to a score that is 8 below.
                c.q.fill(0.5);
                let row = |n: usize| (n / shape.head_dim % kv_len) as f32 * 0.02;
                c.k.iter_mut().enumerate().for_each(|(n, k)| *k = row(n) + *k * 0.1);
            });
            let stored = case.stored(dtype, f32);
            let truth = stored.truth(dtype, Weights::None);
            for (path, form, splits) in [
                (Algorithm::Fused, FORMS[0], 1),
                (Algorithm::Fused, FORMS[1], 1),
                (Algorithm::Fused, FORMS[0], 3),
                (Algorithm::Fused, FORMS[1], 3),
                (Algorithm::Staged, FORMS[0], 1),
                (Algorithm::Staged, FORMS[1], 1),
            ] {
                let profile = if dtype == bf16 { defaults() } else { full() };
                let setup = Setup { dtype, ..Setup::plain(profile, form, path) };
                let judged = run_with(&stored, &setup, |kernel_options| kernel_options.splits(splits))
                    .and_then(|got| judge_outputs(&case.expected, case.shape, &truth, &got, false));
                report.record(&format!("{}, {splits} splits", case.name), &setup, judged);
            }
        }
    }
    report.finish();
}

/// A split sums at most 2¹³ keys, like the reference's blocks. So the mean of 2²⁰ equal values is
/// exact to a few roundings.
#[test]
fn means_of_many_equal_values_are_exact() {
    for (q_len, kv_len, value) in [(1, 1 << 20, 0.7f32), (33, 1 << 20, 0.1), (4, 1 << 16, 0.1)] {
        let shape = Shape { q_len, kv_len, ..Shape::new(1, 1, 1, 4) };
        let (q, k, v) = (vec![0.3; 4 * q_len], vec![0.2; 4 * kv_len], vec![value; 4 * kv_len]);
        let got = full().gpu.attention(&q, &k, &v, shape, &Options::new()).expect("a result");
        // The reference computes one row, which all queries share.
        let one = Shape { q_len: 1, ..shape };
        let naive = attention::<f32>(&q[..4], &k, &v, one, &Options::new()).expect("a result");
        let want = vec![f64::from(value); 4];
        let tolerance = Tolerance::from_naive(&widen(&naive.out), &want, f64::from(value), EPSILON_F32);
        assert!(tolerance.absolute < 3e-4 * f64::from(value), "{tolerance:?}");
        for row in got.out.chunks_exact(4) {
            let found = compare(row, &want, tolerance);
            found.unwrap_or_else(|e| panic!("{q_len} queries, {kv_len} keys of {value}: {e}"));
        }
    }
}
