//! The harness refuses wrong results, and accepts right ones.

use std::sync::OnceLock;

use wgpu_attention::cache::{CacheLayout, CacheStorage, ScaleGroup};
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{DType, Shape};

use crate::harness::cached::Sequence;
use crate::harness::report::judge_outputs;
use crate::harness::rest::Share;
use crate::harness::run::{Got, setups_where};
use crate::harness::{
    Ask, Bed, Case, Count, Data, FORMS, Image, Judged, Kind, Place, Rng, Rules, Setup, Values, Weights, full,
};
use crate::small;

/// Returns a problem with its right result, rounded to f32 from the exact one.
fn right() -> &'static (Case, crate::harness::case::Truth, Got) {
    static RIGHT: OnceLock<(Case, crate::harness::case::Truth, Got)> = OnceLock::new();
    RIGHT.get_or_init(|| {
        let case = Case::random("harness_fails", Shape::new(2, 2, 5, 4));
        let truth = case.truth(DType::F32, Weights::PerHead(DType::F32));
        let rounded = |x: &Judged| Some(x.want.iter().map(|x| f64::from(*x as f32)).collect::<Vec<f64>>());
        let got = Got {
            out: rounded(&truth.out).expect("out"),
            lse: rounded(&truth.lse),
            weights: truth.weights.as_ref().and_then(rounded),
        };
        (case, truth, got)
    })
}

/// Judges a result after `change`.
fn judged(change: impl FnOnce(&mut Got)) -> Result<f64, String> {
    let (case, truth, got) = right();
    let mut got = got.clone();
    change(&mut got);
    judge_outputs(&case.expected, case.shape, truth, &got, true)
}

#[track_caller]
fn objects(result: Result<f64, String>, words: &str) {
    let objection = result.expect_err("a wrong result passed");
    assert!(objection.contains(words), "{objection}");
}

#[test]
fn exact_result_in_f32_passes() {
    assert!(judged(|_| ()).expect("the right answer") < 1.0);
}

#[test]
fn swapped_elements_are_refused() {
    objects(judged(|got| got.out.swap(0, 1)), "out: element");
    objects(judged(|got| got.lse.as_mut().expect("lse").swap(2, 7)), "lse: element");
    objects(judged(|got| got.weights.as_mut().expect("weights").reverse()), "weights: element");
}

#[test]
fn another_calls_result_is_refused() {
    let other = Case::random("somebody else's", right().0.shape).reference::<f64>();
    objects(judged(|got| got.out = other.out), "out: element");
}

#[test]
fn nan_anywhere_is_refused() {
    for n in [0, 17, 79] {
        objects(judged(|got| got.out[n] = f64::NAN), "got NaN");
    }
    objects(judged(|got| got.out.fill(f64::NAN)), "got NaN");
    objects(judged(|got| got.lse.as_mut().expect("lse")[3] = f64::NAN), "got NaN");
}

#[test]
fn infinities_are_refused() {
    objects(judged(|got| got.out[5] = f64::INFINITY), "got inf");
    objects(judged(|got| got.lse.as_mut().expect("lse")[3] = f64::NEG_INFINITY), "got -inf");
}

#[test]
fn short_and_long_results_are_refused() {
    objects(judged(|got| got.out.truncate(79)), "79 elements, expected 80");
    objects(judged(|got| got.out.clear()), "0 elements");
    objects(judged(|got| got.lse.as_mut().expect("lse").push(0.0)), "21 elements");
}

#[test]
fn errors_past_tolerance_are_refused() {
    let truth = &right().1;
    let limit = truth.out.tolerance.absolute;
    for n in 0..truth.out.want.len() {
        let off = |by: f64| judged(|got| got.out[n] = truth.out.want[n] + by * limit);
        objects(off(1.001), "off by more than");
        objects(off(-1.001), "off by more than");
        assert!(off(0.999).is_ok() && off(-0.999).is_ok());
    }
    // The f32 arithmetic is accurate enough to show an error in the fifth digit.
    assert!(limit < 1e-5, "{limit}");
}

#[test]
fn a_missing_output_is_refused() {
    objects(judged(|got| got.weights = None), "weights: the truth is of another kind");
}

#[test]
fn infinite_tolerance_is_refused() {
    let judge = |naive: &[f64]| Judged::new(naive, vec![1.0, 2.0], 2.0).judge(&[1.0, 2.0]);
    assert!(judge(&[1.0, 2.0]).is_ok());
    objects(judge(&[1.0, f64::NAN]), "tests nothing");
    objects(judge(&[1.0, f64::INFINITY]), "tests nothing");
}

#[test]
fn vector_mismatch_alone_is_refused() {
    // The reference and the device agree, but the vector differs. All three must agree.
    let (case, truth, got) = right();
    let mut expected = case.expected.clone();
    let mut want = truth.out.want.clone();
    want[3] += 1e-3;
    expected.out = Some((want, truth.out.tolerance));
    objects(judge_outputs(&expected, case.shape, truth, got, true), "against the vector");
    assert!(judge_outputs(&expected, case.shape, truth, got, false).is_ok());
}

/// Places of outputs in these tests: with gaps between heads, rows and elements.
fn places() -> Vec<Place> {
    let shape = [2, 3, 4, 5];
    vec![
        Place::dense(shape),
        Place::blhd(shape),
        Place::lbhd(shape),
        Place::nested(shape, [0, 2, 1, 3], [3, 2, 1, 5], 1, 67),
        Place::nested(shape, [3, 1, 0, 2], [0, 4, 0, 1], 2, 9),
    ]
}

#[test]
fn written_output_is_collected() {
    for place in places() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let image = Image::output(dtype, &place);
            let mut after = image.clone();
            // Multiples of one half are exact in all float types.
            let values: Vec<f32> = (0..120).map(|n| n as f32 / 2.0).collect();
            after.write(Values::Floats(&values), &place);
            let got = image.collect(&after.bytes, &place).expect("nothing wrong");
            assert!(got.iter().zip(&values).all(|(g, v)| *g == f64::from(*v)) && got.len() == 120);
        }
    }
}

#[test]
fn stale_elements_are_refused() {
    for place in places() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let image = Image::output(dtype, &place);
            let mut after = image.clone();
            objects(image.collect(&after.bytes, &place).map(|_| 0.0), "never written");
            after.write(Values::Floats(&[1.0; 120]), &place);
            // The last element keeps its value from before the run.
            let last = place.indices().last().expect("120 elements") * dtype.bytes();
            after.bytes[last..][..dtype.bytes()].copy_from_slice(&image.bytes[last..][..dtype.bytes()]);
            objects(image.collect(&after.bytes, &place).map(|_| 0.0), "element 119 was never written");
        }
    }
}

#[test]
fn bytes_outside_window_are_guarded() {
    let mut rng = Rng::new(5);
    for place in places() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let image = Image::output(dtype, &place);
            let mut right = image.clone();
            right.write(Values::Floats(&[1.0; 120]), &place);
            let inside: Vec<usize> = place.indices().collect();
            let outside: Vec<usize> =
                (0..right.bytes.len()).filter(|n| !inside.contains(&(n / dtype.bytes()))).collect();
            assert!(outside.len() >= 64 * dtype.bytes(), "a guard band");
            for byte in outside {
                let mut after = right.bytes.clone();
                after[byte] ^= 1 << rng.below(8);
                objects(image.collect(&after, &place).map(|_| 0.0), "outside of the window was written");
            }
        }
    }
}

#[test]
fn a_short_read_back_is_refused() {
    let place = Place::dense([1, 1, 4, 5]);
    let image = Image::output(DType::F32, &place);
    let mut after = image.clone();
    after.write(Values::Floats(&[1.0; 20]), &place);
    let short = &after.bytes[..after.bytes.len() - 4];
    objects(image.collect(short, &place).map(|_| 0.0), "bytes came back");
}

#[test]
fn inputs_are_surrounded_by_nan() {
    for place in places() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let image = Image::input(Values::Floats(&[1.0; 120]), dtype, &place);
            let inside: Vec<usize> = place.indices().collect();
            for n in 0..place.len {
                let bytes = &image.bytes[n * dtype.bytes()..][..dtype.bytes()];
                let value = match dtype {
                    DType::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
                    DType::BF16 => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
                    _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
                };
                assert_eq!(value.is_nan(), !inside.contains(&n), "element {n} of {place:?}");
            }
        }
    }
}

type Change = fn(&mut Sequence, f32);

/// A cache's model with one wrong number, token or length is noticed.
#[test]
fn cache_differing_from_model_is_noticed() {
    let rules = Rules { causal: true, ..Default::default() };
    for (storage, data, step) in [
        (CacheStorage::F32, Data::Lossless, 1e-3),
        (CacheStorage::Q8(ScaleGroup::Of(32)), Data::Lossless, 1e-3),
        (CacheStorage::Q8(ScaleGroup::Row), Data::Random, 0.5),
        (CacheStorage::Q4(ScaleGroup::Row), Data::Lossless, 1e-2),
    ] {
        let kind = Kind { batch: 1, ..Kind::new(storage, CacheLayout::Ring { sink_tokens: 1 }, 6) };
        let mut bed = Bed::new(full(), kind, data, 3);
        bed.grow(&Count::All(5)).expect("room");
        let ask = Ask { rows: Some(1), ..Ask::new(Target::Software, &rules) };
        bed.ask(&ask).expect("the model is right");
        bed.check_sequence_table().expect("the model is right");
        let right = bed.sequences.clone();
        let wrong: [(&str, Change); 4] = [
            ("a value", |s, step| s.tokens[2][0].v[0] += step),
            ("a key", |s, step| s.tokens[2][0].k.iter_mut().for_each(|k| *k += 4.0 * step)),
            ("a token less", |s, _| s.tokens.truncate(4)),
            ("one overwritten", |s, _| s.high = 7),
        ];
        for (what, change) in wrong {
            change(&mut bed.sequences[0], step);
            assert!(bed.ask(&ask).is_err(), "{storage:?}, {data:?}: {what} was not noticed");
            bed.sequences = right.clone();
        }
        bed.sequences[0].refused += 1;
        assert!(bed.check_sequence_table().expect_err("a refusal").contains("refusals"));
        bed.sequences[0].refused -= 1;
        bed.sequences[0].tokens.pop();
        assert!(bed.check_sequence_table().expect_err("a token").contains("lengths"));
    }
}

#[test]
fn test_shares_cover_everything() {
    for text in ["", "0", "2", "all", "0/8", "9/8", "1/0", "-1/8", "3/8/2", "3/"] {
        assert!(Share::of(Some(text)).is_err_and(|e| e.contains("3/8")), "`{text}` is no share");
    }
    let names: Vec<_> = (0..800).map(|n| format!("case {n}")).collect();
    let count = |is_held: &dyn Fn(&str) -> bool| names.iter().filter(|name| is_held(name)).count();
    let [none, all] = [None, Some("1")].map(|text| Share::of(text).expect("it is one"));
    assert_eq!([none, all].map(|share| count(&|name| share.holds(name, false))), [0, 800]);
    assert_eq!([none, all].map(|share| count(&|name| share.holds_test(name))), [0, 800]);
    let usual = count(&|name| none.holds_usual(name));
    assert!((50..200).contains(&usual), "{usual}");
    for of in [1, 3, 8, 64, 512] {
        let shares: Vec<_> =
            (1..=of).map(|n| Share::of(Some(&format!("{n}/{of}"))).expect("a share")).collect();
        let rest: Vec<_> = shares.iter().map(|share| count(&|name| share.holds(name, false))).collect();
        assert_eq!(rest.iter().sum::<usize>(), 800, "{rest:?}");
        // Each share runs about a 32nd of the tests that take long. All shares that run one
        // test together run all its cases.
        let tests: Vec<_> =
            shares.iter().take(32).map(|share| count(&|name| share.holds_test(name))).collect();
        assert_eq!(tests.iter().sum::<usize>(), 800, "{tests:?}");
        for test in &names {
            let of_test: Vec<_> = shares.iter().filter(|share| share.holds_test(test)).collect();
            for piece in names.iter().take(40) {
                assert!(of_test.iter().any(|share| share.holds(piece, true)), "{piece} of {test}, {of}");
                assert!(of_test.iter().any(|share| share.holds_usual(piece)), "{piece} of {test}, {of}");
            }
        }
        assert!(names.iter().all(|name| shares.iter().any(|share| share.holds_usual(name))));
    }
}

/// With any rules, a case always runs on both targets and both paths in f32. At least one run
/// returns its weights.
#[test]
fn cases_cover_targets_and_paths() {
    for (name, rules) in small::single_masks() {
        let case = Case::random(name, Shape::new(1, 1, 2, 4)).with(|c| c.rules = rules);
        let setups = setups_where(&case, true);
        for (path, form) in
            [Algorithm::Staged, Algorithm::Fused].into_iter().flat_map(|p| FORMS.map(|f| (p, f)))
        {
            assert!(setups.iter().any(|s| s.path == path && s.form == form), "{name}: {path:?}, {form:?}");
        }
        let f32 = |s: &&Setup| s.dtype == DType::F32 && s.path == Algorithm::Fused;
        assert!(setups.iter().any(|s| f32(&s)), "{name}");
        assert!(setups.iter().any(|s| matches!(s.weights, Weights::PerHead(_))), "{name}");
    }
}
