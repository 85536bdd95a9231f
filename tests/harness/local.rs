//! Attention to windows around positions: cases, runs and comparison with the reference.

use wgpu_attention::inspect::magnitudes::local_attention_backward_magnitudes;
use wgpu_attention::local::{
    LocalAttention, LocalBackward, LocalConfig, LocalForward, PositionPredictor, PredictorBackward,
    PredictorForward,
};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{
    self, HostLinear, LocalAttended, LocalGradients, LocalOptions, Real, predict_positions,
    predict_positions_backward, widen,
};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, Linear, Scratch, Shape};

use super::case::{Judged, largest, widened};
use super::device::Profile;
use super::memory::{Values, stored};
use super::random::Rng;
use super::run::{Layout, Placed};

const GRADIENTS: [&str; 4] = ["d_q", "d_k", "d_v", "d_positions"];

/// A problem with its data, in f32.
#[derive(Clone, Debug)]
pub struct Case {
    pub shape: Shape,
    pub half_window: usize,
    pub sigma: Option<f64>,
    pub scale: f64,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    /// `[batch, heads, q_len]`, or `[batch, q_len]`.
    pub positions: Vec<f32>,
    pub d_out: Vec<f32>,
    pub lengths: Option<Vec<u32>>,
}

/// The device, target, types and layout of a run.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub profile: &'static Profile,
    pub layout: Layout,
    pub dtype: DType,
    /// The type of gradients, except that of positions.
    pub gradient: DType,
    pub weights: bool,
    pub accumulates: bool,
}

impl Setup {
    pub fn plain(profile: &'static Profile, layout: Layout) -> Self {
        let f32 = DType::F32;
        Setup { profile, layout, dtype: f32, gradient: f32, weights: false, accumulates: false }
    }

    fn gradient_of(&self, n: usize) -> DType {
        if n == 3 { DType::F32 } else { self.gradient }
    }
}

impl std::fmt::Display for Setup {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Setup { profile, layout, dtype, gradient, weights, accumulates } = self;
        write!(f, "{}, {layout:?}, {dtype:?}, gradients {gradient:?}, ", profile.name)?;
        write!(f, "weights {weights}, adds {accumulates}")
    }
}

/// The results of a run, or the expected ones.
pub struct Results<T> {
    pub out: T,
    pub weights: Option<T>,
    pub gradients: [T; 4],
}

fn of_gradients<R>(got: LocalGradients<R>) -> [Vec<R>; 4] {
    [got.d_q, got.d_k, got.d_v, got.d_positions]
}

impl Case {
    /// Draws positions from two keys before the first to two after the last, for each head or for
    /// all.
    pub fn random(name: &str, shape: Shape, half_window: usize, per_head: bool) -> Self {
        let rng = &mut Rng::named(name);
        let mut normals = |shape: [usize; 4]| rng.normals(shape.iter().product());
        let [q, k, v, d_out] = [shape.q(), shape.k(), shape.v(), shape.out()].map(&mut normals);
        let count = shape.batch * shape.q_len * if per_head { shape.heads } else { 1 };
        let positions = (0..count).map(|_| (rng.unit() * (shape.kv_len as f64 + 4.0) - 2.0) as f32);
        let positions = positions.collect();
        let (sigma, scale) = (Some(half_window as f64 / 2.0), 1.0 / (shape.head_dim as f64).sqrt());
        Case { shape, half_window, sigma, scale, q, k, v, positions, d_out, lengths: None }
    }

    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub fn options(&self) -> LocalOptions<'_> {
        let Case { half_window, sigma, scale, lengths, .. } = self;
        let scale = f64::from(*scale as f32);
        LocalOptions { half_window: *half_window, sigma: *sigma, scale, lengths: lengths.as_deref() }
    }

    pub fn config(&self, dtype: DType) -> LocalConfig {
        let Shape { heads, kv_heads, head_dim, value_dim, .. } = self.shape;
        LocalConfig::new(heads, head_dim, self.half_window)
            .kv_heads(kv_heads)
            .value_dim(value_dim)
            .dtype(dtype)
            .sigma(self.sigma)
            .scale(self.scale)
    }

    pub fn stored(&self, setup: &Setup) -> Self {
        let own = |x: &[f32]| stored(x, setup.dtype);
        let [q, k, v, d_out] = [&self.q, &self.k, &self.v, &self.d_out].map(|x| own(x));
        Case { q, k, v, d_out, ..self.clone() }
    }

    pub fn forward<R: Real>(&self, of: impl Fn(&[f32]) -> Vec<R>) -> LocalAttended<R> {
        let [q, k, v, positions] = [&self.q, &self.k, &self.v, &self.positions].map(|x| of(x));
        let got = reference::local_attention(&q, &k, &v, &positions, self.shape, &self.options());
        got.expect("it fits")
    }

    pub fn backward<R: Real>(&self, magnitudes: bool, of: impl Fn(&[f32]) -> Vec<R>) -> [Vec<R>; 4] {
        let [q, k, v, positions, d_out] =
            [&self.q, &self.k, &self.v, &self.positions, &self.d_out].map(|x| of(x));
        let of = if magnitudes {
            local_attention_backward_magnitudes
        } else {
            reference::local_attention_backward
        };
        of_gradients(of(&q, &k, &v, &positions, &d_out, self.shape, &self.options()).expect("it fits"))
    }

    /// Returns the values that gradients are added to.
    fn before(&self, n: usize, setup: &Setup) -> Vec<f32> {
        let len = [&self.q, &self.k, &self.v, &self.positions][n].len();
        stored(&Rng::new(n as u64 + 77).normals(len), setup.gradient_of(n))
    }

    pub fn truth(&self, setup: &Setup) -> Results<Judged> {
        let exact = self.forward::<f64>(widen);
        let naive = self.forward::<f32>(<[f32]>::to_vec);
        let values = largest(self.v.iter().map(|x| f64::from(x.abs())));
        let out = Judged::new(&widened(&naive.out, setup.dtype), exact.out, values);
        let weights = Judged::new(&widened(&naive.weights, DType::F32), exact.weights, 1.0);
        let exact = self.backward::<f64>(false, widen);
        let magnitudes = self.backward::<f64>(true, widen);
        let naive = self.backward::<f32>(false, <[f32]>::to_vec);
        let gradients = [0, 1, 2, 3].map(|n| {
            let (mut want, mut naive) = (exact[n].clone(), naive[n].clone());
            let mut magnitude = largest(magnitudes[n].iter().copied());
            if setup.accumulates {
                let before = self.before(n, setup);
                want.iter_mut().zip(&before).for_each(|(x, b)| *x += f64::from(*b));
                naive.iter_mut().zip(&before).for_each(|(x, b)| *x += b);
                magnitude += largest(before.iter().map(|x| f64::from(x.abs())));
            }
            let naive = widened(&naive, setup.gradient_of(n));
            Judged { tolerance: Tolerance::gradient(&naive, &want, magnitude, EPSILON_F32), want }
        });
        Results { out, weights: setup.weights.then_some(weights), gradients }
    }

    pub async fn run_async(&self, setup: &Setup) -> Result<Results<Vec<f64>>, String> {
        let Setup { profile, layout, dtype, .. } = *setup;
        let shape = self.shape;
        let Shape { batch, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = shape;
        profile.tidy();
        let of_positions = [batch, self.positions.len() / (batch * q_len), q_len, 1];
        let [q_at, k_at, v_at, p_at, out_at, lengths_at, weights_at] = layout.places([
            shape.q(),
            shape.k(),
            shape.v(),
            of_positions,
            shape.out(),
            [batch, 1, 1, 1],
            shape.weights(),
        ]);
        let floats = |x: &[f32], dtype, at| Placed::input(profile, Values::Floats(x), dtype, at);
        // Rows past a sequence's end may hold anything.
        let hidden = |x: &[f32], dim: usize| -> Vec<f32> {
            let there = |n: usize| {
                let (j, b) = (n / dim % kv_len, n / dim / kv_len / kv_heads);
                self.lengths.as_ref().is_none_or(|lengths| j < lengths[b] as usize)
            };
            x.iter().enumerate().map(|(n, x)| if there(n) { *x } else { f32::NAN }).collect()
        };
        let q = floats(&self.q, dtype, q_at);
        let k = floats(&hidden(&self.k, head_dim), dtype, k_at);
        let v = floats(&hidden(&self.v, value_dim), dtype, v_at);
        let positions = floats(&self.positions, DType::F32, p_at);
        let d_out = floats(&self.d_out, dtype, out_at);
        let lengths =
            self.lengths.as_ref().map(|n| Placed::input(profile, Values::Numbers(n), DType::U32, lengths_at));
        let out = Placed::output(profile, dtype, out_at);
        let weights = setup.weights.then(|| Placed::output(profile, DType::F32, weights_at));
        let refused = |e: wgpu_attention::Error| format!("refused: {e}");
        let operator = LocalAttention::with_pipelines(profile.gpu.pipelines(), self.config(dtype));
        let operator = operator.map_err(refused)?;
        let inputs = [q.view(), k.view(), v.view()];
        let call = LocalForward::new(inputs, positions.view(), out.view())
            .lengths(lengths.as_ref().map(Placed::view))
            .weights(weights.as_ref().map(Placed::view));
        let results = [0, 1, 2, 3].map(|n| {
            let shape = [shape.q(), shape.k(), shape.v(), of_positions][n];
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
        let back = LocalBackward::new(call, d_out.view())
            .d_q(results[0].view())
            .d_k(results[1].view())
            .d_v(results[2].view())
            .d_positions(results[3].view())
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
        let mut gradients: [Vec<f64>; 4] = Default::default();
        for (n, result) in results.iter().enumerate() {
            gradients[n] = result.download_async(GRADIENTS[n], profile).await?;
        }
        let weights = match &weights {
            Some(weights) => Some(weights.download_async("weights", profile).await?),
            None => None,
        };
        Ok(Results { out: out.download_async("out", profile).await?, weights, gradients })
    }

    /// Returns the largest error over tolerance.
    pub async fn outcome_async(&self, setup: &Setup) -> Result<f64, String> {
        let case = self.stored(setup);
        let got = case.run_async(setup).await?;
        let truth = case.truth(setup);
        let mut worst = truth.out.judge(&got.out).map_err(|e| format!("out: {e}"))?;
        if let Some((judged, got)) = truth.weights.zip(got.weights) {
            worst = worst.max(judged.judge(&got).map_err(|e| format!("weights: {e}"))?);
        }
        for (n, name) in GRADIENTS.into_iter().enumerate() {
            let share = truth.gradients[n].judge(&got.gradients[n]);
            worst = worst.max(share.map_err(|e| format!("{name}: {e}"))?);
        }
        Ok(worst)
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl Case {
    /// Like `run_async`, blocking.
    pub fn run(&self, setup: &Setup) -> Result<Results<Vec<f64>>, String> {
        pollster::block_on(self.run_async(setup))
    }

    /// Like `outcome_async`, blocking.
    pub fn outcome(&self, setup: &Setup) -> Result<f64, String> {
        pollster::block_on(self.outcome_async(setup))
    }
}

/// Hidden states and the weights that predict positions from them.
pub struct Predictor {
    pub hidden: Vec<f32>,
    pub weight: Vec<f32>,
    pub bias: Vec<f32>,
    pub vector: Vec<f32>,
    pub sources: Vec<u32>,
    pub d_positions: Vec<f32>,
}

impl Predictor {
    pub fn random(rows: usize, features: usize, units: usize, dtype: DType, sources: Vec<u32>) -> Self {
        let rng = &mut Rng::new((rows * features + units) as u64);
        let mut normals = |n: usize, scale: f32| -> Vec<f32> {
            stored(&rng.normals(n).iter().map(|x| x * scale).collect::<Vec<_>>(), dtype)
        };
        let narrow = 1.0 / (features as f32).sqrt();
        Predictor {
            hidden: normals(rows * features, 1.0),
            weight: normals(units * features, narrow),
            bias: normals(units, 0.5),
            vector: normals(units, 1.0),
            sources,
            d_positions: Rng::new(3).normals(rows),
        }
    }

    pub fn inputs(&self) -> [&Vec<f32>; 4] {
        [&self.hidden, &self.weight, &self.bias, &self.vector]
    }
}

/// Returns the largest error over tolerance, forward and backward.
pub async fn predicted_async(
    [batch, len, features, units]: [usize; 4],
    lengths: Option<Vec<u32>>,
    dtype: DType,
    layout: Layout,
    form: Target,
    accumulates: bool,
    profile: &'static Profile,
) -> Result<f64, String> {
    let rows = batch * len;
    let kv_len = 23;
    let sources = (0..rows).map(|n| lengths.as_ref().map_or(kv_len as u32, |s| s[n / len])).collect();
    let of = Predictor::random(rows, features, units, dtype, sources);
    let shapes = [[batch, 1, len, features], [1, 1, units, features], [1, 1, 1, units], [1, 1, 1, units]];
    let of_positions = [batch, 1, len, 1];
    let at = layout.places([
        shapes[0],
        shapes[1],
        shapes[2],
        shapes[3],
        of_positions,
        of_positions,
        [batch, 1, 1, 1],
        shapes[0],
        shapes[1],
        shapes[2],
        shapes[3],
    ]);
    let inputs = of.inputs();
    let placed: Vec<_> =
        (0..4).map(|n| Placed::input(profile, Values::Floats(inputs[n]), dtype, at[n])).collect();
    let [hidden, weight, bias, vector] = [0, 1, 2, 3].map(|n| placed[n].view());
    let positions = Placed::output(profile, DType::F32, at[4]);
    let d_positions = Placed::input(profile, Values::Floats(&of.d_positions), DType::F32, at[5]);
    let of_lengths = lengths.as_ref().map(|s| Placed::input(profile, Values::Numbers(s), DType::U32, at[6]));
    let before: Vec<Vec<f32>> = inputs.iter().map(|x| Rng::new(8).normals(x.len())).collect();
    let gradients: Vec<_> = (0..4)
        .map(|n| match accumulates {
            true => Placed::holding(profile, &before[n], DType::F32, at[7 + n]),
            false => Placed::output(profile, DType::F32, at[7 + n]),
        })
        .collect();
    let operator = PositionPredictor::with_pipelines(profile.gpu.pipelines())
        .kernel_options(KernelOptions::new().target(form));
    let linear = Linear { weight, bias: Some(bias) };
    let forward = PredictorForward::new(hidden, linear, vector, kv_len, positions.view())
        .lengths(of_lengths.as_ref().map(Placed::view));
    let backward = PredictorBackward::new(forward, d_positions.view())
        .d_hidden(gradients[0].view())
        .d_weight(gradients[1].view())
        .d_bias(gradients[2].view())
        .d_vector(gradients[3].view())
        .accumulate(accumulates);
    let refused = |e: wgpu_attention::Error| e.to_string();
    let size = operator.scratch_size(&forward).map_err(refused)?;
    let size = size.max(operator.backward_scratch_size(&backward).map_err(refused)?);
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    profile
        .gpu
        .submit(|e| {
            operator.forward(e, &forward, &mut scratch)?;
            operator.backward(e, &backward, &mut scratch)
        })
        .map_err(refused)?;
    let read = async |placed: &Placed| placed.download_async("a result", profile).await;

    let wide = inputs.map(|x| widen::<f64>(x));
    let exact = HostLinear { weight: &wide[1][..], bias: Some(&wide[2]) };
    let naive = HostLinear { weight: &inputs[1][..], bias: Some(inputs[2]) };
    let want = predict_positions(&wide[0], exact, &wide[3], &of.sources).map_err(refused)?;
    let close = predict_positions(inputs[0], naive, inputs[3], &of.sources).map_err(refused)?;
    // The sigmoid's argument is a sum of `units` terms, each off by tanh's six units in the last
    // place. The sigmoid's slope is ¼ at most.
    let most = f64::from(of.sources.iter().copied().max().unwrap_or(0));
    let terms = units as f64;
    let mut worst = Judged::new(&widened(&close, DType::F32), want, most * (1.0 + terms))
        .judge(&read(&positions).await?)?;
    let d = widen::<f64>(&of.d_positions);
    let want = predict_positions_backward(&wide[0], exact, &wide[3], &of.sources, &d).map_err(refused)?;
    let close = predict_positions_backward(inputs[0], naive, inputs[3], &of.sources, &of.d_positions)
        .map_err(refused)?;
    let wants = [want.d_hidden, want.d_weight, want.d_bias, want.d_vector];
    let closes = [close.d_hidden, close.d_weight, close.d_bias, close.d_vector];
    // Each is a sum over units or rows. Its terms are at most S / 4 times a few normal numbers.
    let counts = [units, rows, rows, rows];
    for n in 0..4 {
        let (mut want, mut naive) = (wants[n].clone(), widened(&closes[n], DType::F32));
        if accumulates {
            want.iter_mut().zip(&before[n]).for_each(|(x, b)| *x += f64::from(*b));
            naive.iter_mut().zip(&before[n]).for_each(|(x, b)| *x += f64::from(*b));
        }
        let magnitude = most * 4.0 * counts[n] as f64;
        let tolerance = Tolerance::gradient(&naive, &want, magnitude, EPSILON_F32);
        let share = Judged { want, tolerance }.judge(&read(&gradients[n]).await?);
        worst = worst.max(share.map_err(|e| format!("{n}: {e}"))?);
    }
    Ok(worst)
}
