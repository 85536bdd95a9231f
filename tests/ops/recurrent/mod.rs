//! Recurrent attention: vectors, shapes, states, gradients, and what the forms have in common.

mod errors;
mod states;

use wgpu_attention::recurrent::Decay;
use wgpu_attention::reference::compare::compare;
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, Shape};

use crate::harness::device::full;
use crate::harness::operator_setup::setups;
use crate::harness::recurrent::{GRADIENTS, RecurrentCase};
use crate::harness::{FORMS, Layout, OperatorSetup, Report, Vector, rest};

pub const FAMILY: &str = "delta";
pub const NAMES: &[&str] = &[
    "delta_gated",
    "delta_gated_decode",
    "delta_gated_f16",
    "delta_gated_l200_d64",
    "delta_gated_l2_grouped",
    "delta_gated_packed",
    "delta_gated_packed_chunks",
    "delta_gated_states",
    "delta_gated_strong",
    "delta_gla",
    "delta_kda",
    "delta_kda_l130_d32",
    "delta_plain",
    "delta_plain_negative",
    "delta_retnet",
    "delta_ssd_grouped",
];

fn plain(form: Target) -> OperatorSetup {
    OperatorSetup::plain(full(), form)
}

/// A shape of value heads and heads of queries and keys.
fn shape([batch, value_heads, heads, length, head_dim, value_dim]: [usize; 6]) -> Shape {
    Shape { batch, heads: value_heads, kv_heads: heads, q_len: length, kv_len: length, head_dim, value_dim }
}

fn from_vector(vector: &Vector) -> RecurrentCase {
    let [batch, heads, length, head_dim] = vector.shape4("q");
    let [_, value_heads, _, value_dim] = vector.shape4("v");
    let decays = match vector.attrs["decay"].as_str() {
        Some("none") => Decay::None,
        Some("channel") => Decay::PerChannel,
        _ => Decay::PerHead,
    };
    let delta = vector.attrs["delta"].as_bool().expect("a rule");
    let sizes = shape([batch, value_heads, heads, length, head_dim, value_dim]);
    let mut case = RecurrentCase::random(&vector.name, sizes, decays, delta);
    let given = |tensor: &str| if vector.has(tensor) { vector.f32(tensor) } else { Vec::new() };
    (case.q, case.k, case.v) = (vector.f32("q"), vector.f32("k"), vector.f32("v"));
    (case.decay, case.beta, case.initial) = (given("g"), given("beta"), given("initial_state"));
    (case.d_out, case.d_last) = (given("dout"), given("dfinal_state"));
    case.unit_eps =
        vector.attrs["l2norm"].as_bool().expect("a flag").then(|| vector.number("l2norm_eps")).flatten();
    case.scale = vector.number("scale");
    if vector.has("cu_seqlens") {
        case.starts = Some(vector.integers("cu_seqlens").into_iter().map(|n| n as u32).collect());
    }
    case
}

const D_NAMES: [&str; 6] = ["dq", "dk", "dv", "dg", "dbeta", "dinitial_state"];

#[test]
fn results_match_vectors() {
    let mut report = Report::new("recurrent attention, vectors");
    for (n, name) in NAMES.iter().enumerate() {
        let vector = Vector::load(FAMILY, name);
        let case = from_vector(&vector);
        let against = |tensor: &str, got: &[f64]| {
            let (want, tolerance) = vector.expected(tensor).expect("in the vector");
            compare(got, &want, tolerance).map_err(|e| format!("{tensor}, against the vector: {e}"))
        };
        let reference = case.reference::<f64>();
        against("out", &reference.out).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
        against("final_state", &reference.last).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
        let backward = !case.d_out.is_empty();
        if backward {
            let gradients = case.gradients::<f64>();
            for (tensor, got) in D_NAMES.into_iter().zip(&gradients).filter(|(t, _)| vector.has(t)) {
                against(tensor, got).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
            }
        }
        let dtype = if vector.is_f16("q") { DType::F16 } else { DType::F32 };
        for (m, form) in FORMS.into_iter().enumerate() {
            let setup = OperatorSetup { dtype, ..plain(form) };
            // The first vectors have all rules.
            if n % 2 != m && !rest(&format!("{name}, {setup}")) {
                continue;
            }
            let judged = case.forward(&setup).and_then(|ran| {
                against("out", &ran.out)?;
                against("final_state", &ran.last)?;
                if !backward {
                    return Ok(ran.ratio);
                }
                let (ratio, gradients) = case.backward(&setup)?;
                for (tensor, got) in D_NAMES.into_iter().zip(&gradients).filter(|(t, _)| vector.has(t)) {
                    against(tensor, got)?;
                }
                Ok(ran.ratio.max(ratio))
            });
            report.record(name, &setup, judged);
        }
        for setup in setups(name, n) {
            let case = case.stored(setup.dtype, setup.gradient);
            let judged = case.forward(&setup).and_then(|ran| {
                if backward { Ok(ran.ratio.max(case.backward(&setup)?.0)) } else { Ok(ran.ratio) }
            });
            report.record(name, &setup, judged);
        }
    }
    report.finish();
    assert_eq!(GRADIENTS.len(), D_NAMES.len());
}

/// Some devices read a subnormal `eps` as 0, and `0 · ∞` is NaN.
#[test]
fn subnormal_eps_keeps_zero_rows() {
    let mut report = Report::new("recurrent attention, a subnormal eps");
    for length in [1, 20] {
        let sizes = shape([1, 2, 1, length, 4, 5]);
        let case = RecurrentCase::random(format!("{length} zero rows"), sizes, Decay::PerHead, true);
        let case = case.with(|c| {
            c.unit_eps = Some(1e-45);
            c.q.fill(0.0);
            c.k.fill(0.0);
        });
        for form in FORMS {
            report.record(&case.name, &plain(form), case.forward(&plain(form)).map(|ran| ran.ratio));
        }
    }
    report.finish();
}

/// The rules, and sizes around tiles and chunks.
const RULES: [(Decay, bool); 6] = [
    (Decay::PerHead, true),
    (Decay::PerChannel, true),
    (Decay::PerHead, false),
    (Decay::PerChannel, false),
    (Decay::None, true),
    (Decay::None, false),
];
const SIZES: [[usize; 6]; 6] = [
    [1, 2, 1, 17, 1, 3],
    [2, 4, 2, 65, 12, 20],
    [1, 2, 1, 64, 64, 33],
    [1, 3, 3, 131, 7, 5],
    [2, 2, 1, 33, 40, 130],
    [1, 2, 2, 200, 17, 64],
];

#[test]
fn results_match_reference() {
    let mut report = Report::new("recurrent attention, shapes");
    for (n, sizes) in SIZES.into_iter().enumerate() {
        for (m, (decay, delta)) in RULES.into_iter().enumerate() {
            let name = format!("{sizes:?}, {decay:?}, delta {delta}");
            let case = RecurrentCase::random(&name, shape(sizes), decay, delta);
            let case = if (n + m) % 2 == 0 { case.with_states() } else { case };
            let always = n == m;
            for setup in setups(&name, n + m).into_iter().filter(|_| always || rest(&name)) {
                let case = case.stored(setup.dtype, setup.gradient);
                let judged = case.forward(&setup).and_then(|ran| Ok(ran.ratio.max(case.backward(&setup)?.0)));
                report.record(&name, &setup, judged);
            }
        }
    }
    report.finish();
}

/// A case with states, for tests of options.
fn gated(name: &str, sizes: [usize; 6]) -> RecurrentCase {
    RecurrentCase::random(name, shape(sizes), Decay::PerHead, true).with_states()
}

#[test]
fn steps_equal_one_call() {
    let mut report = Report::new("recurrent attention, steps");
    for (n, (decay, delta)) in RULES.into_iter().enumerate() {
        let name = format!("steps, {decay:?}, delta {delta}");
        let case = RecurrentCase::random(&name, shape([2, 4, 2, 120, 12, 20]), decay, delta);
        let case = case.with(|c| c.d_out.clear()).with_states();
        for (m, form) in FORMS.into_iter().enumerate() {
            if n % 2 != m && !rest(&name) {
                continue;
            }
            let steps: [&[usize]; 2] = [&[70, 1, 16, 3, 30], &[1, 17, 2, 64, 36]];
            for (dtype, layout, steps) in
                [(DType::F32, Layout::Window(5), steps[m]), (DType::BF16, Layout::Window(8), steps[1 - m])]
            {
                let setup = OperatorSetup { dtype, layout, ..plain(form) };
                let case = case.stored(dtype, DType::F32);
                report.record(&name, &setup, case.in_steps(&setup, steps).map(|ran| ran.ratio));
            }
        }
    }
    report.finish();
}

#[test]
fn sequences_are_apart() {
    let mut report = Report::new("recurrent attention, packed sequences and lengths");
    let sizes = [1, 2, 1, 150, 12, 20];
    let packed = |starts: &[u32]| {
        let starts = starts.to_vec();
        RecurrentCase::random(format!("packed {starts:?}"), shape(sizes), Decay::PerHead, true)
            .with(|c| c.starts = Some(starts))
            .with_states()
    };
    let starts: [&[u32]; 4] =
        [&[0, 0, 65, 65, 66, 150], &[3, 140], &[20, 10, 400, 400], &[0, 64, 128, 128, 128]];
    let mut cases: Vec<RecurrentCase> = starts.into_iter().map(packed).collect();
    for lengths in [[0, 70, 200], [64, 1, 65]] {
        let sizes = [3, 2, 1, 70, 12, 20];
        let name = format!("lengths {lengths:?}");
        let case = RecurrentCase::random(name, shape(sizes), Decay::PerChannel, true);
        cases.push(case.with(|c| c.lengths = Some(lengths.to_vec())).with_states());
    }
    let few = RecurrentCase::random("few tokens", shape([3, 2, 1, 5, 12, 20]), Decay::PerHead, true);
    cases.push(few.with(|c| c.lengths = Some(vec![0, 2, 9])).with_states());
    for (n, case) in cases.into_iter().enumerate() {
        for (m, form) in FORMS.into_iter().enumerate() {
            if n % 2 != m && !rest(&case.name) {
                continue;
            }
            let setup = OperatorSetup { layout: Layout::Window(6), ..plain(form) };
            let judged = case.forward(&setup).and_then(|ran| Ok(ran.ratio.max(case.backward(&setup)?.0)));
            report.record(&case.name, &setup, judged);
        }
    }
    report.finish();
}

/// Decays that forget everything at once, or nothing, and rates of 0 and 2.
#[test]
fn hostile_decays_are_safe() {
    let mut report = Report::new("recurrent attention, hostile decays");
    for (decay, delta) in [(Decay::PerHead, true), (Decay::PerChannel, true), (Decay::PerChannel, false)] {
        type Numbers = fn(usize) -> f32;
        let decays: [(&str, Numbers); 5] = [
            ("-10⁴ in all", |n| -100.0 * (n % 5) as f32),
            ("minus infinity", |n| if n % 7 == 3 { f32::NEG_INFINITY } else { -0.1 }),
            ("strong", |n| -6.0 - (n % 5) as f32),
            ("nothing", |_| 0.0),
            ("weak after strong", |n| if n % 50 < 3 { -30.0 } else { -1e-3 }),
        ];
        for (n, (what, of)) in decays.into_iter().enumerate() {
            let name = format!("{what}, {decay:?}, delta {delta}");
            let case = RecurrentCase::random(&name, shape([1, 2, 1, 100, 12, 20]), decay, delta);
            let case = case.with_states().with(|c| {
                let channels = c.decay.len() / 200;
                c.decay.iter_mut().enumerate().for_each(|(n, x)| *x = of(n / channels));
                c.beta.iter_mut().enumerate().for_each(|(n, b)| *b = [0.0, 2.0, 0.7][n % 3]);
            });
            let form = FORMS[n % 2];
            let judged =
                case.forward(&plain(form)).and_then(|ran| Ok(ran.ratio.max(case.backward(&plain(form))?.0)));
            report.record(&name, &plain(form), judged);
        }
    }
    report.finish();
}

#[test]
fn twenty_runs_are_equal() {
    let case = gated("twenty runs", [1, 4, 2, 150, 20, 12]);
    for form in FORMS {
        let first = (case.forward(&plain(form)).expect("a run"), case.backward(&plain(form)).expect("a run"));
        for _ in 1..20 {
            let again =
                (case.forward(&plain(form)).expect("a run"), case.backward(&plain(form)).expect("a run"));
            assert_eq!((&first.0.out, &first.0.last, &first.1.1), (&again.0.out, &again.0.last, &again.1.1));
        }
    }
}

/// Heads and sequences that need several spans, and several groups.
#[test]
fn spans_and_groups_match_reference() {
    let mut report = Report::new("recurrent attention, spans and groups");
    let cases = [
        // Three spans: the backward pass computes the first two again.
        gated("spans", [1, 64, 32, 2200, 16, 16]),
        gated("groups of batch entries", [700, 4, 2, 20, 32, 16]),
        gated("few tokens in groups", [700, 4, 2, 3, 64, 64]),
    ];
    for case in cases {
        let setup = plain(Target::Software);
        let judged = case.forward(&setup).and_then(|ran| Ok(ran.ratio.max(case.backward(&setup)?.0)));
        report.record(&case.name, &setup, judged);
    }
    report.finish();
}

/// The quadratic form with a masked matrix of decays, for the rules without a delta.
#[test]
fn reference_equals_quadratic_form() {
    for decay in [Decay::None, Decay::PerHead, Decay::PerChannel] {
        let sizes = [1, 2, 1, 40, 6, 5];
        let case = RecurrentCase::random(format!("quadratic {decay:?}"), shape(sizes), decay, false);
        let got = case.reference::<f64>().out;
        let [_, heads, _, length, dim, width] = sizes;
        let channels = if decay == Decay::PerChannel { dim } else { 1 };
        let log = |h: usize, t: usize, f: usize| match decay {
            Decay::None => 0.0,
            _ => f64::from(case.decay[(h * length + t) * channels + f % channels]),
        };
        for h in 0..heads {
            for t in 0..length {
                for c in 0..width {
                    let mut want = 0.0;
                    for s in 0..=t {
                        let weight: f64 = (0..dim)
                            .map(|f| {
                                let between: f64 = (s + 1..=t).map(|r| log(h, r, f)).sum();
                                let (q, k) = (case.q[t * dim + f], case.k[s * dim + f]);
                                f64::from(q) * f64::from(k) * between.exp()
                            })
                            .sum();
                        want += weight * f64::from(case.v[(h * length + s) * width + c]);
                    }
                    want /= (dim as f64).sqrt();
                    let at = (h * length + t) * width + c;
                    assert!((got[at] - want).abs() < 1e-12, "{decay:?}, element {at}");
                }
            }
        }
    }
}

/// Returns the inputs of a case that have gradients, in the order of the gradients.
fn inputs(case: &mut RecurrentCase) -> [&mut Vec<f32>; 6] {
    let RecurrentCase { q, k, v, decay, beta, initial, .. } = case;
    [q, k, v, decay, beta, initial]
}

#[test]
fn reference_gradients_match_differences() {
    for (decay, delta) in RULES {
        let name = format!("differences {decay:?} {delta}");
        let case = RecurrentCase::random(&name, shape([1, 2, 1, 9, 4, 3]), decay, delta).with_states();
        let loss = |case: &RecurrentCase| {
            let got = case.reference::<f64>();
            let dot = |a: &[f64], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * f64::from(*b)).sum::<f64>();
            dot(&got.out, &case.d_out) + dot(&got.last, &case.d_last)
        };
        let gradients = case.gradients::<f64>();
        for (n, gradient) in gradients.iter().enumerate() {
            for at in (0..gradient.len()).step_by(5) {
                // Steps that f32 holds exactly.
                let step = 2f32.powi(-9);
                let moved = |by: f32| {
                    let mut case = case.clone();
                    let x = &mut inputs(&mut case)[n][at];
                    let before = *x;
                    *x += by;
                    let by = f64::from(*x) - f64::from(before);
                    (loss(&case), by)
                };
                let ((up, plus), (down, minus)) = (moved(step), moved(-step));
                let slope = (up - down) / (plus - minus);
                let error = (slope - gradient[at]).abs();
                assert!(error < 1e-4 * slope.abs().max(1.0), "{name}: {} {at}: {error}", GRADIENTS[n]);
            }
        }
    }
}
