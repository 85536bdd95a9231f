//! Gradients on a device, compared with the reference: shapes, masks, types, layouts, random
//! problems, bits.

use wgpu_attention::reference::compare::compare;
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, Shape};

use crate::harness::backward::{BackwardSetup, COUNT, NAMES, run_backward_async, stored_problem};
use crate::harness::gradients::Problem;
use crate::harness::{
    Case, DropoutData, FORMS, HostData, Layout, Report, Rng, Rules, Vector, due, full, rest, with_registers,
};
use crate::laws::property::{
    DIMS, Draws, DropDraw, LENGTHS, MaskDraw, other_sizes, other_strides, profile, seed,
};
use crate::ops::mask::flex;
use crate::ops::mask::patterns;
use crate::peers::sdpa;
use crate::small::single_masks;

/// Queries, keys, channels of keys and of values, about the sizes of tiles.
const SIZES: [[usize; 4]; 10] = [
    [1, 1, 1, 1],
    [5, 9, 3, 4],
    [8, 24, 16, 16],
    [33, 31, 32, 32],
    [64, 65, 64, 64],
    [31, 100, 63, 65],
    [70, 40, 128, 128],
    [20, 37, 72, 40],
    [12, 50, 40, 130],
    [9, 33, 256, 200],
];

pub fn run(
    problem: &Problem,
    setup: &BackwardSetup,
    change: impl FnOnce(KernelOptions) -> KernelOptions,
) -> Result<[Option<Vec<f64>>; COUNT], String> {
    pollster::block_on(run_backward_async(&stored_problem(problem, setup), setup, change))
}

#[test]
fn shapes() {
    let mut report = Report::new("gradients of shapes");
    for (n, [q_len, kv_len, head_dim, value_dim]) in SIZES.into_iter().enumerate() {
        let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len, head_dim, value_dim };
        let name = format!("{q_len}x{kv_len}x{head_dim}x{value_dim}");
        let problem = Problem::new(Case::random(&name, shape), 0, true);
        for (m, form) in FORMS.into_iter().enumerate() {
            let key = format!("gradients of {name} {form:?}");
            if n % 2 == m && due(&key) || rest(&key) {
                report.check_backward(&problem, &BackwardSetup::plain(full(), form));
            }
        }
    }
    report.finish();
}

/// If an invocation has registers for both, the GPU kernels compute d_k and d_v in one dispatch,
/// too.
#[test]
fn key_value_gradients_share_dispatch() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients of keys and values at once");
    let wide = with_registers(full(), 255);
    for [q_len, kv_len, head_dim, value_dim] in [SIZES[1], SIZES[3], SIZES[5], SIZES[8]] {
        let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len, head_dim, value_dim };
        let name = format!("at once {q_len}x{kv_len}x{head_dim}x{value_dim}");
        if !due(&name) {
            continue;
        }
        let case = Case::random(name, shape).with(|c| c.rules.causal = q_len > 32);
        report.check_backward(&Problem::new(case, 0, true), &BackwardSetup::plain(wide, Target::Gpu));
    }
    report.finish();
}

/// Returns the problems whose gradients other libraries have computed.
fn vectors() -> Vec<(Vector, Case)> {
    let load = |family: &'static str, names: &[&str]| {
        let all = names.iter().map(move |name| Vector::load(family, name));
        all.filter(|vector| vector.has("dout")).collect::<Vec<_>>()
    };
    let mut all = Vec::new();
    all.extend(load(sdpa::FAMILY, sdpa::NAMES).into_iter().map(|v| (sdpa::case(&v.name), v)));
    all.extend(load(flex::FAMILY, flex::NAMES).into_iter().map(|v| (flex::case(&v.name), v)));
    all.extend(load(patterns::FAMILY, patterns::NAMES).into_iter().map(|v| (patterns::ruled(&v), v)));
    all.into_iter().map(|(case, vector)| (vector, case)).collect()
}

#[test]
fn gradients_match_vectors() {
    let mut report = Report::new("gradients of vectors");
    let all = vectors();
    assert_eq!(all.len(), 10);
    for (vector, case) in all {
        let problem = Problem { case, appended: 0, d_out: vector.f64("dout"), d_lse: None };
        for form in FORMS.into_iter().filter(|form| due(&format!("gradients of {}, {form:?}", vector.name))) {
            let setup = BackwardSetup::plain(full(), form);
            report.check_backward(&problem, &setup);
            let got = run(&problem, &setup, |kernel_options| kernel_options).expect("it ran for the report");
            for ((got, name), of) in got.iter().zip(NAMES).zip(["dq", "dk", "dv"]) {
                let (want, tolerance) = vector.expected(of).expect("a gradient");
                let got = got.as_ref().expect("it was wanted");
                compare(got, &want, tolerance).unwrap_or_else(|e| panic!("{}: {name}: {e}", vector.name));
            }
        }
    }
    report.finish();
}

const SHAPE: Shape =
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 37, kv_len: 70, head_dim: 8, value_dim: 12 };

/// Every third part of a mask always runs on one target. Shares run the others on both.
#[test]
fn masks() {
    let mut report = Report::new("gradients of masks");
    for (n, (name, rules)) in single_masks().into_iter().enumerate() {
        let problem = Problem::new(Case::random(name, SHAPE).with(|c| c.rules = rules.clone()), 0, true);
        for (m, form) in FORMS.into_iter().enumerate() {
            let key = format!("gradients of {name} {form:?}");
            if n % 3 == 0 && n / 3 % 2 == m && due(&key) || rest(&key) {
                report.check_backward(&problem, &BackwardSetup::plain(full(), form));
            }
        }
    }
    report.finish();
}

/// Hidden elements, and queries without a key, may hold anything. A visible NaN shows.
#[test]
fn hidden_numbers_have_no_effect() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients next to NaN");
    for (n, poison) in [f32::NAN, f32::INFINITY].into_iter().enumerate() {
        let case = Case::random(format!("hidden {poison}"), SHAPE).with(|c| {
            c.rules.causal = true;
            c.rules.window = Some([9, 0]);
            // The first queries are before all keys, the last keys after all queries.
            c.rules.alignment = wgpu_attention::Alignment::Offset(-3);
            let [heads, q_len, kv_len] = [SHAPE.heads, SHAPE.q_len, SHAPE.kv_len];
            for row in (0..SHAPE.batch * heads).flat_map(|h| (0..3).map(move |i| h * q_len + i)) {
                c.q[row * SHAPE.head_dim..][..SHAPE.head_dim].fill(poison);
            }
            for row in (0..SHAPE.batch * SHAPE.kv_heads).flat_map(|h| (34..70).map(move |j| h * kv_len + j)) {
                c.k[row * SHAPE.head_dim..][..SHAPE.head_dim].fill(poison);
                c.v[row * SHAPE.value_dim..][..SHAPE.value_dim].fill(poison);
            }
        });
        let problem = Problem::new(case, 0, n == 0);
        for form in FORMS {
            report.check_backward(&problem, &BackwardSetup::plain(full(), form));
        }
        // A hidden key between keys that queries see.
        let case = Case::random(format!("between {poison}"), SHAPE).with(|c| {
            c.rules.exclude_self = true;
            c.rules.causal = true;
            let row = 40 * SHAPE.value_dim;
            c.v[row..][..SHAPE.value_dim].fill(poison);
        });
        let problem = Problem::new(case, 0, true);
        for form in FORMS {
            let setup = BackwardSetup::plain(full(), form);
            let got = run(&problem, &setup, |kernel_options| kernel_options).expect("it runs");
            let d_q = got[0].as_ref().expect("it was wanted");
            // Queries before key 41 of their heads do not see it; key 41 has position 33 or later.
            let row = |h: usize, i: usize| &d_q[(h * SHAPE.q_len + i) * SHAPE.head_dim..][..SHAPE.head_dim];
            for h in 0..2 {
                assert!((0..8).all(|i| row(h, i).iter().all(|x| x.is_finite())), "{form:?} {poison}");
                assert!((8..37).all(|i| row(h, i).iter().any(|x| x.is_nan())), "{form:?} {poison}");
            }
        }
    }
    report.finish();
}

/// A value's gradient is as exact as the naive computation's, which has no rounded lse.
#[test]
fn large_scores_match_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients of large scores");
    for factor in [10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 1e6] {
        let shape = Shape { kv_heads: 4, q_len: 20, kv_len: 33, head_dim: 16, ..SHAPE };
        let case = Case::random(format!("scores times {factor}"), shape);
        let problem = Problem::new(case.with(|c| c.q.iter_mut().for_each(|x| *x *= factor)), 0, true);
        for form in FORMS {
            report.check_backward(&problem, &BackwardSetup::plain(full(), form));
        }
    }
    let shape = Shape { kv_heads: 4, q_len: 20, kv_len: 33, head_dim: 16, ..SHAPE };
    for (added, wanted) in
        [(100.0, [true; 3]), (700.0, [true; 3]), (3000.0, [true; 3]), (700.0, [false, false, true])]
    {
        let case = Case::random(format!("additive scores, bias {added}, {wanted:?}"), shape);
        let case = case.with(|c| {
            c.score_vector = Some(Rng::named("a vector").normals(16));
            let bias =
                HostData::of(shape.weights(), |[b, h, i, j]| added + ((b + h + i + j) % 7) as f32 / 3.0);
            c.rules.bias = Some(bias);
        });
        for form in FORMS {
            let setup = BackwardSetup { wanted, ..BackwardSetup::plain(full(), form) };
            report.check_backward(&Problem::new(case.clone(), 0, true), &setup);
        }
    }
    report.finish();
}

/// If a query sees one key, the gradient of the value is the gradient of the output, with any
/// score.
#[test]
fn single_key_gradient_is_exact() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients of single keys");
    let seen = |c: &mut Case| {
        c.rules.causal = true;
        c.rules.window = Some([0, 0]);
    };
    type Change<'a> = (&'a str, &'a dyn Fn(&mut Case));
    let changes: [Change; 5] = [
        ("plain", &|_| ()),
        ("softcap", &|c| c.softcap = Some(900.0)),
        ("bias", &|c| c.rules.bias = Some(HostData::new(vec![613.7], [1; 4]))),
        ("sink", &|c| c.rules.sinks = Some(HostData::new(vec![415.3, 300.1, 2000.7, -50.0], [1, 4, 1, 1]))),
        ("additive", &|c| {
            c.rules.bias = Some(HostData::new(vec![613.7], [1; 4]));
            c.score_vector = Some(vec![41.3; c.shape.head_dim]);
        }),
    ];
    for (name, change) in changes {
        for (n, (wanted, dim)) in
            [([true; 3], 16), ([false, false, true], 16), ([true, false, true], 200)].into_iter().enumerate()
        {
            if n > 0 && name != "plain" {
                continue;
            }
            for size in [1.0, 3.0, 10.0] {
                let shape =
                    Shape { kv_heads: 4, q_len: 12, kv_len: 12, head_dim: dim, value_dim: 16, ..SHAPE };
                let case = Case::random(format!("one key, {name}, {wanted:?}, {dim}, {size}"), shape);
                let case = case.with(|c| {
                    seen(c);
                    change(c);
                    for (q, k) in c.q.iter_mut().zip(&mut c.k) {
                        (*q, *k) = (*q * size * 3.0, *q * 5.0 + *k);
                    }
                });
                for form in FORMS {
                    let setup = BackwardSetup { wanted, ..BackwardSetup::plain(full(), form) };
                    report.check_backward(&Problem::new(case.clone(), 0, false), &setup);
                }
            }
        }
    }
    report.finish();
}

/// Terms are multiplied by the scale before the sum, where the sum would not be finite.
#[test]
fn keys_near_largest_match_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients of keys and queries near the largest number");
    let shape = Shape { kv_heads: 4, q_len: 37, kv_len: 70, head_dim: 16, value_dim: 12, ..SHAPE };
    let case = Case::random("keys near the largest number", shape).with(|c| {
        c.scale = Some(1.0 / 64.0);
        // In channels with large keys, queries are zero, and the reverse.
        c.q.iter_mut().zip(&mut c.k).for_each(|(q, k)| (*q, *k) = (*q * 8.0, *k * 8.0));
        c.q.iter_mut().step_by(16).for_each(|q| *q = 0.0);
        c.k.iter_mut().step_by(16).for_each(|k| *k = 1e38 * k.signum());
        c.q.iter_mut().skip(1).step_by(16).for_each(|q| *q = 1e38 * q.signum());
        c.k.iter_mut().skip(1).step_by(16).for_each(|k| *k = 0.0);
    });
    let mut problem = Problem::new(case, 0, false);
    problem.d_out.iter_mut().for_each(|d| *d *= 10.0);
    for form in FORMS {
        report.check_backward(&problem, &BackwardSetup::plain(full(), form));
    }
    report.finish();
}

pub fn bits(got: &[Option<Vec<f64>>; COUNT]) -> Vec<u64> {
    got.iter().flatten().flatten().map(|x| x.to_bits()).collect()
}

/// Every run gives the same bits, with any split of the work.
#[test]
fn bits_are_the_same() {
    crate::harness::in_turn!();
    let shape = Shape { q_len: 150, kv_len: 130, ..SHAPE };
    let case = Case::random("the same bits", shape).with(|c| {
        c.rules.causal = true;
        c.dropout = Some(DropoutData::Seeded { p: 0.1, seed: 5 });
    });
    let problem = Problem::new(case, 0, true);
    for form in FORMS {
        let setup =
            BackwardSetup { dtype: DType::F32, layout: Layout::Blhd, ..BackwardSetup::plain(full(), form) };
        let first = bits(&run(&problem, &setup, |kernel_options| kernel_options).expect("it runs"));
        for n in 0..20 {
            let again = run(&problem, &setup, |kernel_options| kernel_options).expect("it runs");
            assert!(bits(&again) == first, "{form:?}: other bits in run {n}");
        }
        for limit in [1, 100_000, 3_000_000] {
            let cut =
                run(&problem, &setup, |kernel_options| kernel_options.work_limit(limit)).expect("it runs");
            assert!(bits(&cut) == first, "{form:?}: other bits with dispatches of {limit} operations");
        }
    }
}

/// Everything random about a problem and its run, except the data.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    pub shape: Shape,
    pub mask: MaskDraw,
    pub drop: DropDraw,
    scale: Option<f64>,
    softcap: Option<f64>,
    d_lse: bool,
    /// Additive scores: true for a vector per head.
    additive: Option<bool>,
    pub setup: BackwardSetup,
}

impl Draw {
    pub fn random(rng: &mut Rng) -> Self {
        let kv_heads = rng.between(1, 2);
        let head_dim = rng.pick(DIMS);
        let mut shape = Shape {
            batch: rng.between(1, 2),
            heads: kv_heads * rng.between(1, 3),
            kv_heads,
            q_len: rng.pick(LENGTHS),
            kv_len: rng.pick(LENGTHS),
            head_dim,
            value_dim: if rng.chance(0.5) { head_dim } else { rng.pick(DIMS) },
        };
        if shape.weights().iter().product::<usize>() > 20_000 {
            (shape.batch, shape.heads, shape.kv_heads) = (1, 1, 1);
        }
        let profile = profile(rng);
        Draw {
            shape,
            mask: MaskDraw::random(rng, shape.kv_len),
            drop: DropDraw::random(rng),
            scale: rng.chance(0.2).then_some(-0.75),
            softcap: rng.chance(0.25).then_some(1.5),
            d_lse: rng.chance(0.5),
            additive: None,
            setup: BackwardSetup::random(rng, profile, FORMS),
        }
    }

    /// Returns the same problem with additive scores.
    pub fn with_additive_scores(self) -> Self {
        Draw { additive: Some(self.shape.q_len.is_multiple_of(2)), scale: None, softcap: None, ..self }
    }

    /// Returns other sizes and strides for the same kernels, because compilation dominates the
    /// time.
    fn again(mut self, rng: &mut Rng) -> Self {
        self.shape = other_sizes(self.shape, rng);
        if self.shape.weights().iter().product::<usize>() > 30_000 {
            self.shape.batch = 1;
        }
        self.setup.layout = other_strides(self.setup.layout, rng);
        self
    }

    fn problem(&self, name: String) -> Problem {
        let rng = &mut Rng::named(&name);
        let case = Case::random(name, self.shape).with(|c| {
            c.rules = self.mask.rules(rng, &self.shape, 0);
            (c.scale, c.softcap) = (self.scale, self.softcap);
            c.dropout = self.drop.dropout(rng, self.shape.weights());
            let vectors = self.additive.map(|each| if each { self.shape.heads } else { 1 });
            c.score_vector = vectors.map(|n| rng.normals(n * self.shape.head_dim));
        });
        Problem::new(case, 0, self.d_lse)
    }
}

/// Checks `draws`. `of` draws the first of each group, and the others use its kernels.
pub fn check_draws(draws: &Draws, of: impl Fn(&mut Rng) -> Draw) {
    let mut report = Report::new(draws.name);
    for n in draws.numbers() {
        let seed = seed().wrapping_add((n / draws.group) as u64);
        let first = of(&mut Rng::new(seed));
        let again = &mut Rng::new(seed ^ 0xa6a1_2000 ^ n as u64);
        let mut draw = if n % draws.group == 0 { first } else { first.again(again) };
        let problem = draw.problem(format!("{}, draw {n}", draws.name));
        // The mask's tensors would exceed the bindings of the default limits. The kernel also binds
        // q, k, v, d_out, the rows' stats and a gradient.
        let given = matches!(problem.case.dropout, Some(DropoutData::Given { .. }));
        let Rules { sinks, .. } = &problem.case.rules;
        if problem.case.rules.tensors() + usize::from(given) > 2 + usize::from(sinks.is_some()) {
            draw.setup.profile = full();
        }
        report.check_backward(&problem, &draw.setup);
    }
    report.finish();
}

#[test]
fn random_problems() {
    crate::harness::in_turn!();
    let draws = Draws { name: "gradients of random problems", always: 300, most: 600, group: 20 };
    check_draws(&draws, Draw::random);
}

/// Both targets really run: if a plan used one for both, half of these tests would prove nothing.
#[test]
fn targets_compile_different_kernels() {
    crate::harness::in_turn!();
    let problem = Problem::new(Case::random("forms", SHAPE), 0, false);
    let of = |form| bits(&run(&problem, &BackwardSetup::plain(full(), form), |t| t).expect("it runs"));
    assert!(of(Target::Gpu) != of(Target::Software));
}
