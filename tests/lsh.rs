//! Attention within buckets of a hash: vectors, gradients, limits, bad input.

use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{
    self, LshAttended, LshHashed, LshShape, Options, lsh_attention, lsh_attention_backward,
    lsh_attention_backward_magnitudes, lsh_buckets, lsh_pairs, widen,
};
use wgpu_attention::{
    DType, KernelForm, LshAttention, LshBackward, LshConfig, LshForward, Mask, MatrixUnits, Scratch, Shape,
    TensorView, Tuning,
};

use crate::harness::case::{largest, widened};
use crate::harness::gradients::{Compared, Input, compare_differences};
use crate::harness::run::{Layout, Placed};
use crate::harness::{
    FORMS, Judged, Profile, Report, Rng, Values, Vector, defaults, due, full, matrices, rest, stored,
};

pub const FAMILY: &str = "linear";
pub const NAMES: &[&str] = &["reformer_chunked", "reformer_union", "reformer_union_causal"];

/// A problem with its data, in f32.
#[derive(Clone, Debug)]
pub struct Case {
    pub shape: LshShape,
    pub rounds: usize,
    pub n_buckets: usize,
    pub chunk: usize,
    pub causal: bool,
    pub lengths: Option<Vec<u32>>,
    pub qk: Vec<f32>,
    pub v: Vec<f32>,
    pub rotations: Vec<f32>,
    pub d_out: Vec<f32>,
    pub d_lse: Vec<f32>,
}

/// Where and how it runs.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub profile: &'static Profile,
    pub form: KernelForm,
    pub layout: Layout,
    pub dtype: DType,
    /// Of rotations.
    pub rotations: DType,
    pub gradient: DType,
    pub accumulates: bool,
}

impl Setup {
    pub fn plain(profile: &'static Profile, form: KernelForm, layout: Layout) -> Self {
        let f32 = DType::F32;
        Setup { profile, form, layout, dtype: f32, rotations: f32, gradient: f32, accumulates: false }
    }
}

impl std::fmt::Display for Setup {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Setup { profile, form, layout, dtype, rotations, gradient, accumulates } = self;
        write!(f, "{}, {form:?}, {layout:?}, {dtype:?} by {rotations:?}, ", profile.name)?;
        write!(f, "gradients {gradient:?}, adds {accumulates}")
    }
}

/// What a run gives.
pub struct Got {
    pub buckets: Vec<u32>,
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub gradients: [Vec<f64>; 2],
}

impl Case {
    pub fn random(name: &str, shape: LshShape, [rounds, n_buckets, chunk]: [usize; 3]) -> Self {
        let rng = &mut Rng::named(name);
        let mut normals = |shape: [usize; 4]| rng.normals(shape.iter().product());
        let LshShape { batch, heads, length, head_dim, .. } = shape;
        Case {
            shape,
            rounds,
            n_buckets,
            chunk,
            causal: false,
            lengths: None,
            qk: normals(shape.qk()),
            v: normals(shape.v()),
            rotations: normals([1, rounds, head_dim, n_buckets / 2]),
            d_out: normals(shape.v()),
            d_lse: normals([batch, heads, length, 1]),
        }
    }

    pub fn causal(self) -> Self {
        Case { causal: true, ..self }
    }

    pub fn lengths(self, lengths: &[u32]) -> Self {
        Case { lengths: Some(lengths.to_vec()), ..self }
    }

    fn stored(&self, setup: &Setup) -> Self {
        let own = |x: &[f32]| stored(x, setup.dtype);
        let rotations = stored(&self.rotations, setup.rotations);
        Case { qk: own(&self.qk), v: own(&self.v), d_out: own(&self.d_out), rotations, ..self.clone() }
    }

    fn hashed<'a, R>(&'a self, buckets: &'a [u32], keys: Option<&'a [R]>) -> LshHashed<'a, R> {
        LshHashed {
            buckets,
            rounds: self.rounds,
            chunk: Some(self.chunk),
            causal: self.causal,
            scale: None,
            lengths: self.lengths.as_deref(),
            keys,
        }
    }

    fn before(&self, n: usize, setup: &Setup) -> Vec<f32> {
        let length = if n == 0 { self.qk.len() } else { self.v.len() };
        stored(&Rng::new(n as u64 + 77).normals(length), setup.gradient)
    }

    /// Buckets are those of the reference, but where two are as near as their sums are exact.
    fn check_buckets(&self, got: &[u32]) -> Result<(), String> {
        let LshShape { heads, length, head_dim, .. } = self.shape;
        let [qk, rotations] = [&self.qk, &self.rotations].map(|x| widen::<f64>(x));
        let lengths = self.lengths.as_deref();
        let want = lsh_buckets(&qk, &rotations, self.shape, self.rounds, self.n_buckets, lengths);
        let want = want.map_err(|e| e.to_string())?;
        if got.len() != want.len() {
            return Err(format!("{} buckets", got.len()));
        }
        let half = self.n_buckets / 2;
        for (n, (got, want)) in got.iter().zip(&want).enumerate().filter(|(_, (got, want))| got != want) {
            let (i, round, head) = (n % length, n / length % self.rounds, n / length / self.rounds);
            let along = |bucket: usize, abs: bool| -> f64 {
                let term = |d: usize| {
                    let x = qk[(head * length + i) * head_dim + d]
                        * rotations[(round * head_dim + d) * half + bucket % half];
                    if abs {
                        x.abs()
                    } else if bucket < half {
                        x
                    } else {
                        -x
                    }
                };
                (0..head_dim).map(term).sum()
            };
            let (a, b) = (*got as usize, *want as usize);
            let near = a < self.n_buckets && b < self.n_buckets && {
                let terms = along(a, true) + along(b, true);
                (along(a, false) - along(b, false)).abs() <= EPSILON_F32 * head_dim as f64 * terms
            };
            if !near {
                return Err(format!(
                    "bucket {got}, not {want}, of token {i}, round {round}, head {}",
                    head % heads
                ));
            }
        }
        Ok(())
    }

    /// In f32, with what lies between in memory as it is stored: normalised keys, and the output.
    fn naive(&self, buckets: &[u32], dtype: DType) -> (LshAttended<f32>, [Vec<f32>; 2]) {
        let LshShape { head_dim, value_dim, .. } = self.shape;
        let unit = |x: &[f32]| {
            let length = x.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-12);
            x.iter().map(|x| x / length).collect::<Vec<f32>>()
        };
        let keys: Vec<f32> = self.qk.chunks_exact(head_dim).flat_map(unit).collect();
        let keys = stored(&keys, dtype);
        let hashed = self.hashed(buckets, Some(&keys[..]));
        let attended = lsh_attention(&self.qk, &self.v, &hashed, self.shape).expect("it fits");
        let as_stored = stored(&attended.out, dtype);
        let mut d_lse = self.d_lse.clone();
        for (row, d_lse) in d_lse.iter_mut().enumerate() {
            for n in row * value_dim..(row + 1) * value_dim {
                *d_lse -= self.d_out[n] * (as_stored[n] - attended.out[n]);
            }
        }
        let got = lsh_attention_backward(&self.qk, &self.v, &self.d_out, Some(&d_lse), &hashed, self.shape);
        let got = got.expect("it fits");
        (attended, [got.d_qk, got.d_v])
    }

    fn gradients(&self, buckets: &[u32], magnitudes: bool) -> [Vec<f64>; 2] {
        let [qk, v, d_out, d_lse] = [&self.qk, &self.v, &self.d_out, &self.d_lse].map(|x| widen::<f64>(x));
        let hashed = self.hashed(buckets, None);
        let of = if magnitudes { lsh_attention_backward_magnitudes } else { lsh_attention_backward };
        let got = of(&qk, &v, &d_out, Some(&d_lse), &hashed, self.shape).expect("it fits");
        [got.d_qk, got.d_v]
    }

    /// Largest error over tolerance, of what was computed with these buckets.
    fn judge(&self, got: &Got, setup: &Setup) -> Result<f64, String> {
        let [qk, v] = [&self.qk, &self.v].map(|x| widen::<f64>(x));
        let exact = lsh_attention(&qk, &v, &self.hashed(&got.buckets, None), self.shape).expect("it fits");
        let (naive, naive_gradients) = self.naive(&got.buckets, setup.dtype);
        let out = Judged::new(&widened(&naive.out, setup.dtype), exact.out, largest(v));
        let mut worst = out.judge(&got.out).map_err(|e| format!("out: {e}"))?;
        let length = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let scores = largest(qk.chunks_exact(self.shape.head_dim).map(length));
        let lse = Judged::new(&widened(&naive.lse, DType::F32), exact.lse, scores + 1.0);
        worst = worst.max(lse.judge(&got.lse).map_err(|e| format!("lse: {e}"))?);
        let [exact, magnitudes] = [false, true].map(|magnitudes| self.gradients(&got.buckets, magnitudes));
        for (n, name) in ["d_qk", "d_v"].into_iter().enumerate() {
            let (mut want, mut naive) = (exact[n].clone(), naive_gradients[n].clone());
            let mut magnitude = largest(magnitudes[n].iter().copied());
            if setup.accumulates {
                let before = self.before(n, setup);
                want.iter_mut().zip(&before).for_each(|(x, b)| *x += f64::from(*b));
                naive.iter_mut().zip(&before).for_each(|(x, b)| *x += b);
                magnitude += largest(before.iter().map(|x| f64::from(*x)));
            }
            let naive = widened(&naive, setup.gradient);
            let tolerance = Tolerance::gradient(&naive, &want, magnitude, EPSILON_F32);
            let share = Judged { want, tolerance }.judge(&got.gradients[n]);
            worst = worst.max(share.map_err(|e| format!("{name}: {e}"))?);
        }
        Ok(worst)
    }

    fn config(&self, setup: &Setup) -> LshConfig {
        let LshShape { heads, head_dim, value_dim, .. } = self.shape;
        let units = if setup.profile.matrix { MatrixUnits::Always } else { MatrixUnits::Auto };
        LshConfig::new(heads, head_dim, self.rounds, self.n_buckets, self.chunk)
            .value_dim(value_dim)
            .dtype(setup.dtype)
            .causal(self.causal)
            .tuning(Tuning::new().form(setup.form).matrix_units(units))
    }

    /// Forward and backward, twice over; with `buckets`, if given, instead of the rotations'.
    fn run(&self, setup: &Setup, buckets: Option<&[u32]>) -> Result<Got, String> {
        let Setup { profile, layout, dtype, .. } = *setup;
        let LshShape { batch, heads, length, head_dim, .. } = self.shape;
        profile.tidy();
        let shape = self.shape;
        let row = [batch, heads, length, 1];
        let [qk_at, v_at, out_at, lse_at, buckets_at, rotations_at, lengths_at] = layout.places([
            shape.qk(),
            shape.v(),
            shape.v(),
            row,
            shape.buckets(self.rounds),
            [1, self.rounds, head_dim, self.n_buckets / 2],
            [batch, 1, 1, 1],
        ]);
        // What is no token may hold anything.
        let hidden = |x: &[f32], dim: usize| -> Vec<f32> {
            let there = |n: usize| {
                let (i, b) = (n / dim % length, n / dim / length / heads);
                self.lengths.as_ref().is_none_or(|lengths| (i as u32) < lengths[b])
            };
            x.iter().enumerate().map(|(n, x)| if there(n) { *x } else { f32::NAN }).collect()
        };
        let floats = |x: &[f32], dtype, at| Placed::input(profile, Values::Floats(x), dtype, at);
        let qk = floats(&hidden(&self.qk, head_dim), dtype, qk_at);
        let v = floats(&hidden(&self.v, self.shape.value_dim), dtype, v_at);
        let rotations = floats(&self.rotations, setup.rotations, rotations_at);
        let d_out = floats(&hidden(&self.d_out, self.shape.value_dim), dtype, out_at);
        let d_lse = floats(&hidden(&self.d_lse, 1), DType::F32, lse_at);
        let lengths = self
            .lengths
            .as_ref()
            .map(|lengths| Placed::input(profile, Values::Numbers(lengths), DType::U32, lengths_at));
        let refused = |e: wgpu_attention::Error| format!("refused: {e}");
        let operator = LshAttention::with_pipelines(profile.gpu.pipelines(), self.config(setup));
        let operator = operator.map_err(refused)?;
        let read = |what: &str, t: &Placed| pollster::block_on(t.download_async(what, profile));
        let mut first: Option<Got> = None;
        for _ in 0..2 {
            let hashes = match buckets {
                Some(buckets) => Placed::input(profile, Values::Numbers(buckets), DType::U32, buckets_at),
                None => Placed::output(profile, DType::U32, buckets_at),
            };
            let out = Placed::output(profile, dtype, out_at);
            let lse = Placed::output(profile, DType::F32, lse_at);
            let of_lengths = lengths.as_ref().map(Placed::view);
            let call = match buckets {
                Some(_) => LshForward::with_buckets(qk.view(), v.view(), hashes.view(), out.view()),
                None => LshForward::new(qk.view(), v.view(), rotations.view(), hashes.view(), out.view()),
            };
            let call = call.lse(lse.view()).lengths(of_lengths);
            let results = [0, 1].map(|n| {
                let layout = match layout {
                    Layout::Window(seed) => Layout::Window(seed ^ (n as u64 + 1) << 8),
                    layout => layout,
                };
                let [at] = layout.places([[shape.qk(), shape.v()][n]]);
                match setup.accumulates {
                    true => Placed::holding(profile, &self.before(n, setup), setup.gradient, at),
                    false => Placed::output(profile, setup.gradient, at),
                }
            });
            let inputs = [qk.view(), v.view()];
            let back = LshBackward::new(inputs, hashes.view(), out.view(), lse.view(), d_out.view())
                .d_lse(d_lse.view())
                .lengths(of_lengths)
                .d_qk(results[0].view())
                .d_v(results[1].view())
                .accumulate(setup.accumulates);
            let size = operator.scratch_size(&call).map_err(refused)?;
            let size = size.max(operator.backward_scratch_size(&back).map_err(refused)?);
            let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
            profile
                .gpu
                .submit(|encoder| {
                    operator.forward(encoder, &call, &mut scratch)?;
                    operator.backward(encoder, &back, &mut scratch)
                })
                .map_err(refused)?;
            let got = Got {
                buckets: read("buckets", &hashes)?.into_iter().map(|x| x as u32).collect(),
                out: read("out", &out)?,
                lse: read("lse", &lse)?,
                gradients: [read("d_qk", &results[0])?, read("d_v", &results[1])?],
            };
            let bits = |got: &Got| {
                let [d_qk, d_v] = &got.gradients;
                [&got.out, &got.lse, d_qk, d_v].into_iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            match &first {
                Some(first) if bits(first) != bits(&got) || first.buckets != got.buckets => {
                    return Err("other bits the second time".into());
                }
                Some(_) => {}
                None => first = Some(got),
            }
        }
        first.ok_or_else(|| "never run".into())
    }

    /// Largest error over tolerance.
    pub fn outcome(&self, setup: &Setup) -> Result<f64, String> {
        let case = self.stored(setup);
        let got = case.run(setup, None)?;
        case.check_buckets(&got.buckets)?;
        case.judge(&got, setup)
    }
}

/// The vector's case; a chunk of all tokens where there are none.
fn case(name: &str) -> (Case, Vector) {
    let vector = Vector::load(FAMILY, name);
    let [batch, heads, length, head_dim] = vector.shape4("qk");
    let shape = LshShape { batch, heads, length, head_dim, value_dim: head_dim };
    let chunk = if vector.attrs["kind"] == "chunked" { vector.size("chunk") } else { length };
    let case = Case::random(name, shape, [vector.size("rounds"), vector.size("n_buckets"), chunk]);
    let causal = vector.attrs["causal"] == true;
    let [qk, v, rotations] = ["qk", "v", "rotations"].map(|name| vector.f32(name));
    (Case { qk, v, rotations, causal, ..case }, vector)
}

/// From `[rounds, batch, heads, n]`, as the vectors have it.
fn by_head<T: Copy>(case: &Case, x: &[T]) -> Vec<T> {
    let LshShape { batch, heads, .. } = case.shape;
    let n = x.len() / case.rounds / batch / heads;
    let at = |m: usize| {
        let (i, round, head) = (m % n, m / n % case.rounds, m / n / case.rounds);
        x[(round * batch * heads + head) * n + i]
    };
    (0..x.len()).map(at).collect()
}

fn vector_buckets(case: &Case, vector: &Vector) -> Vec<u32> {
    by_head(case, &vector.integers("buckets")).into_iter().map(|x| x as u32).collect()
}

#[test]
fn the_reference_gives_the_vectors() {
    for name in NAMES {
        let (case, vector) = case(name);
        let [qk, v, rotations] = [&case.qk, &case.v, &case.rotations].map(|x| widen::<f64>(x));
        let buckets = lsh_buckets(&qk, &rotations, case.shape, case.rounds, case.n_buckets, None);
        let buckets = buckets.expect("it fits");
        assert_eq!(buckets, vector_buckets(&case, &vector), "{name}");
        let near = |a: &[f64], b: &[f64]| {
            a.len() == b.len()
                && a.iter().zip(b).all(|(a, b)| a == b || (a - b).abs() < 1e-7 * (1.0 + b.abs()))
        };
        // Without chunks, and with one of all tokens.
        for chunk in [Some(case.chunk), None].into_iter().take(if vector.has("lse") { 2 } else { 1 }) {
            let hashed = LshHashed { chunk, ..case.hashed(&buckets, None) };
            let got = lsh_attention(&qk, &v, &hashed, case.shape).expect("it fits");
            assert!(near(&got.out, &vector.f64("out")), "{name}");
            let pairs = lsh_pairs(&hashed, case.shape).expect("it fits");
            if vector.has("lse") {
                assert!(near(&got.lse, &vector.f64("lse")), "{name}");
                let all = case.shape.length * case.shape.length;
                let any: Vec<bool> = pairs
                    .chunks_exact(case.rounds * all)
                    .flat_map(|head| (0..all).map(|n| (0..case.rounds).any(|r| head[r * all + n])))
                    .collect();
                assert_eq!(any, vector.bools("pairs").data, "{name}");
            } else {
                assert!(near(&got.lse_rounds, &by_head(&case, &vector.f64("lse_rounds"))), "{name}");
                let want = vector_pairs(&case, &vector);
                assert_eq!(pairs, want, "{name}");
            }
        }
    }
}

/// `pairs_rounds` has five axes.
fn vector_pairs(case: &Case, vector: &Vector) -> Vec<bool> {
    let flat = vector.flat_bools("pairs_rounds");
    by_head(case, &flat)
}

#[test]
fn vectors_forward_and_backward_on_every_form() {
    let mut report = Report::new("lsh vectors");
    for name in NAMES {
        let (case, vector) = case(name);
        let buckets = vector_buckets(&case, &vector);
        for profile in [full(), defaults()] {
            for form in FORMS {
                let layout = if profile.name == "full" { Layout::Dense } else { Layout::Window(5) };
                let setup = Setup::plain(profile, form, layout);
                let check = || {
                    let got = case.run(&setup, None)?;
                    if got.buckets != buckets {
                        return Err(format!("buckets {:?}", got.buckets));
                    }
                    for (name, got) in [("out", &got.out), ("lse", &got.lse)] {
                        if let Some((want, tolerance)) = vector.expected(name) {
                            Judged { want, tolerance }.judge(got).map_err(|e| format!("{name}: {e}"))?;
                        }
                    }
                    // With the buckets given, the same bits.
                    let given = case.run(&setup, Some(&buckets))?;
                    if given.out != got.out || given.gradients != got.gradients {
                        return Err("given buckets give something else".into());
                    }
                    case.judge(&got, &setup)
                };
                report.record(name, &setup, check());
            }
        }
    }
    report.finish();
}

#[test]
fn every_shape_matches_the_reference() {
    let mut report = Report::new("lsh");
    let shape = LshShape { batch: 2, heads: 2, length: 67, head_dim: 12, value_dim: 21 };
    let even = LshShape { length: 64, head_dim: 16, value_dim: 16, ..shape };
    let one = LshShape { batch: 1, heads: 1, length: 1, head_dim: 1, value_dim: 1 };
    let cases = [
        // Not divisible by the chunk; one round, several.
        ("one round", Case::random("lsh 1", shape, [1, 4, 8])),
        ("two rounds", Case::random("lsh 2", shape, [2, 6, 16])),
        ("two rounds, causal", Case::random("lsh 3", even, [2, 4, 16]).causal()),
        ("three rounds", Case::random("lsh 4", even, [3, 18, 8]).causal()),
        // Two chunks, each before the other; one; more buckets than tokens.
        ("two chunks", Case::random("lsh 5", shape, [2, 2, 34])),
        ("one chunk", Case::random("lsh 6", shape, [2, 4, 100])),
        ("many buckets", Case::random("lsh 7", LshShape { length: 9, ..shape }, [2, 300, 4])),
        ("one token", Case::random("lsh 8", one, [2, 2, 1])),
        // Padding: of one sequence all, of another less than a chunk is left.
        (
            "lengths",
            Case::random("lsh 9", LshShape { batch: 4, ..shape }, [2, 4, 16]).lengths(&[67, 0, 9, 41]),
        ),
        ("lengths, causal", Case::random("lsh 10", shape, [1, 2, 8]).causal().lengths(&[17, 66])),
    ];
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    for (n, (name, case)) in cases.iter().enumerate() {
        for (m, form) in FORMS.into_iter().enumerate() {
            for profile in [full(), defaults()] {
                let plain = Setup::plain(profile, form, Layout::Dense);
                let setups = [
                    plain,
                    Setup { layout: Layout::Window(2 * n as u64 + 1), accumulates: true, ..plain },
                    Setup { dtype: f16, gradient: f16, layout: Layout::Blhd, ..plain },
                    Setup { dtype: bf16, rotations: bf16, ..plain },
                ];
                for (s, setup) in setups.into_iter().enumerate() {
                    let usual = (n + m + s) % 4 == 0 && (profile.name == "full") == (s != 1);
                    let key = format!("lsh {name}, {setup}");
                    if !(usual && due(&key) || rest(&key)) {
                        continue;
                    }
                    if [setup.dtype, setup.rotations].contains(&f16) && !profile.f16 {
                        report.skip_f16(profile, name);
                        continue;
                    }
                    let setup = Setup { rotations: if setup.rotations == f32 { f32 } else { bf16 }, ..setup };
                    report.record(name, &setup, case.outcome(&setup));
                }
            }
        }
    }
    report.finish();
}

#[test]
fn random_problems_match_the_reference() {
    let mut report = Report::new("lsh, random");
    for n in 0..24 {
        if n >= 10 && !rest(&format!("lsh random {n}")) {
            continue;
        }
        let rng = &mut Rng::new(n ^ 0x15b);
        let shape = LshShape {
            batch: rng.between(1, 3),
            heads: rng.between(1, 3),
            length: rng.between(1, 90),
            head_dim: rng.pick(&[4, 5, 16]),
            value_dim: rng.pick(&[4, 7]),
        };
        let sizes = [rng.between(1, 2), 2 * rng.between(1, 6), rng.between(1, 40)];
        let mut case = Case::random(&format!("lsh random {n}"), shape, sizes);
        case.causal = rng.chance(0.5);
        if rng.chance(0.4) {
            let length = |_| rng.between(0, shape.length + 3) as u32;
            case.lengths = Some((0..shape.batch).map(length).collect());
        }
        let setup = Setup {
            accumulates: n % 3 == 0,
            ..Setup::plain(full(), FORMS[n as usize % 2], Layout::Window(2 * n + 1))
        };
        report.record(&format!("{shape:?}, {sizes:?}, {:?}", case.lengths), &setup, case.outcome(&setup));
    }
    report.finish();
}

#[test]
fn matrix_units_attend_within_buckets() {
    for profile in matrices().filter(|profile| profile.compiles_fast()) {
        let shape = LshShape { batch: 1, heads: 2, length: 80, head_dim: 16, value_dim: 16 };
        let case = Case::random("lsh matrix", shape, [2, 4, 32]);
        let setup = Setup { dtype: DType::F16, ..Setup::plain(profile, KernelForm::Cpu, Layout::Dense) };
        let case = case.stored(&setup);
        let got = case.run(&setup, None).expect("a run");
        let [qk, v] = [&case.qk, &case.v].map(|x| widen::<f64>(x));
        let exact = lsh_attention(&qk, &v, &case.hashed(&got.buckets, None), shape).expect("it fits");
        let (naive, _) = case.naive(&got.buckets, DType::F16);
        let Judged { want, tolerance } =
            Judged::new(&widened(&naive.out, DType::F16), exact.out, largest(v.clone()));
        // They round weights to f16.
        let absolute = tolerance.absolute + 2f64.powi(-11) * largest(v);
        Judged { want, tolerance: Tolerance { absolute } }.judge(&got.out).expect("near");
    }
}

/// With one bucket and one chunk, or two that look back to each other, it is attention to every other token.
#[test]
fn one_bucket_gives_attention() {
    let shape = LshShape { batch: 2, heads: 2, length: 40, head_dim: 16, value_dim: 16 };
    for (causal, chunk) in [(false, 40), (true, 40), (false, 20), (true, 64)] {
        let mut case = Case::random("lsh one bucket", shape, [2, 2, chunk]);
        // All alike, and the lowest of equals.
        case.rotations.fill(0.0);
        case.causal = causal;
        let [qk, v] = [&case.qk, &case.v].map(|x| widen::<f64>(x));
        let unit = |x: &[f64]| {
            let length = x.iter().map(|x| x * x).sum::<f64>().sqrt();
            x.iter().map(|x| x / length).collect::<Vec<f64>>()
        };
        let keys: Vec<f64> = qk.chunks_exact(16).flat_map(unit).collect();
        let mask = if causal { Mask::causal() } else { Mask::none() };
        let options = Options::new().mask(mask.exclude_self());
        let mut want =
            reference::attention(&qk, &keys, &v, Shape::new(2, 2, 40, 16), &options).expect("it fits").out;
        if causal {
            // The first sees nothing but itself.
            for head in 0..4 {
                let row = head * 40 * 16..head * 40 * 16 + 16;
                want[row.clone()].copy_from_slice(&v[row]);
            }
        }
        for form in FORMS {
            let setup = Setup::plain(full(), form, Layout::Dense);
            let got = case.run(&setup, None).expect("a run");
            assert!(got.buckets.iter().all(|bucket| *bucket == 0));
            let near = got.out.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5);
            assert!(near, "{form:?}, causal {causal}, chunk {chunk}");
            case.judge(&got, &setup).expect("as the reference");
        }
    }
}

/// A sequence gives in a batch of longer ones what it gives alone.
#[test]
fn padding_changes_nothing() {
    let shape = LshShape { batch: 2, heads: 1, length: 50, head_dim: 8, value_dim: 8 };
    let case = Case::random("lsh padding", shape, [2, 4, 8]).lengths(&[50, 21]);
    let setup = Setup::plain(full(), KernelForm::Auto, Layout::Dense);
    let got = case.run(&setup, None).expect("a run");
    let cut = |x: &[f32]| x[50 * 8..50 * 8 + 21 * 8].to_vec();
    let alone = Case {
        shape: LshShape { batch: 1, length: 21, ..shape },
        qk: cut(&case.qk),
        v: cut(&case.v),
        d_out: cut(&case.d_out),
        d_lse: case.d_lse[50..71].to_vec(),
        lengths: None,
        ..case.clone()
    };
    let alone = alone.run(&setup, None).expect("a run");
    let near = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(near(&got.out[400..400 + 168], &alone.out), "out");
    assert!(near(&got.gradients[0][400..400 + 168], &alone.gradients[0]), "d_qk");
    assert!(near(&got.gradients[1][400..400 + 168], &alone.gradients[1]), "d_v");
    // And what is no token has nothing.
    assert!(got.out[568..].iter().all(|x| *x == 0.0));
    assert!(got.gradients.iter().all(|x| x[568..].iter().all(|x| *x == 0.0)));
    assert!(got.lse[71..].iter().all(|x| *x == f64::NEG_INFINITY));
}

/// Scores so large that their exponentials need the maximum, tokens of length 0, and NaN where it belongs.
#[test]
fn extreme_numbers() {
    let shape = LshShape { batch: 1, heads: 1, length: 30, head_dim: 4, value_dim: 4 };
    let mut case = Case::random("lsh extreme", shape, [2, 4, 8]);
    case.qk.iter_mut().for_each(|x| *x *= 300.0);
    case.qk[..8].fill(0.0);
    for form in FORMS {
        let setup = Setup::plain(full(), form, Layout::Dense);
        case.outcome(&setup).unwrap_or_else(|e| panic!("{form:?}: {e}"));
    }
    case.v[17] = f32::NAN;
    let got = case.run(&Setup::plain(full(), KernelForm::Auto, Layout::Dense), None).expect("a run");
    assert!(got.out.iter().any(|x| x.is_nan()) && got.out.iter().any(|x| !x.is_nan()));
}

#[test]
fn rotations_are_the_same_for_the_same_seed() {
    let config = LshConfig::new(2, 16, 3, 8, 4);
    let [a, b, c] = [7, 7, 8].map(|seed| config.rotations(seed));
    assert!(a.len() == 3 * 16 * 4 && a == b && a != c);
    let mean = a.iter().sum::<f32>() / a.len() as f32;
    let square = a.iter().map(|x| x * x).sum::<f32>() / a.len() as f32;
    assert!(mean.abs() < 0.2 && (square - 1.0).abs() < 0.3, "{mean} {square}");
}

#[test]
fn the_references_gradients_are_those_of_differences() {
    let mut compared = Compared::new();
    let shape = LshShape { batch: 1, heads: 2, length: 9, head_dim: 3, value_dim: 2 };
    for (causal, lengths) in [(false, None), (true, None), (false, Some([7]))] {
        let mut case = Case::random("lsh differences", shape, [2, 4, 3]);
        case.causal = causal;
        case.lengths = lengths.map(|lengths: [u32; 1]| lengths.to_vec());
        let [qk, v, rotations, d_out, d_lse] =
            [&case.qk, &case.v, &case.rotations, &case.d_out, &case.d_lse].map(|x| widen::<f64>(x));
        // Hashed once: buckets have no gradient.
        let buckets = lsh_buckets(&qk, &rotations, shape, 2, 4, case.lengths.as_deref()).expect("it fits");
        let hashed = case.hashed(&buckets, None);
        let got = lsh_attention_backward(&qk, &v, &d_out, Some(&d_lse), &hashed, shape).expect("it fits");
        let inputs = [Input::new("qk", &qk, &got.d_qk), Input::new("v", &v, &got.d_v)];
        let loss = |x: &[Vec<f64>]| {
            let got = lsh_attention(&x[0], &x[1], &case.hashed(&buckets, None), shape).expect("it fits");
            let dot = |x: &[f64], y: &[f64]| -> f64 {
                x.iter().zip(y).filter(|(x, _)| x.abs() < 1e4).map(|(x, y)| x * y).sum()
            };
            dot(&got.out, &d_out) + dot(&got.lse, &d_lse)
        };
        compare_differences("lsh", &inputs, usize::MAX, &mut compared, loss).expect("differences");
    }
    assert!(["qk", "v"].iter().all(|name| compared[name] > 0), "{compared:?}");
}

#[test]
fn bad_calls_are_refused_before_anything_is_recorded() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..12).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let (wide, turn, hash) = ([1, 2, 10, 8], [1, 3, 8, 2], [1, 2, 3, 10]);
    let [qk, v, rotations, out] = [view(0, wide), view(1, wide), view(2, turn), view(3, wide)];
    let buckets = typed(4, DType::U32, hash);
    let config = LshConfig::new(2, 8, 3, 4, 4);
    let pipelines = gpu.pipelines();
    let not = |config: LshConfig, words: &[&str]| {
        let error = LshAttention::with_pipelines(pipelines, config).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    not(LshConfig::new(0, 8, 3, 4, 4), &["heads is 0"]);
    not(LshConfig::new(2, 8, 0, 4, 4), &["rounds is 0"]);
    not(LshConfig::new(2, 8, 65, 4, 4), &["rounds", "at most 64"]);
    not(LshConfig::new(2, 8, 3, 5, 4), &["n_buckets 5", "2"]);
    not(LshConfig::new(2, 8, 3, 65536, 4), &["n_buckets", "65534"]);
    not(LshConfig::new(2, 8, 3, 4, 0), &["chunk is 0"]);
    not(config.scale(f64::NAN), &["scale"]);
    not(config.dtype(DType::U32), &["F32, F16 or BF16"]);
    let operator = LshAttention::with_pipelines(pipelines, config).expect("an operator");
    let good = LshForward::new(qk, v, rotations, buckets, out);
    let size = operator.scratch_size(&good).expect("a size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    let mut refused = |call: LshForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward_in_pass(&mut pass, &call, &mut scratch).is_err());
        assert!(operator.prepare(&call, &mut scratch).is_err());
    };
    let of = LshForward::new;
    refused(of(typed(0, DType::BF16, wide), v, rotations, buckets, out), &["`qk`", "F32", "BF16"]);
    refused(of(view(0, [1, 3, 10, 8]), v, rotations, buckets, out), &["`qk`", "heads must be 2", "got 3"]);
    refused(of(qk, view(1, [1, 2, 9, 8]), rotations, buckets, out), &["`v`", "length must be 10", "got 9"]);
    refused(of(qk, v, view(2, [1, 3, 8, 4]), buckets, out), &["`rotations`", "must be 2", "got 4"]);
    refused(of(qk, v, view(2, [1, 2, 8, 2]), buckets, out), &["`rotations`", "must be 3", "got 2"]);
    refused(of(qk, v, typed(2, DType::U32, turn), buckets, out), &["`rotations`", "F32, F16 or BF16"]);
    refused(of(qk, v, rotations, view(4, hash), out), &["`buckets`", "U32", "F32"]);
    refused(of(qk, v, rotations, typed(4, DType::U32, [1, 2, 2, 10]), out), &["`buckets`", "must be 3"]);
    refused(of(qk, v, rotations, buckets, view(0, wide)), &["`out`", "`qk`"]);
    refused(of(qk, v, rotations, typed(0, DType::U32, hash), out), &["`buckets`", "`qk`"]);
    refused(LshForward::with_buckets(qk, v, typed(3, DType::U32, hash), out), &["`out`", "`buckets`"]);
    refused(good.lse(view(5, wide)), &["`lse`", "must be 1", "got 8"]);
    refused(good.lse(view(3, [1, 2, 10, 1])), &["overlap"]);
    refused(good.lengths(view(5, [1, 1, 1, 1])), &["`lengths`", "U32", "F32"]);
    refused(good.lengths(typed(5, DType::U32, [2, 1, 1, 1])), &["`lengths`", "batch must be 1", "got 2"]);
    let long = [view(0, [1, 2, 64, 8]), view(1, [1, 2, 64, 8]), view(3, [1, 2, 64, 8])];
    refused(of(long[0], long[1], rotations, typed(4, DType::U32, [1, 2, 3, 64]), long[2]), &["scratch"]);

    let [lse, d_out] = [view(5, [1, 2, 10, 1]), view(6, wide)];
    let back = LshBackward::new([qk, v], buckets, out, lse, d_out);
    let mut refused = |call: LshBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.backward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward_in_pass(&mut pass, &call, &mut scratch).is_err());
        assert!(operator.prepare_backward(&call, &mut scratch).is_err());
    };
    refused(back, &["nothing is asked for"]);
    refused(back.d_qk(view(7, [1, 2, 9, 8])), &["`d_qk`", "length must be 10", "got 9"]);
    refused(back.d_qk(typed(7, DType::Bool, wide)), &["`d_qk`", "F32, F16 or BF16"]);
    refused(back.d_v(view(6, wide)), &["`d_v`", "`d_out`"]);
    refused(back.d_v(view(4, wide)), &["`d_v`", "`buckets`"]);
    refused(back.d_v(view(7, wide)).d_qk(view(7, wide)), &["overlap"]);
    refused(back.d_v(view(7, wide)).d_lse(view(8, wide)), &["`d_lse`", "must be 1"]);
    refused(back.d_v(view(7, wide).with_strides([0, 0, 0, 1])), &["`d_v`", "share memory"]);
    refused(back.d_v(view(7, wide)), &["scratch"]);
    let lacking = LshAttention::with_pipelines(defaults().gpu.pipelines(), config.dtype(DType::F16));
    assert!(lacking.expect_err("no f16").to_string().contains("SHADER_F16"));
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    assert!(operator.forward(&mut encoder, &good, &mut scratch).is_ok());
}
