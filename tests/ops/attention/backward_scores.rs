//! Gradients of biases, slopes, relative tables and sinks on a device, compared with the reference.

use wgpu_attention::reference::compare::compare;
use wgpu_attention::{Alignment, DType, Shape};

use crate::harness::backward::{BackwardSetup, run_backward_async, stored_problem};
use crate::harness::gradients::Problem;
use crate::harness::{
    Case, DropoutData, FORMS, HostData, Layout, Report, Rng, Rules, Vector, due, full, rest,
};
use crate::laws::property::{Draws, MaskDraw};
use crate::ops::attention::backward::{Draw, check_draws};
use crate::peers::sdpa;

const SHAPE: Shape =
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 19, kv_len: 37, head_dim: 12, value_dim: 8 };

/// The tensors that change scores, and their axes that may be as long as the problem's.
const ADDED: [(&str, [bool; 4]); 5] = [
    ("bias", [true, true, true, true]),
    ("slopes", [true, true, false, false]),
    ("symmetric slopes", [true, true, false, false]),
    ("relative", [true, true, false, false]),
    ("sinks", [true, true, false, false]),
];

fn normals(rng: &mut Rng, shape: [usize; 4]) -> Option<HostData<f32>> {
    Some(HostData::new(rng.normals(shape.iter().product()), shape))
}

/// Returns rules with one tensor, whose axes in `repeats` have length 1.
fn rules(of: &str, repeats: [bool; 4], rng: &mut Rng) -> Rules {
    rules_of(of, SHAPE, repeats, rng)
}

fn rules_of(of: &str, shape: Shape, repeats: [bool; 4], rng: &mut Rng) -> Rules {
    let [batch, heads, q_len, kv_len] = shape.weights();
    let to = |mut shape: [usize; 4]| {
        (0..4).filter(|axis| repeats[*axis]).for_each(|axis| shape[axis] = 1);
        shape
    };
    let per_head = to([batch, heads, 1, 1]);
    let mut rules = Rules::default();
    match of {
        "bias" => rules.bias = normals(rng, to([batch, heads, q_len, kv_len])),
        // Inner distances have one key per query, the outermost distances many.
        "relative" => rules.relative = normals(rng, [per_head[0], per_head[1], 1, 11]),
        "sinks" => rules.sinks = normals(rng, per_head),
        _ => {
            rules.slopes = normals(rng, per_head);
            rules.symmetric = of == "symmetric slopes";
        }
    }
    rules
}

/// Returns the setup for that gradient alone.
fn alone(of: &str, setup: BackwardSetup) -> BackwardSetup {
    let n = ["bias", "slopes", "relative", "sinks"]
        .iter()
        .position(|name| of.ends_with(name))
        .expect("one of four");
    BackwardSetup { wanted: [false; 3], added: std::array::from_fn(|m| m == n), ..setup }
}

/// Each tensor alone, in every shape that broadcasts to the problem's. The other options alternate.
#[test]
fn every_shape_of_every_tensor() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients of what scores are changed by");
    for (of, long) in ADDED {
        for bits in 0..16usize {
            let repeats = [0, 1, 2, 3].map(|axis| bits >> axis & 1 == 1);
            if (0..4).any(|axis| repeats[axis] && !long[axis]) {
                continue;
            }
            let name = format!("{of}, repeats {repeats:?}");
            let rng = &mut Rng::named(&name);
            // Every axis of every tensor is broadcast in one case and full in another.
            let few = bits == 0 || bits.count_ones() == 1 || repeats == long;
            if !(few && due(&name) || rest(&name)) {
                continue;
            }
            let case = Case::random(&name, SHAPE).with(|c| {
                c.rules = Rules { causal: rng.chance(0.5), ..rules(of, repeats, rng) };
                c.softcap = rng.chance(0.3).then_some(1.5);
                c.dropout = rng.chance(0.3).then_some(DropoutData::Seeded { p: 0.3, seed: 5 });
            });
            let problem = Problem::new(case, 0, rng.chance(0.7));
            let floats = [DType::F32, DType::F16, DType::BF16];
            let bias = rng.pick(&floats);
            let setup = BackwardSetup {
                dtype: rng.pick(&floats[..2]),
                bias,
                added_dtype: rng.pick(&[DType::F32, bias, bias]),
                layout: rng.pick(&[Layout::Dense, Layout::Window(rng.clone().word())]),
                accumulates: rng.chance(0.4),
                ..alone(of, BackwardSetup::plain(full(), FORMS[0]))
            };
            report.check_backward(&problem, &setup);
        }
    }
    report.finish();
}

/// A bias for each key or distance: sums over all queries.
#[test]
fn bias_of_each_key() {
    let mut report = Report::new("gradients of a bias of each key");
    for of in ["bias", "relative"] {
        let name = format!("{of} of each key");
        let rules = rules(of, [true, true, true, false], &mut Rng::named(&name));
        let case = Case::random(&name, SHAPE).with(|c| c.rules = Rules { causal: true, ..rules });
        let setup = alone(of, BackwardSetup::plain(full(), FORMS[0]));
        report.check_backward(&Problem::new(case, 0, true), &setup);
    }
    report.finish();
}

/// Enough queries that an element has several partial sums, more and fewer than the lanes of a
/// workgroup.
#[test]
fn parts_of_an_element() {
    crate::harness::in_turn!();
    let mut report = Report::new("parts of gradients of what scores are changed by");
    for (n, (of, long)) in ADDED.into_iter().enumerate() {
        for (q_len, kv_len) in [(701, 5), (530, 70)] {
            let name = format!("parts, {of}, {q_len} queries");
            let shape = Shape { q_len, kv_len, head_dim: 4, value_dim: 4, ..SHAPE };
            let rng = &mut Rng::named(&name);
            let case = Case::random(&name, shape).with(|c| c.rules = rules_of(of, shape, long, rng));
            let floats = [DType::F32, DType::F16, DType::BF16];
            let setup = BackwardSetup {
                bias: floats[n % 3],
                added_dtype: floats[n % 3],
                accumulates: kv_len == 70,
                ..alone(of, BackwardSetup::plain(full(), FORMS[0]))
            };
            report.check_backward(&Problem::new(case, 0, true), &setup);
        }
    }
    report.finish();
}

/// A pair in a full block has no bias, but has the other terms.
#[test]
fn full_blocks() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients and full blocks");
    for (of, _) in ADDED {
        for shape in [SHAPE.weights(), [1; 4]] {
            let name = format!("blocks, {of}, {shape:?}");
            if !due(&name) {
                continue;
            }
            let rng = &mut Rng::named(&name);
            let repeats = shape.map(|n| n == 1);
            let map = HostData::new((0..50).map(|_| rng.below(3) as u32).collect(), [2, 1, 5, 5]);
            let mut rules = rules(of, repeats, rng);
            rules.blocks = Some((map, [4, 8]));
            rules.attn_mask =
                Some(HostData::new(rng.bools(SHAPE.weights().iter().product(), 0.7), SHAPE.weights()));
            let problem = Problem::new(Case::random(name, SHAPE).with(|c| c.rules = rules), 0, true);
            report.check_backward(&problem, &alone(of, BackwardSetup::plain(full(), FORMS[0])));
        }
    }
    report.finish();
}

/// A query without a key but with a sink passes its `d_lse` to the sink, with anything in its
/// `d_out`. Hidden keys hold NaN.
#[test]
fn queries_without_keys_and_keys_without_queries() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients of sinks alone");
    for (of, _) in ADDED {
        for d_lse in [false, true] {
            let name = format!("no keys, {of}, d_lse {d_lse}");
            if !due(&name) {
                continue;
            }
            let rng = &mut Rng::named(&name);
            let mut rules = rules(of, [false; 4], rng);
            // The last queries of a head see no key, and no query sees the last keys.
            let lengths = |[_, h, i, _]: [usize; 4]| if i > 12 + h { 0 } else { 30 };
            rules.lengths = Some(HostData::of([1, SHAPE.heads, SHAPE.q_len, 1], lengths));
            if of != "sinks" {
                // One head has no sink, so its rows have no gradient for a sink.
                rules.sinks = Some(HostData::new(vec![0.5, f32::NEG_INFINITY, -1.0, 60.0], [1, 4, 1, 1]));
            }
            let case = Case::random(name, SHAPE).with(|c| {
                c.rules = rules;
                let Shape { kv_len, head_dim, value_dim, .. } = SHAPE;
                let hidden = |n: usize, dim: usize| n / dim % kv_len >= 30;
                let spoil = |x: &mut Vec<f32>, dim, with| {
                    x.iter_mut().enumerate().filter(|(n, _)| hidden(*n, dim)).for_each(|(_, x)| *x = with);
                };
                spoil(&mut c.k, head_dim, f32::NAN);
                spoil(&mut c.v, value_dim, f32::INFINITY);
            });
            let problem = Problem::new(case, 0, d_lse);
            report.check_backward(&problem, &BackwardSetup::plain(full(), FORMS[1]));
            report.check_backward(&problem, &alone(of, BackwardSetup::plain(full(), FORMS[0])));
        }
    }
    report.finish();
}

/// Query positions determine the distances.
#[test]
fn query_offsets_match_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients of distances");
    for (n, of) in ["slopes", "symmetric slopes", "relative"].into_iter().enumerate() {
        for reach in [0, 3, 200] {
            let name = format!("elsewhere, {of}, reach {reach}");
            if !due(&name) {
                continue;
            }
            let rng = &mut Rng::named(&name);
            let mut rules = rules(of, [true, false, true, true], rng);
            if of == "relative" {
                rules.relative = normals(rng, [1, SHAPE.heads, 1, 2 * reach + 1]);
            }
            match (n + reach) % 3 {
                0 => rules.query_offsets = Some(HostData::new(vec![3, 90], [2, 1, 1, 1])),
                1 => rules.alignment = Alignment::Offset(-4),
                _ => {
                    let starts = |x: [u32; 4]| HostData::new(x.to_vec(), [1, 1, 1, 4]);
                    rules.packed = Some([starts([0, 4, 11, 19]), starts([1, 20, 21, 37])]);
                }
            }
            let problem = Problem::new(Case::random(name, SHAPE).with(|c| c.rules = rules), 0, true);
            report.check_backward(&problem, &alone(of, BackwardSetup::plain(full(), FORMS[0])));
        }
    }
    report.finish();
}

/// Draws a random problem with a tensor that changes scores.
fn draw(rng: &mut Rng) -> Draw {
    let mut draw = Draw::random(rng);
    let changes = |mask: &MaskDraw| {
        mask.bias.is_some() || mask.slopes.is_some() || mask.relative.is_some() || mask.sinks.is_some()
    };
    while !changes(&draw.mask) {
        draw.mask = MaskDraw::random(rng, draw.shape.kv_len);
    }
    // The tests in `backward` check the gradients of q, k and v.
    let wanted = [rng.chance(0.2), false, false];
    draw.setup = BackwardSetup { added: [true; 5], wanted, ..draw.setup };
    draw
}

#[test]
fn random_problems() {
    crate::harness::in_turn!();
    let draws = Draws { name: "gradients of random masks", always: 120, most: 240, group: 20 };
    check_draws(&draws, draw);
}

/// PyTorch's gradient of a bias.
#[test]
fn bias_gradient_matches_vector() {
    crate::harness::in_turn!();
    let name = "sdpa_bwd_bias";
    let vector = Vector::load(sdpa::FAMILY, name);
    let problem = Problem { case: sdpa::case(name), appended: 0, d_out: vector.f64("dout"), d_lse: None };
    let (want, tolerance) = vector.expected("dbias").expect("a gradient");
    let setup = BackwardSetup::plain(full(), FORMS[0]);
    let got = pollster::block_on(run_backward_async(&problem, &setup, |kernel_options| kernel_options))
        .expect("a run");
    let got = got[3].as_ref().expect("asked for");
    compare(got, &want, tolerance).unwrap_or_else(|e| panic!("dbias: {e}"));
}

/// Work that is split into smaller dispatches, and runs again, gives the same bits.
#[test]
fn split_work_gives_same_bits() {
    crate::harness::in_turn!();
    for (of, _) in ADDED {
        let name = format!("pieces, {of}");
        let case =
            Case::random(&name, SHAPE).with(|c| c.rules = rules(of, [false; 4], &mut Rng::named(&name)));
        let setup = alone(of, BackwardSetup::plain(full(), FORMS[0]));
        let problem = stored_problem(&Problem::new(case, 0, true), &setup);
        let run = |limit: Option<u64>| {
            let limited = |kernel_options: wgpu_attention::KernelOptions| {
                limit.map_or(kernel_options, |limit| kernel_options.work_limit(limit))
            };
            let got = pollster::block_on(run_backward_async(&problem, &setup, limited)).expect("a run");
            got.into_iter().flatten().flatten().map(f64::to_bits).collect::<Vec<_>>()
        };
        let whole = run(None);
        for limit in [None, Some(1), Some(20_000), Some(1_000_000)] {
            assert_eq!(run(limit), whole, "{name}, {limit:?}");
        }
    }
}
