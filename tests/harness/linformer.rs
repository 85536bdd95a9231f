//! Attention over keys and values that are projected along the length: cases, runs and comparison
//! with the reference.

use wgpu_attention::inspect::magnitudes::linformer_backward_magnitudes;
use wgpu_attention::linformer::{Linformer, LinformerBackward, LinformerForward};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{
    self, Attended, LengthProjections, LinformerGradients, Options, Real, widen,
};
use wgpu_attention::tuning::{MatrixUnits, Target};
use wgpu_attention::{Config, DType, KernelOptions, Scratch, Shape};

use super::case::{Judged, largest, widened};
use super::device::Profile;
use super::memory::{Values, stored};
use super::random::Rng;
use super::run::{Layout, Placed};

const GRADIENTS: [&str; 5] = ["d_q", "d_k", "d_v", "d_e", "d_f"];

/// A problem with its data, in f32.
#[derive(Clone, Debug)]
pub struct Case {
    pub shape: Shape,
    pub rank: usize,
    pub per_head: bool,
    /// True if `e` projects values too.
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

/// The device, target, types and layout of a run.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub profile: &'static Profile,
    pub form: Target,
    pub layout: Layout,
    pub dtype: DType,
    /// The type of e and f.
    pub projection: DType,
    /// The type of gradients.
    pub gradient: DType,
    pub weights: bool,
    pub accumulates: bool,
}

impl Setup {
    pub fn plain(profile: &'static Profile, form: Target, layout: Layout) -> Self {
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

/// The results of a run, or the expected ones: out, lse, weights, gradients.
pub struct Results<T> {
    pub out: T,
    pub lse: T,
    pub weights: Option<T>,
    pub gradients: [T; 5],
}

fn of_gradients<R>(got: LinformerGradients<R>) -> [Vec<R>; 5] {
    [got.d_q, got.d_k, got.d_v, got.d_e, got.d_f]
}

/// Returns `projection · x` for each head, or `projectionᵀ · x` of `rank` rows.
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

    /// Masks some keys of each sequence, and all keys of the last if `all_of_one`.
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

    pub fn stored(&self, setup: &Setup) -> Self {
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

    pub fn projections<'a, R>(&'a self, e: &'a [R], f: &'a [R]) -> LengthProjections<'a, R> {
        let key_mask = self.key_mask.as_deref();
        LengthProjections { e, f, rank: self.rank, per_head: self.per_head, key_mask }
    }

    pub fn projection_shape(&self) -> [usize; 4] {
        [1, if self.per_head { self.shape.kv_heads } else { 1 }, self.rank, self.shape.kv_len]
    }

    pub fn forward<R: Real>(&self, of: impl Fn(&[f32]) -> Vec<R>) -> Attended<R> {
        let (e, f) = (of(&self.e), of(&self.f));
        let options = Options::new().weights(true);
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| of(x));
        let got = reference::linformer(&q, &k, &v, &self.projections(&e, &f), self.shape, &options);
        got.expect("it fits")
    }

    pub fn backward(&self, magnitudes: bool) -> [Vec<f64>; 5] {
        let [q, k, v, e, f, d_out, d_lse] =
            [&self.q, &self.k, &self.v, &self.e, &self.f, &self.d_out, &self.d_lse].map(|x| widen::<f64>(x));
        let by = self.projections(&e, &f);
        let of = if magnitudes { linformer_backward_magnitudes } else { reference::linformer_backward };
        let got = of(&q, &k, &v, &by, &d_out, Some(&d_lse), self.shape, &Options::new());
        self.together(of_gradients(got.expect("it fits")))
    }

    /// If `e` projects values too, adds both gradients.
    fn together<R: Real>(&self, mut gradients: [Vec<R>; 5]) -> [Vec<R>; 5] {
        if self.shared {
            let of_values = gradients[4].clone();
            gradients[3].iter_mut().zip(of_values).for_each(|(sum, x)| *sum = *sum + x);
        }
        gradients
    }

    /// Computes the case in f32 with the intermediate tensors as stored: projected keys and values,
    /// and the output.
    pub fn naive(&self, dtype: DType) -> (Attended<f32>, [Vec<f32>; 5]) {
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

    pub fn before(&self, n: usize, setup: &Setup) -> Vec<f32> {
        let lengths = [self.q.len(), self.k.len(), self.v.len(), self.e.len(), self.f.len()];
        stored(&Rng::new(n as u64 + 77).normals(lengths[n]), setup.gradient_of(n))
    }

    pub fn truth(&self, setup: &Setup) -> Results<Judged> {
        let exact = self.forward::<f64>(widen);
        let (naive, naive_gradients) = self.naive(setup.dtype);
        // Sums of values and keys along the length, which weights and queries multiply.
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
            // An output of few bits leaves few bits in the subtracted term.
            Judged { tolerance: Tolerance::gradient(&naive, &want, magnitude, EPSILON_F32), want }
        });
        Results { out, lse, weights, gradients }
    }

    pub async fn run_async(&self, setup: &Setup, units: MatrixUnits) -> Result<Results<Vec<f64>>, String> {
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
        // Masked rows may hold anything.
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
            .kernel_options(KernelOptions::new().target(form).matrix_units(units));
        let refused = |e: wgpu_attention::Error| format!("refused: {e}");
        let operator =
            Linformer::with_pipelines(profile.gpu.pipelines(), config, self.rank).map_err(refused)?;
        let call = LinformerForward::new(q.view(), k.view(), v.view(), e.view(), out.view())
            .f(f.as_ref().map(Placed::view))
            .key_mask(mask.as_ref().map(Placed::view))
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
        let back = LinformerBackward::new(call, d_out.view())
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
        let mut gradients: [Vec<f64>; 5] = Default::default();
        for (n, result) in results.iter().enumerate() {
            if n < 4 || !self.shared {
                gradients[n] = result.download_async(GRADIENTS[n], profile).await?;
            }
        }
        let weights = match &weights {
            Some(weights) => Some(weights.download_async("weights", profile).await?),
            None => None,
        };
        Ok(Results {
            out: out.download_async("out", profile).await?,
            lse: lse.download_async("lse", profile).await?,
            weights,
            gradients,
        })
    }

    /// Returns the largest error over tolerance.
    pub async fn outcome_async(&self, setup: &Setup) -> Result<f64, String> {
        let units = if setup.profile.matrix { MatrixUnits::Always } else { MatrixUnits::Auto };
        let case = self.stored(setup);
        let got = case.run_async(setup, units).await?;
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
    /// Returns the type of gradient `n`. The queries' gradient has the queries' type or F32.
    fn gradient_of(&self, n: usize) -> DType {
        if n == 0 && self.gradient != self.dtype { DType::F32 } else { self.gradient }
    }
}

fn abs(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(x.abs())).collect()
}

#[cfg(not(target_arch = "wasm32"))]
impl Case {
    /// Like `run_async`, blocking.
    pub fn run(&self, setup: &Setup, units: MatrixUnits) -> Result<Results<Vec<f64>>, String> {
        pollster::block_on(self.run_async(setup, units))
    }

    /// Like `outcome_async`, blocking.
    pub fn outcome(&self, setup: &Setup) -> Result<f64, String> {
        pollster::block_on(self.outcome_async(setup))
    }
}
