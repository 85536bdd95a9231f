//! Attention within buckets of a hash: cases, runs and comparison with the reference.

use wgpu_attention::inspect::magnitudes::lsh_attention_backward_magnitudes;
use wgpu_attention::lsh::{LshAttention, LshBackward, LshConfig, LshForward};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{
    LshAttended, LshHashed, LshShape, lsh_attention, lsh_attention_backward, lsh_buckets, widen,
};
use wgpu_attention::tuning::{MatrixUnits, Target};
use wgpu_attention::{DType, KernelOptions, Scratch};

use super::case::{Judged, largest, widened};
use super::device::Profile;
use super::memory::{Values, stored};
use super::random::Rng;
use super::run::{Layout, Placed};

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

/// The device, target, types and layout of a run.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub profile: &'static Profile,
    pub form: Target,
    pub layout: Layout,
    pub dtype: DType,
    /// The type of rotations.
    pub rotations: DType,
    pub gradient: DType,
    pub accumulates: bool,
}

impl Setup {
    pub fn plain(profile: &'static Profile, form: Target, layout: Layout) -> Self {
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

/// The results of a run.
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

    pub fn stored(&self, setup: &Setup) -> Self {
        let own = |x: &[f32]| stored(x, setup.dtype);
        let rotations = stored(&self.rotations, setup.rotations);
        Case { qk: own(&self.qk), v: own(&self.v), d_out: own(&self.d_out), rotations, ..self.clone() }
    }

    pub fn hashed<'a, R>(&'a self, buckets: &'a [u32], keys: Option<&'a [R]>) -> LshHashed<'a, R> {
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

    pub fn before(&self, n: usize, setup: &Setup) -> Vec<f32> {
        let length = if n == 0 { self.qk.len() } else { self.v.len() };
        stored(&Rng::new(n as u64 + 77).normals(length), setup.gradient)
    }

    /// Checks that buckets are the reference's, except where two sums are closer than their
    /// rounding.
    pub fn check_buckets(&self, got: &[u32]) -> Result<(), String> {
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

    /// Computes the case in f32 with the intermediate tensors as stored: normalised keys, and the
    /// output.
    pub fn naive(&self, buckets: &[u32], dtype: DType) -> (LshAttended<f32>, [Vec<f32>; 2]) {
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
            let of = row * value_dim..(row + 1) * value_dim;
            let rounding = as_stored[of.clone()].iter().zip(&attended.out[of.clone()]);
            *d_lse -= self.d_out[of].iter().zip(rounding).map(|(d, (a, b))| d * (a - b)).sum::<f32>();
        }
        let got = lsh_attention_backward(&self.qk, &self.v, &self.d_out, Some(&d_lse), &hashed, self.shape);
        let got = got.expect("it fits");
        (attended, [got.d_qk, got.d_v])
    }

    pub fn gradients(&self, buckets: &[u32], magnitudes: bool) -> [Vec<f64>; 2] {
        let [qk, v, d_out, d_lse] = [&self.qk, &self.v, &self.d_out, &self.d_lse].map(|x| widen::<f64>(x));
        let hashed = self.hashed(buckets, None);
        let of = if magnitudes { lsh_attention_backward_magnitudes } else { lsh_attention_backward };
        let got = of(&qk, &v, &d_out, Some(&d_lse), &hashed, self.shape).expect("it fits");
        [got.d_qk, got.d_v]
    }

    /// Returns the largest error over tolerance of results that were computed with these buckets.
    pub fn judge(&self, got: &Got, setup: &Setup) -> Result<f64, String> {
        let [qk, v] = [&self.qk, &self.v].map(|x| widen::<f64>(x));
        let exact = lsh_attention(&qk, &v, &self.hashed(&got.buckets, None), self.shape).expect("it fits");
        let (naive, naive_gradients) = self.naive(&got.buckets, setup.dtype);
        let out = Judged::new(&widened(&naive.out, setup.dtype), exact.out, largest(v));
        let mut worst = out.judge(&got.out).map_err(|e| format!("out: {e}"))?;
        let length = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let scores = largest(qk.chunks_exact(self.shape.head_dim).map(length));
        let scores = scores / (self.shape.head_dim as f64).sqrt();
        // A weight is as far off as its score and lse are, half a unit in the last place each.
        let of_scores = 1.0 + scores / 4.0;
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
            let tolerance = Tolerance::gradient(&naive, &want, magnitude * of_scores, EPSILON_F32);
            let share = Judged { want, tolerance }.judge(&got.gradients[n]);
            worst = worst.max(share.map_err(|e| format!("{name}: {e}"))?);
        }
        Ok(worst)
    }

    pub fn config(&self, setup: &Setup) -> LshConfig {
        let LshShape { heads, head_dim, value_dim, .. } = self.shape;
        let units = if setup.profile.matrix { MatrixUnits::Always } else { MatrixUnits::Auto };
        LshConfig::new(heads, head_dim, self.rounds, self.n_buckets, self.chunk)
            .value_dim(value_dim)
            .dtype(setup.dtype)
            .causal(self.causal)
            .kernel_options(KernelOptions::new().target(setup.form).matrix_units(units))
    }

    /// Runs forward and backward twice. `buckets` replaces the buckets of the rotations.
    pub async fn run_async(&self, setup: &Setup, buckets: Option<&[u32]>) -> Result<Got, String> {
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
        // Rows that are not tokens may hold anything.
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
        let mut first: Option<Got> = None;
        for _ in 0..2 {
            let hashes = match buckets {
                Some(buckets) => Placed::input(profile, Values::Numbers(buckets), DType::U32, buckets_at),
                None => Placed::output(profile, DType::U32, buckets_at),
            };
            let out = Placed::output(profile, dtype, out_at);
            let lse = Placed::output(profile, DType::F32, lse_at);
            let call = match buckets {
                Some(_) => LshForward::with_buckets(qk.view(), v.view(), hashes.view(), out.view()),
                None => LshForward::new(qk.view(), v.view(), rotations.view(), hashes.view(), out.view()),
            };
            let call = call.lse(lse.view()).lengths(lengths.as_ref().map(Placed::view));
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
            let back = LshBackward::new(call, d_out.view())
                .d_lse(d_lse.view())
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
                buckets: hashes
                    .download_async("buckets", profile)
                    .await?
                    .into_iter()
                    .map(|x| x as u32)
                    .collect(),
                out: out.download_async("out", profile).await?,
                lse: lse.download_async("lse", profile).await?,
                gradients: [
                    results[0].download_async("d_qk", profile).await?,
                    results[1].download_async("d_v", profile).await?,
                ],
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

    /// Returns the largest error over tolerance.
    pub async fn outcome_async(&self, setup: &Setup) -> Result<f64, String> {
        let case = self.stored(setup);
        let got = case.run_async(setup, None).await?;
        case.check_buckets(&got.buckets)?;
        case.judge(&got, setup)
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl Case {
    /// Like `run_async`, blocking.
    pub fn run(&self, setup: &Setup, buckets: Option<&[u32]>) -> Result<Got, String> {
        pollster::block_on(self.run_async(setup, buckets))
    }

    /// Like `outcome_async`, blocking.
    pub fn outcome(&self, setup: &Setup) -> Result<f64, String> {
        pollster::block_on(self.outcome_async(setup))
    }
}
