//! Attention over keys and values that are projected along the length: vectors, gradients, limits, bad input.

use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{
    self, Attended, LengthProjections, LinformerGradients, Options, Real, widen,
};
use wgpu_attention::{
    Attention, Config, DType, Forward, KernelForm, Linformer, LinformerBackward, LinformerForward,
    MatrixUnits, Scratch, Shape, TensorView, Tuning,
};

use crate::harness::case::{largest, widened};
use crate::harness::gradients::{Compared, Input, compare_differences};
use crate::harness::run::{Layout, Placed};
use crate::harness::{
    FORMS, Judged, Profile, Report, Rng, Values, Vector, defaults, due, full, matrices, rest, stored,
};

pub const FAMILY: &str = "linear";
pub const NAMES: &[&str] = &["linformer_per_head", "linformer_shared"];

const GRADIENTS: [&str; 5] = ["d_q", "d_k", "d_v", "d_e", "d_f"];

/// A problem with its data, in f32.
#[derive(Clone, Debug)]
pub struct Case {
    pub shape: Shape,
    pub rank: usize,
    pub per_head: bool,
    /// Whether `e` projects values too.
    pub shared: bool,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub e: Vec<f32>,
    pub f: Vec<f32>,
    pub d_out: Vec<f32>,
    pub d_lse: Vec<f32>,
    /// `[batch, kv_len]`.
    pub key_mask: Option<Vec<bool>>,
}

/// Where and how it runs.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub profile: &'static Profile,
    pub form: KernelForm,
    pub layout: Layout,
    pub dtype: DType,
    /// Of e and f.
    pub projection: DType,
    /// Of gradients.
    pub gradient: DType,
    pub weights: bool,
    pub accumulates: bool,
}

impl Setup {
    pub fn plain(profile: &'static Profile, form: KernelForm, layout: Layout) -> Self {
        let f32 = DType::F32;
        Setup {
            profile,
            form,
            layout,
            dtype: f32,
            projection: f32,
            gradient: f32,
            weights: false,
            accumulates: false,
        }
    }
}

impl std::fmt::Display for Setup {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Setup { profile, form, layout, dtype, projection, gradient, weights, accumulates } = self;
        write!(f, "{}, {form:?}, {layout:?}, {dtype:?} by {projection:?}, ", profile.name)?;
        write!(f, "gradients {gradient:?}, weights {weights}, adds {accumulates}")
    }
}

/// What a run gives, or must give: out, lse, weights, gradients.
struct Results<T> {
    out: T,
    lse: T,
    weights: Option<T>,
    gradients: [T; 5],
}

fn of_gradients<R>(got: LinformerGradients<R>) -> [Vec<R>; 5] {
    [got.d_q, got.d_k, got.d_v, got.d_e, got.d_f]
}

/// `projection · x` for each head, or `projectionᵀ · x` of `rank` rows.
fn along<R: Real>(case: &Case, projection: &[R], x: &[R], dim: usize, back: bool) -> Vec<R> {
    let Shape { batch, kv_heads, kv_len, .. } = case.shape;
    let (from, to) = if back { (case.rank, kv_len) } else { (kv_len, case.rank) };
    let mut sums = vec![R::zero(); batch * kv_heads * to * dim];
    for (n, sum) in sums.iter_mut().enumerate() {
        let (d, row, group) = (n % dim, n / dim % to, n / dim / to);
        let first = if case.per_head { group % kv_heads * case.rank } else { 0 };
        for i in 0..from {
            let (r, j) = if back { (i, row) } else { (row, i) };
            if case.key_mask.as_ref().is_none_or(|mask| mask[group / kv_heads * kv_len + j]) {
                *sum = *sum + projection[(first + r) * kv_len + j] * x[(group * from + i) * dim + d];
            }
        }
    }
    sums
}

impl Case {
    pub fn random(name: &str, shape: Shape, rank: usize, per_head: bool) -> Self {
        let rng = &mut Rng::named(name);
        let mut normals = |shape: [usize; 4]| rng.normals(shape.iter().product());
        let of_e = [1, if per_head { shape.kv_heads } else { 1 }, rank, shape.kv_len];
        let [q, k, v, d_out, d_lse] =
            [shape.q(), shape.k(), shape.v(), shape.out(), shape.lse()].map(&mut normals);
        let narrow = 1.0 / (shape.kv_len as f32).sqrt();
        let [e, f] = [0, 1].map(|_| normals(of_e).iter().map(|x| x * narrow).collect());
        Case { shape, rank, per_head, shared: false, q, k, v, e, f, d_out, d_lse, key_mask: None }
    }

    /// Some keys of each sequence, of the last none.
    pub fn masked(mut self, all_of_one: bool) -> Self {
        let Shape { batch, kv_len, .. } = self.shape;
        let rng = &mut Rng::new(9);
        let there = |n: usize, x: f64| x < 0.7 && !(all_of_one && n / kv_len == batch - 1);
        self.key_mask = Some((0..batch * kv_len).map(|n| there(n, rng.unit())).collect());
        self
    }

    pub fn sharing(mut self) -> Self {
        self.f = self.e.clone();
        self.shared = true;
        self
    }

    fn stored(&self, setup: &Setup) -> Self {
        let own = |x: &[f32]| stored(x, setup.dtype);
        let of = |x: &[f32]| stored(x, setup.projection);
        Case {
            q: own(&self.q),
            k: own(&self.k),
            v: own(&self.v),
            d_out: own(&self.d_out),
            e: of(&self.e),
            f: of(&self.f),
            ..self.clone()
        }
    }

    fn projections<'a, R>(&'a self, e: &'a [R], f: &'a [R]) -> LengthProjections<'a, R> {
        let key_mask = self.key_mask.as_deref();
        LengthProjections { e, f, rank: self.rank, per_head: self.per_head, key_mask }
    }

    fn projection_shape(&self) -> [usize; 4] {
        [1, if self.per_head { self.shape.kv_heads } else { 1 }, self.rank, self.shape.kv_len]
    }

    fn forward<R: Real>(&self, of: impl Fn(&[f32]) -> Vec<R>) -> Attended<R> {
        let (e, f) = (of(&self.e), of(&self.f));
        let options = Options::new().weights(true);
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| of(x));
        let got = reference::linformer(&q, &k, &v, &self.projections(&e, &f), self.shape, &options);
        got.expect("it fits")
    }

    fn backward(&self, magnitudes: bool) -> [Vec<f64>; 5] {
        let [q, k, v, e, f, d_out, d_lse] =
            [&self.q, &self.k, &self.v, &self.e, &self.f, &self.d_out, &self.d_lse].map(|x| widen::<f64>(x));
        let by = self.projections(&e, &f);
        let of =
            if magnitudes { reference::linformer_backward_magnitudes } else { reference::linformer_backward };
        let got = of(&q, &k, &v, &by, &d_out, Some(&d_lse), self.shape, &Options::new());
        self.together(of_gradients(got.expect("it fits")))
    }

    /// Where `e` projects values too, its gradient is of both.
    fn together<R: Real>(&self, mut gradients: [Vec<R>; 5]) -> [Vec<R>; 5] {
        if self.shared {
            let of_values = gradients[4].clone();
            gradients[3].iter_mut().zip(of_values).for_each(|(sum, x)| *sum = *sum + x);
        }
        gradients
    }

    /// In f32, with what lies between in memory as it is stored: projected keys and values, and the output.
    fn naive(&self, dtype: DType) -> (Attended<f32>, [Vec<f32>; 5]) {
        let Case { shape, rank, q, k, v, e, f, d_out, .. } = self;
        let Shape { head_dim, value_dim, .. } = *shape;
        let low = Shape { kv_len: *rank, ..*shape };
        let low_k = stored(&along(self, e, k, head_dim, false), dtype);
        let low_v = stored(&along(self, f, v, value_dim, false), dtype);
        let attended = reference::attention(q, &low_k, &low_v, low, &Options::new().weights(true));
        let attended = attended.expect("it fits");
        let as_stored = stored(&attended.out, dtype);
        let mut d_lse = self.d_lse.clone();
        for (row, d_lse) in d_lse.iter_mut().enumerate() {
            for n in row * value_dim..(row + 1) * value_dim {
                *d_lse -= d_out[n] * (as_stored[n] - attended.out[n]);
            }
        }
        let got = reference::attention_backward(q, &low_k, &low_v, d_out, Some(&d_lse), low, &Options::new());
        let got = got.expect("it fits");
        let d_k = along(self, e, &got.d_k, head_dim, true);
        let d_v = along(self, f, &got.d_v, value_dim, true);
        let d_e = self.of_projection(&got.d_k, k, head_dim);
        let d_f = self.of_projection(&got.d_v, v, value_dim);
        (attended, self.together([got.d_q, d_k, d_v, d_e, d_f]))
    }

    fn of_projection(&self, d_low: &[f32], x: &[f32], dim: usize) -> Vec<f32> {
        let Shape { batch, kv_heads, kv_len, .. } = self.shape;
        let mut sums = vec![0f32; self.e.len()];
        for group in 0..batch * kv_heads {
            let first = if self.per_head { group % kv_heads * self.rank } else { 0 };
            for (r, j) in (0..self.rank).flat_map(|r| (0..kv_len).map(move |j| (r, j))) {
                if self.key_mask.as_ref().is_none_or(|mask| mask[group / kv_heads * kv_len + j]) {
                    for d in 0..dim {
                        sums[(first + r) * kv_len + j] +=
                            d_low[(group * self.rank + r) * dim + d] * x[(group * kv_len + j) * dim + d];
                    }
                }
            }
        }
        sums
    }

    fn before(&self, n: usize, setup: &Setup) -> Vec<f32> {
        let lengths = [self.q.len(), self.k.len(), self.v.len(), self.e.len(), self.f.len()];
        stored(&Rng::new(n as u64 + 77).normals(lengths[n]), setup.gradient_of(n))
    }

    fn truth(&self, setup: &Setup) -> Results<Judged> {
        let exact = self.forward::<f64>(widen);
        let (naive, naive_gradients) = self.naive(setup.dtype);
        // What values are multiplied by before they are summed.
        let sums = along(self, &abs(&self.f), &abs(&self.v), self.shape.value_dim, false);
        let keys = along(self, &abs(&self.e), &abs(&self.k), self.shape.head_dim, false);
        let values = largest(sums);
        let scores = largest(keys) * largest(self.q.iter().map(|x| f64::from(*x)));
        let scores = scores * (self.shape.head_dim as f64).sqrt();
        let out = Judged::new(&widened(&naive.out, setup.dtype), exact.out, values);
        let lse = Judged::new(&widened(&naive.lse, DType::F32), exact.lse, scores + 1.0);
        let weights = naive.weights.zip(exact.weights);
        let weights = weights.map(|(naive, exact)| Judged::new(&widened(&naive, DType::F32), exact, 1.0));
        let exact = self.backward(false);
        let magnitudes = self.backward(true);
        let gradients = [0, 1, 2, 3, 4].map(|n| {
            let (mut want, mut naive) = (exact[n].clone(), naive_gradients[n].clone());
            let mut magnitude = largest(magnitudes[n].iter().copied());
            if setup.accumulates {
                let before = self.before(n, setup);
                want.iter_mut().zip(&before).for_each(|(x, b)| *x += f64::from(*b));
                naive.iter_mut().zip(&before).for_each(|(x, b)| *x += b);
                magnitude += largest(before.iter().map(|x| f64::from(*x)));
            }
            let naive = widened(&naive, setup.gradient_of(n));
            // An output of few bits has few bits of what is subtracted.
            Judged { tolerance: Tolerance::gradient(&naive, &want, magnitude, EPSILON_F32), want }
        });
        Results { out, lse, weights, gradients }
    }

    fn run(&self, setup: &Setup, units: MatrixUnits) -> Result<Results<Vec<f64>>, String> {
        let Setup { profile, form, layout, dtype, projection, .. } = *setup;
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        profile.tidy();
        let of_e = self.projection_shape();
        let wide = [batch, 1, 1, kv_len];
        let shape = self.shape;
        let [q_at, k_at, v_at, e_at, f_at, out_at, lse_at, mask_at, weights_at] = layout.places([
            shape.q(),
            shape.k(),
            shape.v(),
            of_e,
            of_e,
            shape.out(),
            shape.lse(),
            wide,
            [batch, heads, q_len, self.rank],
        ]);
        let floats = |x: &[f32], dtype, at| Placed::input(profile, Values::Floats(x), dtype, at);
        // What is not there may hold anything.
        let hidden = |x: &[f32], dim: usize| -> Vec<f32> {
            let there = |n: usize| {
                let (j, b) = (n / dim % kv_len, n / dim / kv_len / kv_heads);
                self.key_mask.as_ref().is_none_or(|mask| mask[b * kv_len + j])
            };
            x.iter().enumerate().map(|(n, x)| if there(n) { *x } else { f32::NAN }).collect()
        };
        let q = floats(&self.q, dtype, q_at);
        let k = floats(&hidden(&self.k, head_dim), dtype, k_at);
        let v = floats(&hidden(&self.v, value_dim), dtype, v_at);
        let e = floats(&self.e, projection, e_at);
        let f = (!self.shared).then(|| floats(&self.f, projection, f_at));
        let mask =
            self.key_mask.as_ref().map(|m| Placed::input(profile, Values::Bools(m), DType::Bool, mask_at));
        let d_out = floats(&self.d_out, dtype, out_at);
        let d_lse = floats(&self.d_lse, DType::F32, lse_at);
        let out = Placed::output(profile, dtype, out_at);
        let lse = Placed::output(profile, DType::F32, lse_at);
        let weights = setup.weights.then(|| Placed::output(profile, DType::F32, weights_at));
        let config = Config::new(heads, head_dim)
            .kv_heads(kv_heads)
            .value_dim(value_dim)
            .dtype(dtype)
            .tuning(Tuning::new().form(form).matrix_units(units));
        let refused = |e: wgpu_attention::Error| format!("refused: {e}");
        let operator =
            Linformer::with_pipelines(profile.gpu.pipelines(), config, self.rank).map_err(refused)?;
        let of_f = f.as_ref().map(Placed::view);
        let of_mask = mask.as_ref().map(Placed::view);
        let call = LinformerForward::new(q.view(), k.view(), v.view(), e.view(), out.view())
            .f(of_f)
            .key_mask(of_mask)
            .lse(lse.view())
            .weights(weights.as_ref().map(Placed::view));
        let results = [0, 1, 2, 3, 4].map(|n| {
            let shape = [shape.q(), shape.k(), shape.v(), of_e, of_e][n];
            let layout = match layout {
                Layout::Window(seed) => Layout::Window(seed ^ (n as u64 + 1) << 8),
                layout => layout,
            };
            let ([at], dtype) = (layout.places([shape]), setup.gradient_of(n));
            match setup.accumulates {
                true => Placed::holding(profile, &self.before(n, setup), dtype, at),
                false => Placed::output(profile, dtype, at),
            }
        });
        let inputs = [q.view(), k.view(), v.view()];
        let back = LinformerBackward::new(inputs, e.view(), out.view(), lse.view(), d_out.view())
            .f(of_f)
            .key_mask(of_mask)
            .d_lse(d_lse.view())
            .d_q(results[0].view())
            .d_k(results[1].view())
            .d_v(results[2].view())
            .d_e(results[3].view())
            .d_f((!self.shared).then(|| results[4].view()))
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
        let read = |what: &str, t: &Placed| pollster::block_on(t.download_async(what, profile));
        let mut gradients: [Vec<f64>; 5] = Default::default();
        for (n, result) in results.iter().enumerate() {
            if n < 4 || !self.shared {
                gradients[n] = read(GRADIENTS[n], result)?;
            }
        }
        Ok(Results {
            out: read("out", &out)?,
            lse: read("lse", &lse)?,
            weights: weights.as_ref().map(|w| read("weights", w)).transpose()?,
            gradients,
        })
    }

    /// Largest error over tolerance.
    pub fn outcome(&self, setup: &Setup) -> Result<f64, String> {
        let units = if setup.profile.matrix { MatrixUnits::Always } else { MatrixUnits::Auto };
        let case = self.stored(setup);
        let got = case.run(setup, units)?;
        let truth = case.truth(setup);
        let mut worst = truth.out.judge(&got.out).map_err(|e| format!("out: {e}"))?;
        worst = worst.max(truth.lse.judge(&got.lse).map_err(|e| format!("lse: {e}"))?);
        if let Some((judged, got)) = truth.weights.zip(got.weights) {
            worst = worst.max(judged.judge(&got).map_err(|e| format!("weights: {e}"))?);
        }
        for n in (0..5).filter(|n| *n < 4 || !self.shared) {
            let share = truth.gradients[n].judge(&got.gradients[n]);
            worst = worst.max(share.map_err(|e| format!("{}: {e}", GRADIENTS[n]))?);
        }
        Ok(worst)
    }
}

impl Setup {
    /// Queries' gradients are of their type or F32.
    fn gradient_of(&self, n: usize) -> DType {
        if n == 0 && self.gradient != self.dtype { DType::F32 } else { self.gradient }
    }
}

fn abs(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(x.abs())).collect()
}

fn case(name: &str) -> (Case, Vector) {
    let vector = Vector::load(FAMILY, name);
    let [batch, heads, q_len, head_dim] = vector.shape4("q");
    let shape = Shape { kv_len: vector.shape4("k")[2], ..Shape::new(batch, heads, q_len, head_dim) };
    let case = Case::random(name, shape, vector.size("rank"), vector.attrs["per_head"] == true);
    let [q, k, v, e, f] = ["q", "k", "v", "e", "f"].map(|name| vector.f32(name));
    (Case { q, k, v, e, f, ..case }, vector)
}

#[test]
fn the_reference_gives_the_vectors() {
    for name in NAMES {
        let (case, vector) = case(name);
        let got = case.forward::<f64>(widen);
        let near =
            |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-7);
        assert!(near(&got.out, &vector.f64("out")), "{name}");
        assert!(near(&got.weights.expect("weights"), &vector.f64("weights")), "{name}");
    }
}

#[test]
fn vectors_forward_and_backward_on_every_form() {
    let mut report = Report::new("linformer vectors");
    for name in NAMES {
        let (case, vector) = case(name);
        for profile in [full(), defaults()] {
            for form in FORMS {
                for layout in [Layout::Dense, Layout::Window(5)] {
                    let setup = Setup { weights: true, ..Setup::plain(profile, form, layout) };
                    let check = || {
                        let got = case.run(&setup, MatrixUnits::Auto)?;
                        for (name, got) in [("out", Some(got.out)), ("weights", got.weights)] {
                            let (want, tolerance) = vector.expected(name).ok_or("not in the vector")?;
                            let got = got.ok_or("not written")?;
                            Judged { want, tolerance }.judge(&got).map_err(|e| format!("{name}: {e}"))?;
                        }
                        case.outcome(&setup)
                    };
                    report.record(name, &setup, check());
                }
            }
        }
    }
    report.finish();
}

#[test]
fn every_shape_matches_the_reference() {
    let mut report = Report::new("linformer");
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 7, kv_len: 67, head_dim: 12, value_dim: 21 };
    let wide = Shape { batch: 3, kv_heads: 4, kv_len: 130, head_dim: 16, value_dim: 8, ..shape };
    let one = Shape { batch: 3, heads: 1, kv_heads: 1, q_len: 1, kv_len: 1, head_dim: 1, value_dim: 1 };
    let cases = [
        ("shared", Case::random("shared", shape, 9, false)),
        ("per head", Case::random("per head", wide, 16, true)),
        ("one projection for both", Case::random("both", wide, 65, false).sharing()),
        ("masked", Case::random("masked", shape, 5, true).masked(true)),
        ("masked, one projection", Case::random("masked both", wide, 12, false).sharing().masked(false)),
        ("one of everything", Case::random("one", one, 1, false)),
    ];
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    for (n, (name, case)) in cases.iter().enumerate() {
        for (m, form) in FORMS.into_iter().enumerate() {
            for profile in [full(), defaults()] {
                let plain = Setup::plain(profile, form, Layout::Dense);
                let setups = [
                    plain,
                    Setup { layout: Layout::Blhd, weights: true, ..plain },
                    Setup { layout: Layout::Window(2 * n as u64 + 1), accumulates: true, ..plain },
                    Setup { dtype: f16, projection: f16, gradient: f16, layout: Layout::Blhd, ..plain },
                    Setup { dtype: bf16, gradient: bf16, ..plain },
                    Setup { dtype: f16, projection: f32, layout: Layout::Window(3), ..plain },
                ];
                for (s, setup) in setups.into_iter().enumerate() {
                    let usual = (n + m + s) % 3 == 0 && (profile.name == "full") == (s % 2 == 0);
                    let key = format!("linformer {name}, {setup}");
                    if !(usual && due(&key) || rest(&key)) {
                        continue;
                    }
                    if setup.dtype == f16 && !profile.f16 {
                        report.skip_f16(profile, name);
                        continue;
                    }
                    report.record(name, &setup, case.outcome(&setup));
                }
            }
        }
    }
    report.finish();
}

/// What insists on matrix units has them for the attention.
#[test]
fn matrix_units_attend_to_projected_keys() {
    for profile in matrices().filter(|profile| profile.compiles_fast()) {
        let case = Case::random("matrix", Shape::new(1, 2, 40, 16), 32, false);
        let setup = Setup { dtype: DType::F16, ..Setup::plain(profile, KernelForm::Cpu, Layout::Dense) };
        let case = case.stored(&setup);
        let got = case.run(&setup, MatrixUnits::Always).expect("a run");
        let Judged { want, tolerance } = case.truth(&setup).out;
        // They round weights to f16.
        let absolute = tolerance.absolute + 2f64.powi(-11) * 4.0;
        Judged { want, tolerance: Tolerance { absolute } }.judge(&got.out).expect("near");
    }
}

/// With the identity as its projections it is attention.
#[test]
fn the_identity_projects_to_attention() {
    let profile = full();
    let shape = Shape { q_len: 20, ..Shape::new(2, 2, 33, 16) };
    let mut case = Case::random("identity", shape, 33, false);
    case.e = (0..33 * 33).map(|n| f32::from(u8::from(n / 33 == n % 33))).collect();
    case.f = case.e.clone();
    let options = Options::new();
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| widen::<f64>(x));
    let want = reference::attention(&q, &k, &v, shape, &options).expect("it fits");
    assert_eq!(case.forward::<f64>(widen).out, want.out);
    for form in FORMS {
        let setup = Setup::plain(profile, form, Layout::Dense);
        let got = case.run(&setup, MatrixUnits::Auto).expect("a run");
        // The products add zeros to each key: what the attention itself gives, to the bit.
        let gpu = &profile.gpu;
        let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| gpu.upload(x).expect("an upload"));
        let out = gpu.buffer(4 * case.d_out.len()).expect("a buffer");
        let config = Config::new(2, 16).tuning(Tuning::new().form(form));
        let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("attention");
        let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
        let (of_q, of_k) = (shape.q(), shape.k());
        let call = Forward::new(view(&q, of_q), view(&k, of_k), view(&v, of_k), view(&out, of_q));
        let size = attention.scratch_size(&call).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        gpu.submit(|e| attention.forward(e, &call, &mut scratch)).expect("attention");
        let plain: Vec<f32> = gpu.download(&out, case.d_out.len()).expect("out");
        assert!(plain.iter().zip(&got.out).all(|(a, b)| f64::from(*a) == *b), "{form:?}");
    }
}

#[test]
fn the_references_gradients_are_those_of_differences() {
    let mut compared = Compared::new();
    let shape = Shape { batch: 2, heads: 2, kv_heads: 1, q_len: 3, kv_len: 5, head_dim: 2, value_dim: 3 };
    for (per_head, masked) in [(false, false), (true, true), (false, true)] {
        let mut case = Case::random("differences", shape, 3, per_head);
        if masked {
            case = case.masked(false);
        }
        let all = [&case.q, &case.k, &case.v, &case.e, &case.f].map(|x| widen::<f64>(x));
        let (d_out, d_lse) = (widen::<f64>(&case.d_out), widen::<f64>(&case.d_lse));
        let gradients = case.backward(false);
        let names = ["q", "k", "v", "e", "f"];
        let inputs: Vec<_> = (0..5).map(|n| Input::new(names[n], &all[n], &gradients[n])).collect();
        let loss = |x: &[Vec<f64>]| {
            let by = case.projections(&x[3], &x[4]);
            let got = reference::linformer(&x[0], &x[1], &x[2], &by, shape, &Options::new());
            let got = got.expect("it fits");
            let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
            dot(&got.out, &d_out) + dot(&got.lse, &d_lse)
        };
        compare_differences("linformer", &inputs, usize::MAX, &mut compared, loss).expect("differences");
    }
    assert!(["q", "k", "v", "e", "f"].iter().all(|name| compared[name] > 0), "{compared:?}");
    let case = Case::random("short", shape, 3, false);
    let [q, k, v, e] = [&case.q, &case.k, &case.v, &case.e].map(|x| widen::<f64>(x));
    let by = case.projections(&e[1..], &e);
    assert!(reference::linformer(&q, &k, &v, &by, shape, &Options::new()).is_err());
}

#[test]
fn bad_calls_are_refused_before_anything_is_recorded() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..14).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let (wide, keys, low, row) = ([1, 2, 4, 8], [1, 2, 6, 8], [1, 1, 3, 6], [1, 2, 4, 1]);
    let [q, k, v, e, out] = [view(0, wide), view(1, keys), view(2, keys), view(3, low), view(4, wide)];
    let pipelines = gpu.pipelines();
    assert!(Linformer::with_pipelines(pipelines, Config::new(2, 8), 0).is_err());
    assert!(Linformer::with_pipelines(pipelines, Config::new(0, 8), 3).is_err());
    let operator = Linformer::with_pipelines(pipelines, Config::new(2, 8), 3).expect("an operator");
    let good = LinformerForward::new(q, k, v, e, out);
    let size = operator.scratch_size(&good).expect("a size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    let mut refused = |call: LinformerForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward_in_pass(&mut pass, &call, &mut scratch).is_err());
        assert!(operator.prepare(&call, &mut scratch).is_err());
    };
    let of = |q, k, v, e, out| LinformerForward::new(q, k, v, e, out);
    refused(of(typed(0, DType::BF16, wide), k, v, e, out), &["`q`", "F32", "BF16"]);
    refused(of(q, view(1, [1, 2, 6, 7]), v, e, out), &["`k`", "dim must be 8", "got 7"]);
    refused(of(q, k, view(2, [1, 2, 5, 8]), e, out), &["`v`", "length must be 6", "got 5"]);
    refused(of(q, k, v, view(3, [1, 1, 2, 6]), out), &["`e`", "must be 3", "got 2"]);
    refused(of(q, k, v, view(3, [1, 1, 3, 5]), out), &["`e`", "must be 6", "got 5"]);
    refused(of(q, k, v, view(3, [1, 3, 3, 6]), out), &["`e`", "must be 2", "got 3"]);
    refused(of(q, k, v, typed(3, DType::U32, low), out), &["`e`", "F32, F16 or BF16", "U32"]);
    refused(of(q, k, v, e, view(3, wide)), &["`out`", "`e`"]);
    refused(good.f(view(5, [2, 1, 3, 6])), &["`f`", "batch must be 1", "got 2"]);
    refused(good.f(view(4, low)), &["`out`", "`f`"]);
    refused(good.key_mask(view(6, [1, 1, 1, 6])), &["`key_mask`", "Bool", "F32"]);
    refused(good.key_mask(typed(6, DType::Bool, [1, 1, 1, 5])), &["`key_mask`", "must be 6", "got 5"]);
    refused(good.key_mask(typed(6, DType::Bool, [1, 2, 1, 6])), &["`key_mask`", "heads"]);
    refused(good.lse(view(7, wide)), &["`lse`", "must be 1", "got 8"]);
    refused(good.weights(view(7, [1, 2, 4, 6])), &["`weights`", "must be 3", "got 6"]);
    refused(good.key_mask(typed(6, DType::Bool, [1, 1, 1, 6])), &["scratch", "kept"]);

    let [lse, d_out] = [view(7, row), view(8, wide)];
    let back = LinformerBackward::new([q, k, v], e, out, lse, d_out);
    let mut refused = |call: LinformerBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.backward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward_in_pass(&mut pass, &call, &mut scratch).is_err());
        assert!(operator.prepare_backward(&call, &mut scratch).is_err());
    };
    refused(back, &["nothing is asked for"]);
    refused(back.d_f(view(9, low)), &["`f`", "d_e"]);
    refused(back.d_q(view(9, keys)), &["`d_q`", "length must be 4", "got 6"]);
    refused(back.d_q(typed(9, DType::BF16, wide)), &["`d_q`", "F32", "BF16"]);
    refused(back.d_k(view(1, keys)), &["`d_k`", "`k`"]);
    refused(back.d_e(view(9, [1, 2, 3, 6])), &["`d_e`", "heads must be 1", "got 2"]);
    refused(back.d_e(view(9, low)).d_k(view(9, keys)), &["overlap"]);
    refused(back.d_lse(typed(10, DType::F16, row)).d_e(view(9, low)), &["`d_lse`", "F32", "F16"]);
    refused(LinformerBackward::new([q, k, v], e, out, view(7, wide), d_out).d_e(view(9, low)), &["`lse`"]);
    refused(LinformerBackward::new([q, k, v], e, out, lse, view(8, keys)).d_e(view(9, low)), &["`d_out`"]);
    refused(back.d_v(view(9, keys).with_strides([0, 0, 0, 1])), &["`d_v`", "share memory"]);
    refused(back.d_v(view(9, keys)), &["scratch"]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    assert!(operator.forward(&mut encoder, &good, &mut scratch).is_ok());
}
