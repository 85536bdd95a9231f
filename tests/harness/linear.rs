//! Linear attention: cases, their expected results, and runs.

use wgpu_attention::inspect::magnitudes::{linear_attention_backward_magnitudes, linear_attention_magnitude};
use wgpu_attention::linear_attention::{
    FeatureMap, LinearAttention, LinearBackward, LinearConfig, LinearForward, LinearState, RandomFeatures,
    UpdateRule, random_features,
};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{
    LinearOptions, Real, linear_attention, linear_attention_backward, linear_recurrence, widen,
};
use wgpu_attention::{DType, KernelOptions, Scratch, Shape};

use super::case::{HostData, Judged, largest, widened};
use super::device::Profile;
use super::memory::{Place, Values, stored};
use super::operator_setup::OperatorSetup;
use super::random::Rng;
use super::run::{Layout, Placed};

type Function = fn(f64) -> f64;

/// A problem of linear attention.
#[derive(Clone, Debug)]
pub struct LinearCase {
    pub name: String,
    pub shape: Shape,
    pub map: FeatureMap,
    pub directions: Vec<f32>,
    pub causal: bool,
    pub normalised: bool,
    pub scale: f64,
    pub eps: Option<f64>,
    pub key_mask: Option<HostData<bool>>,
    pub lengths: Option<HostData<u32>>,
    pub starts: Option<Vec<u32>>,
    pub rule: UpdateRule,
    /// `[batch, kv_heads, kv_len, 1 or features]`. With beta the last axis is 1.
    pub decay: Vec<f32>,
    pub beta: Vec<f32>,
    /// A custom feature map and its slope.
    pub own: Option<[Function; 2]>,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub d_out: Vec<f32>,
}

impl LinearCase {
    pub fn random(name: impl Into<String>, shape: Shape, map: FeatureMap, causal: bool) -> Self {
        let name = name.into();
        let mut rng = Rng::named(&name);
        let mut normals = |shape: [usize; 4]| rng.normals(shape.iter().product());
        let (q, k, v, d_out) =
            (normals(shape.q()), normals(shape.k()), normals(shape.v()), normals(shape.out()));
        let directions = match map {
            FeatureMap::Random { directions, .. } => {
                random_features(7, directions, shape.head_dim).expect("sizes")
            }
            _ => Vec::new(),
        };
        LinearCase {
            name,
            shape,
            map,
            directions,
            causal,
            normalised: true,
            scale: 1.0,
            eps: None,
            key_mask: None,
            lengths: None,
            starts: None,
            rule: UpdateRule::Linear,
            decay: Vec::new(),
            beta: Vec::new(),
            own: None,
            q,
            k,
            v,
            d_out,
        }
    }

    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Returns the case with inputs rounded to `dtype`.
    pub fn stored(&self, dtype: DType) -> Self {
        let mut case = self.clone();
        for x in [&mut case.q, &mut case.k, &mut case.v, &mut case.d_out, &mut case.decay, &mut case.beta] {
            *x = stored(x, dtype);
        }
        case
    }

    /// True if a query sees a key, apart from causality.
    fn sees(&self, [b, kv, i, j]: [usize; 4]) -> bool {
        let at = |shape: [usize; 4], [b, h, j]: [usize; 3]| {
            let [b, h] = [if shape[0] == 1 { 0 } else { b }, if shape[1] == 1 { 0 } else { h }];
            (b * shape[1] + h) * shape[3] + j
        };
        let masked = self.key_mask.as_ref().is_none_or(|mask| mask.data[at(mask.shape, [b, kv, j])]);
        let long = self.lengths.as_ref().is_none_or(|l| (j as u32) < l.data[at(l.shape, [b, kv, 0])]);
        let together = self.starts.as_ref().is_none_or(|starts| {
            let mut begin = 0;
            let mut bounds = Vec::new();
            for start in starts {
                begin = (*start as usize).clamp(begin, self.shape.kv_len);
                bounds.push(begin);
            }
            bounds.windows(2).any(|s| (s[0]..s[1]).contains(&i) && (s[0]..s[1]).contains(&j))
        });
        masked && long && together
    }

    fn with_options<T>(&self, f: impl FnOnce(&LinearOptions) -> T) -> T {
        let seen = |at: [usize; 4]| self.sees(at);
        let mut options = LinearOptions::new(self.map);
        options.directions = &self.directions;
        options.causal = self.causal;
        options.eps = self.eps.unwrap_or(options.eps);
        options.normalised = self.normalised;
        options.scale = self.scale;
        options.seen = Some(&seen);
        let own = self.own;
        let value = move |x: f64| own.map_or(f64::NAN, |[value, _]| value(x));
        let slope = move |x: f64| own.map_or(f64::NAN, |[_, slope]| slope(x));
        options.own = Some([&value, &slope]);
        f(&options)
    }

    pub fn reference<R: Real>(&self) -> wgpu_attention::reference::LinearAttended<R> {
        let (q, k, v) = (widen::<R>(&self.q), widen(&self.k), widen(&self.v));
        let (decay, beta) = (widen::<R>(&self.decay), widen::<R>(&self.beta));
        self.with_options(|options| match self.rule {
            UpdateRule::Linear => linear_attention(&q, &k, &v, self.shape, options),
            rule => linear_recurrence([&q, &k, &v], self.shape, options, rule, &decay, &beta),
        })
        .expect("it fits")
    }

    /// Returns d_q, d_k, d_v, from `out` as stored.
    pub fn gradients<R: Real>(&self, out: Option<&[R]>, magnitudes: bool) -> [Vec<R>; 3] {
        let (q, k, v) = (widen::<R>(&self.q), widen::<R>(&self.k), widen::<R>(&self.v));
        let d_out = widen::<R>(&self.d_out);
        let inputs = [&q[..], &k[..], &v[..]];
        let got = self.with_options(|options| {
            if magnitudes {
                linear_attention_backward_magnitudes(inputs, &d_out, self.shape, options)
            } else {
                linear_attention_backward(inputs, out, &d_out, self.shape, options)
            }
        });
        let got = got.expect("it fits");
        [got.d_q, got.d_k, got.d_v]
    }

    /// Returns the expected `out` and its tolerance.
    pub fn truth(&self, dtype: DType) -> Judged {
        let exact = self.reference::<f64>().out;
        let naive = widened(&self.reference::<f32>().out, dtype);
        let (q, k, v) = (widen::<f64>(&self.q), widen::<f64>(&self.k), widen::<f64>(&self.v));
        let magnitude = self
            .with_options(|options| linear_attention_magnitude([&q, &k, &v], self.shape, options))
            .expect("it fits");
        let magnitude =
            if self.rule == UpdateRule::Linear { magnitude } else { largest(exact.iter().copied()) };
        Judged::new(&naive, exact, magnitude)
    }

    /// Returns the expected gradients and their tolerances.
    pub fn gradient_truths(&self, dtype: DType, gradient: DType) -> [Judged; 3] {
        let exact = self.gradients::<f64>(None, false);
        let out = stored(&self.reference::<f32>().out, dtype);
        let naive = self.gradients::<f32>(Some(&out), false);
        let magnitudes = self.gradients::<f64>(None, true);
        let mut naive = naive.into_iter().zip(magnitudes);
        exact.map(|want| {
            let (naive, magnitude) = naive.next().expect("three");
            let naive = widened(&naive, gradient);
            let tolerance = Tolerance::gradient(&naive, &want, largest(magnitude), EPSILON_F32);
            Judged { want, tolerance }
        })
    }

    pub fn config(&self, setup: &OperatorSetup) -> LinearConfig {
        let Shape { heads, kv_heads, head_dim, value_dim, .. } = self.shape;
        LinearConfig::new(heads, head_dim)
            .kv_heads(kv_heads)
            .value_dim(value_dim)
            .dtype(setup.dtype)
            .feature_map(self.map)
            .causal(self.causal)
            .normalised(self.normalised)
            .scale(self.scale)
            .eps(self.eps)
            .update_rule(self.rule)
            .kernel_options(KernelOptions::new().target(setup.form))
    }

    /// Places the tensors that belong to keys, except k and v.
    fn place_keys(&self, profile: &Profile, dtype: DType, layout: Layout) -> KeyTensors {
        let place = |values, dtype, shape| Placed::input(profile, values, dtype, Place::dense(shape));
        let of_rule = |x: &[f32]| {
            let Shape { batch, kv_heads, kv_len, .. } = self.shape;
            let channels = x.len() / (batch * kv_heads * kv_len);
            let shape = [batch, kv_heads, kv_len, channels];
            let [at] = layout.places([shape]);
            (channels > 0).then(|| Placed::input(profile, Values::Floats(x), dtype, at))
        };
        let heads = self.directions.len().checked_div(match self.map {
            FeatureMap::Random { directions, .. } => directions * self.shape.head_dim,
            _ => 0,
        });
        KeyTensors {
            key_mask: self.key_mask.as_ref().map(|m| place(Values::Bools(&m.data), DType::Bool, m.shape)),
            lengths: self.lengths.as_ref().map(|l| place(Values::Numbers(&l.data), DType::U32, l.shape)),
            decay: of_rule(&self.decay),
            beta: of_rule(&self.beta),
            starts: self.starts.as_ref().map(|s| place(Values::Numbers(s), DType::U32, [1, 1, 1, s.len()])),
            directions: heads.map(|heads| {
                let FeatureMap::Random { directions, .. } = self.map else { unreachable!() };
                let shape = [1, heads, directions, self.shape.head_dim];
                place(Values::Floats(&self.directions), DType::F32, shape)
            }),
        }
    }

    /// Returns the largest error over tolerance of `out`, and `out`. `self` is
    /// [`stored`](Self::stored).
    pub async fn forward_async(&self, setup: &OperatorSetup) -> Result<(f64, Vec<f64>), String> {
        let OperatorSetup { profile, dtype, layout, .. } = *setup;
        profile.tidy();
        let shape = self.shape;
        let places = layout.places([shape.q(), shape.k(), shape.v(), shape.out()]);
        let input = |x: &[f32], n: usize| Placed::input(profile, Values::Floats(x), dtype, places[n]);
        let (q, k, v) = (input(&self.q, 0), input(&self.k, 1), input(&self.v, 2));
        let out = Placed::output(profile, dtype, places[3]);
        let keys = self.place_keys(profile, dtype, layout);
        let call = keys.add(LinearForward::new(q.view(), k.view(), v.view(), out.view()));
        self.submit(setup, &call)?;
        let got = out.download_async("out", profile).await?;
        Ok((self.truth(dtype).judge(&got)?, got))
    }

    pub fn submit(&self, setup: &OperatorSetup, call: &LinearForward) -> Result<(), String> {
        let gpu = &setup.profile.gpu;
        let refused = |e: wgpu_attention::Error| format!("refused: {e}");
        let operator =
            LinearAttention::with_pipelines(gpu.pipelines(), self.config(setup)).map_err(refused)?;
        let size = operator.scratch_size(call).map_err(refused)?;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        gpu.submit(|e| operator.forward(e, call, &mut scratch)).map_err(refused)
    }

    /// Returns the largest error over tolerance of the gradients.
    pub async fn backward_async(&self, setup: &OperatorSetup) -> Result<f64, String> {
        let OperatorSetup { profile, dtype, gradient, layout, accumulates, .. } = *setup;
        profile.tidy();
        let shape = self.shape;
        let [q_at, k_at, v_at, out_at] = layout.places([shape.q(), shape.k(), shape.v(), shape.out()]);
        let input = |x: &[f32], place| Placed::input(profile, Values::Floats(x), dtype, place);
        let (q, k, v) = (input(&self.q, q_at), input(&self.k, k_at), input(&self.v, v_at));
        // `out` as the forward pass stores it.
        let out = stored(&self.reference::<f32>().out, dtype);
        let (out, d_out) = (input(&out, out_at), input(&self.d_out, out_at));
        let before: Vec<Vec<f32>> = [shape.q(), shape.k(), shape.v()]
            .into_iter()
            .enumerate()
            .map(|(n, shape)| stored(&Rng::new(n as u64).normals(shape.iter().product()), gradient))
            .collect();
        let written = |n: usize, place| {
            if accumulates {
                Placed::holding(profile, &before[n], gradient, place)
            } else {
                Placed::output(profile, gradient, place)
            }
        };
        let gradients = [written(0, q_at), written(1, k_at), written(2, v_at)];
        let keys = self.place_keys(profile, dtype, layout);
        let forward = keys.add(LinearForward::new(q.view(), k.view(), v.view(), out.view()));
        let call = LinearBackward::new(forward, d_out.view())
            .d_q(gradients[0].view())
            .d_k(gradients[1].view())
            .d_v(gradients[2].view())
            .accumulate(accumulates);
        let gpu = &profile.gpu;
        let refused = |e: wgpu_attention::Error| format!("refused: {e}");
        let operator =
            LinearAttention::with_pipelines(gpu.pipelines(), self.config(setup)).map_err(refused)?;
        let size = operator.backward_scratch_size(&call).map_err(refused)?;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        gpu.submit(|e| operator.backward(e, &call, &mut scratch)).map_err(refused)?;
        let truths = self.gradient_truths(dtype, gradient);
        let mut worst: f64 = 0.0;
        for (n, mut truth) in truths.into_iter().enumerate() {
            let name = ["d_q", "d_k", "d_v"][n];
            let got = gradients[n].download_async(name, profile).await?;
            if accumulates {
                // The sum has one more rounding.
                let sums: Vec<f32> =
                    truth.want.iter().zip(&before[n]).map(|(w, b)| (w + f64::from(*b)) as f32).collect();
                let exact: Vec<f64> =
                    truth.want.iter().zip(&before[n]).map(|(w, b)| w + f64::from(*b)).collect();
                let rounded = Tolerance::gradient(
                    &widened(&sums, gradient),
                    &exact,
                    largest(exact.iter().copied()),
                    EPSILON_F32,
                );
                truth.want = exact;
                truth.tolerance.absolute += rounded.absolute;
            }
            worst = worst.max(truth.judge(&got).map_err(|e| format!("{name}: {e}"))?);
        }
        Ok(worst)
    }

    /// Runs the case in calls of `steps` rows, with a state that stays on the device. Returns the
    /// larger error, of the results or of the state.
    pub async fn in_steps_async(&self, setup: &OperatorSetup, steps: &[usize]) -> Result<f64, String> {
        let OperatorSetup { profile, dtype, .. } = *setup;
        profile.tidy();
        assert_eq!(steps.iter().sum::<usize>(), self.shape.q_len);
        let Shape { batch, kv_heads, head_dim, value_dim, .. } = self.shape;
        let features = self.map.features(head_dim);
        let scaled = matches!(
            self.map,
            FeatureMap::Random {
                kind: RandomFeatures::Positive | RandomFeatures::Hyperbolic | RandomFeatures::Trigonometric,
                ..
            }
        );
        let shape = self.shape;
        let place = Layout::Window(5).places([shape.q(), shape.k(), shape.v(), shape.out()]);
        let input = |x: &[f32], n: usize| Placed::input(profile, Values::Floats(x), dtype, place[n]);
        let (q, k, v) = (input(&self.q, 0), input(&self.k, 1), input(&self.v, 2));
        let out = Placed::output(profile, dtype, place[3]);
        let kept = |shape| Placed::output(profile, DType::F32, Layout::Window(3).places([shape])[0]);
        let state = kept([batch, kv_heads, features, value_dim]);
        let norm = kept([batch, kv_heads, features, 1]);
        let log = kept([batch, kv_heads, 1, 1]);
        let keys = self.place_keys(profile, dtype, Layout::Window(5));
        let mut first = 0;
        for step in steps {
            let call = LinearForward::new(
                q.view().slice(2, first, *step),
                k.view().slice(2, first, *step),
                v.view().slice(2, first, *step),
                out.view().slice(2, first, *step),
            )
            .state(LinearState {
                state: state.view(),
                norm: norm.view(),
                log_scale: scaled.then(|| log.view()),
            })
            .directions(keys.directions.as_ref().map(Placed::view))
            .decay(keys.decay.as_ref().map(|t| t.view().slice(2, first, *step)))
            .beta(keys.beta.as_ref().map(|t| t.view().slice(2, first, *step)))
            .begins(first == 0);
            self.submit(setup, &call)?;
            first += step;
        }
        let got = out.download_async("out", profile).await?;
        let mut worst = self.truth(dtype).judge(&got).map_err(|e| format!("out: {e}"))?;
        let (exact, naive) = (self.reference::<f64>(), self.reference::<f32>());
        let mut states =
            vec![("state", state.download_async("state", profile).await?, exact.state, naive.state)];
        if self.normalised {
            states.push(("norm", norm.download_async("norm", profile).await?, exact.norm, naive.norm));
        }
        if scaled {
            states.push(("log", log.download_async("log", profile).await?, exact.log, naive.log));
        }
        for (name, got, want, naive) in states {
            let magnitude = largest(want.iter().copied()).max(largest(self.v.iter().map(|v| f64::from(*v))));
            let judged = Judged::new(&widened(&naive, DType::F32), want, magnitude * 4.0);
            worst = worst.max(judged.judge(&got).map_err(|e| format!("{name}: {e}"))?);
        }
        Ok(worst)
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl LinearCase {
    /// Like `forward_async`, blocking.
    pub fn forward(&self, setup: &OperatorSetup) -> Result<(f64, Vec<f64>), String> {
        pollster::block_on(self.forward_async(setup))
    }

    /// Like `backward_async`, blocking.
    pub fn backward(&self, setup: &OperatorSetup) -> Result<f64, String> {
        pollster::block_on(self.backward_async(setup))
    }

    /// Like `in_steps_async`, blocking.
    pub fn in_steps(&self, setup: &OperatorSetup, steps: &[usize]) -> Result<f64, String> {
        pollster::block_on(self.in_steps_async(setup, steps))
    }
}

struct KeyTensors {
    key_mask: Option<Placed>,
    lengths: Option<Placed>,
    starts: Option<Placed>,
    directions: Option<Placed>,
    decay: Option<Placed>,
    beta: Option<Placed>,
}

impl KeyTensors {
    fn add<'a>(&'a self, call: LinearForward<'a>) -> LinearForward<'a> {
        call.key_mask(self.key_mask.as_ref().map(Placed::view))
            .lengths(self.lengths.as_ref().map(Placed::view))
            .packed(self.starts.as_ref().map(Placed::view))
            .directions(self.directions.as_ref().map(Placed::view))
            .decay(self.decay.as_ref().map(Placed::view))
            .beta(self.beta.as_ref().map(Placed::view))
    }
}
