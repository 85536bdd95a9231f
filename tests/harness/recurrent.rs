//! Recurrent attention: cases, their expected results, and runs.

use wgpu_attention::recurrent::{
    Decay, RecurrentAttention, RecurrentBackward, RecurrentConfig, RecurrentForward,
};
use wgpu_attention::reference::{
    Real, RecurrentAttended, RecurrentGradients, RecurrentInputs, RecurrentOptions, recurrent_attention,
    recurrent_attention_backward, widen,
};
use wgpu_attention::{DType, KernelOptions, Scratch, Shape, TensorView};

use super::case::{Judged, largest, widened};
use super::memory::{Place, Values, stored};
use super::operator_setup::OperatorSetup;
use super::random::Rng;
use super::run::Placed;

/// The gradients of a call, in the order of their tensors.
pub const GRADIENTS: [&str; 6] = ["d_q", "d_k", "d_v", "d_decay", "d_beta", "d_initial"];

/// A problem of recurrent attention. In `shape`, `heads` are value heads and `kv_heads` are heads
/// of queries and keys.
#[derive(Clone, Debug)]
pub struct RecurrentCase {
    pub name: String,
    pub shape: Shape,
    pub decays: Decay,
    pub delta: bool,
    pub unit_eps: Option<f64>,
    pub scale: Option<f64>,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    /// `[batch, value_heads, length, 1 or head_dim]`, or one number for each value head.
    pub decay: Vec<f32>,
    pub beta: Vec<f32>,
    /// Empty, or a state for each sequence.
    pub initial: Vec<f32>,
    pub starts: Option<Vec<u32>>,
    pub lengths: Option<Vec<u32>>,
    pub d_out: Vec<f32>,
    /// Empty, or a gradient for each sequence.
    pub d_last: Vec<f32>,
}

/// The outcome of a run: the largest error over tolerance, the results and the final states.
#[derive(Clone, Debug)]
pub struct Ran {
    pub ratio: f64,
    pub out: Vec<f64>,
    pub last: Vec<f64>,
}

impl RecurrentCase {
    pub fn random(name: impl Into<String>, shape: Shape, decays: Decay, delta: bool) -> Self {
        let name = name.into();
        let mut rng = Rng::named(&name);
        let Shape { batch, heads, kv_heads, q_len, head_dim, value_dim, .. } = shape;
        let keys = batch * kv_heads * q_len * head_dim;
        let values = batch * heads * q_len * value_dim;
        let tokens = batch * heads * q_len;
        let (q, k, v) = (rng.normals(keys), rng.normals(keys), rng.normals(values));
        let channels = match decays {
            Decay::None => 0,
            Decay::PerChannel => head_dim,
            _ => 1,
        };
        let decay = rng.normals(tokens * channels).into_iter().map(|x| -0.3 * x * x).collect();
        let beta = if delta { rng.normals(tokens) } else { Vec::new() };
        let beta = beta.into_iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
        let d_out = rng.normals(values);
        RecurrentCase {
            name,
            shape,
            decays,
            delta,
            // A row of one channel would be 1 or −1, and its gradients would cancel.
            unit_eps: (delta && head_dim > 1).then_some(1e-6),
            scale: None,
            q,
            k,
            v,
            decay,
            beta,
            initial: Vec::new(),
            starts: None,
            lengths: None,
            d_out,
            d_last: Vec::new(),
        }
    }

    /// Adds initial states and gradients of final states.
    pub fn with_states(mut self) -> Self {
        let mut rng = Rng::named(&format!("{} states", self.name));
        let count = self.states_shape().iter().product();
        self.initial = rng.normals(count);
        self.d_last = rng.normals(count);
        self
    }

    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Returns the case with inputs rounded to the types of a run.
    pub fn stored(&self, dtype: DType, gradient: DType) -> Self {
        let mut case = self.clone();
        for x in [&mut case.q, &mut case.k, &mut case.v, &mut case.d_out] {
            *x = stored(x, dtype);
        }
        for x in [&mut case.decay, &mut case.beta] {
            *x = stored(x, gradient);
        }
        case
    }

    pub fn sequences(&self) -> Vec<[usize; 3]> {
        let length = self.shape.q_len;
        match (&self.starts, &self.lengths) {
            (Some(starts), _) => {
                let mut begin = 0;
                let mut bounds = Vec::new();
                for start in starts {
                    begin = (*start as usize).clamp(begin, length);
                    bounds.push(begin);
                }
                bounds.windows(2).map(|s| [0, s[0], s[1]]).collect()
            }
            (None, Some(lengths)) => {
                lengths.iter().enumerate().map(|(b, l)| [b, 0, length.min(*l as usize)]).collect()
            }
            (None, None) => (0..self.shape.batch).map(|b| [b, 0, length]).collect(),
        }
    }

    pub fn states_shape(&self) -> [usize; 4] {
        let Shape { heads, head_dim, value_dim, .. } = self.shape;
        [self.sequences().len(), heads, head_dim, value_dim]
    }

    fn keys_shape(&self) -> [usize; 4] {
        let Shape { batch, kv_heads, q_len, head_dim, .. } = self.shape;
        [batch, kv_heads, q_len, head_dim]
    }

    /// True if the decay is one number for each value head.
    fn is_constant(&self) -> bool {
        let Shape { batch, heads, q_len, .. } = self.shape;
        self.decays == Decay::PerHead && self.decay.len() == heads && batch * q_len > 1
    }

    fn decay_shape(&self) -> [usize; 4] {
        let Shape { batch, heads, q_len, head_dim, .. } = self.shape;
        match self.decays {
            Decay::PerChannel => [batch, heads, q_len, head_dim],
            _ if self.is_constant() => [1, heads, 1, 1],
            _ => [batch, heads, q_len, 1],
        }
    }

    fn with_inputs<R: Real, T>(
        &self,
        f: impl FnOnce(&RecurrentInputs<R>, &RecurrentOptions) -> Result<T, wgpu_attention::Error>,
    ) -> T {
        let Shape { heads, q_len, head_dim, .. } = self.shape;
        let (q, k, v) = (widen::<R>(&self.q), widen::<R>(&self.k), widen::<R>(&self.v));
        let decay: Vec<f32> = if self.is_constant() {
            (0..self.shape.batch * heads * q_len).map(|n| self.decay[n / q_len % heads]).collect()
        } else {
            self.decay.clone()
        };
        let (decay, beta, initial) = (widen::<R>(&decay), widen::<R>(&self.beta), widen::<R>(&self.initial));
        let inputs = RecurrentInputs { q: &q, k: &k, v: &v, decay: &decay, beta: &beta, initial: &initial };
        let options = RecurrentOptions {
            scale: self.scale.unwrap_or(1.0 / (head_dim as f64).sqrt()),
            delta: self.delta,
            unit_eps: self.unit_eps,
            sequences: self.sequences(),
        };
        f(&inputs, &options).expect("it fits")
    }

    pub fn reference<R: Real>(&self) -> RecurrentAttended<R> {
        self.with_inputs(|inputs, options| recurrent_attention(inputs, self.shape, options))
    }

    pub fn gradients<R: Real>(&self) -> [Vec<R>; 6] {
        in_order(self.all_gradients())
    }

    fn all_gradients<R: Real>(&self) -> RecurrentGradients<R> {
        let (d_out, d_last) = (widen::<R>(&self.d_out), widen::<R>(&self.d_last));
        self.with_inputs(|inputs, options| {
            recurrent_attention_backward(inputs, self.shape, options, &d_out, &d_last)
        })
    }

    pub fn config(&self, setup: &OperatorSetup) -> RecurrentConfig {
        let Shape { heads, kv_heads, head_dim, value_dim, .. } = self.shape;
        RecurrentConfig::new(kv_heads, head_dim)
            .value_heads(heads)
            .value_dim(value_dim)
            .dtype(setup.dtype)
            .decay(self.decays)
            .delta(self.delta)
            .scale(self.scale)
            .normalize_qk(self.unit_eps)
            .kernel_options(KernelOptions::new().target(setup.form))
    }

    fn place(&self, setup: &OperatorSetup) -> Tensors {
        let OperatorSetup { profile, dtype, gradient, layout, .. } = *setup;
        let keys = self.keys_shape();
        let values = self.shape.out();
        let [q, k, v, out, decay, beta, initial] = layout.places([
            keys,
            keys,
            values,
            values,
            self.decay_shape(),
            [values[0], values[1], values[2], 1],
            self.states_shape(),
        ]);
        let input = |x: &[f32], dtype, place| Placed::input(profile, Values::Floats(x), dtype, place);
        let given = |x: &[f32], dtype, place| (!x.is_empty()).then(|| input(x, dtype, place));
        let numbers = |x: &Option<Vec<u32>>, shape: fn(usize) -> [usize; 4]| {
            let place = |x: &Vec<u32>| Place::dense(shape(x.len()));
            x.as_ref().map(|x| Placed::input(profile, Values::Numbers(x), DType::U32, place(x)))
        };
        Tensors {
            q: input(&self.q, dtype, q),
            k: input(&self.k, dtype, k),
            v: input(&self.v, dtype, v),
            out: Placed::output(profile, dtype, out),
            decay: given(&self.decay, gradient, decay),
            beta: given(&self.beta, gradient, beta),
            initial: given(&self.initial, DType::F32, initial),
            last: Placed::output(profile, DType::F32, initial),
            starts: numbers(&self.starts, |n| [1, 1, 1, n]),
            lengths: numbers(&self.lengths, |n| [n, 1, 1, 1]),
        }
    }

    /// Returns the operator.
    pub fn operator(&self, setup: &OperatorSetup) -> Result<RecurrentAttention, String> {
        let pipelines = setup.profile.gpu.pipelines();
        RecurrentAttention::with_pipelines(pipelines, self.config(setup)).map_err(refused)
    }

    pub fn submit(&self, setup: &OperatorSetup, call: &RecurrentForward) -> Result<(), String> {
        let gpu = &setup.profile.gpu;
        let operator = self.operator(setup)?;
        let size = operator.scratch_size(call).map_err(refused)?;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        gpu.submit(|e| operator.forward(e, call, &mut scratch)).map_err(refused)
    }

    /// Judges results and final states. `self` is [`stored`](Self::stored).
    fn judge(&self, dtype: DType, out: &[f64], last: &[f64]) -> Result<f64, String> {
        let (exact, naive) = (self.reference::<f64>(), self.reference::<f32>());
        // Terms of the sums are as large as the largest state.
        let size = largest(exact.states.iter().chain(&exact.last).copied());
        let magnitude = largest(exact.out.iter().copied()).max(size);
        let of_out = Judged::new(&widened(&naive.out, dtype), exact.out, magnitude);
        let of_last = Judged::new(&widened(&naive.last, DType::F32), exact.last, magnitude);
        let ratio = of_out.judge(out).map_err(|e| format!("out: {e}"))?;
        Ok(ratio.max(of_last.judge(last).map_err(|e| format!("final state: {e}"))?))
    }

    /// Runs a call for all tokens. `self` is [`stored`](Self::stored).
    pub async fn forward_async(&self, setup: &OperatorSetup) -> Result<Ran, String> {
        let OperatorSetup { profile, dtype, .. } = *setup;
        profile.tidy();
        let tensors = self.place(setup);
        self.submit(setup, &tensors.call().final_state(tensors.last.view()))?;
        let out = tensors.out.download_async("out", profile).await?;
        let last = tensors.last.download_async("final state", profile).await?;
        Ok(Ran { ratio: self.judge(dtype, &out, &last)?, out, last })
    }

    /// Runs calls of `steps` tokens, with a state that stays on the device.
    pub async fn in_steps_async(&self, setup: &OperatorSetup, steps: &[usize]) -> Result<Ran, String> {
        let OperatorSetup { profile, dtype, .. } = *setup;
        profile.tidy();
        assert_eq!(steps.iter().sum::<usize>(), self.shape.q_len);
        let tensors = self.place(setup);
        let mut first = 0;
        for (n, step) in steps.iter().enumerate() {
            fn cut(t: &Placed, first: usize, count: usize) -> TensorView<'_> {
                let view = t.view();
                if view.shape()[2] == 1 { view } else { view.slice(2, first, count) }
            }
            let call = RecurrentForward::new(
                cut(&tensors.q, first, *step),
                cut(&tensors.k, first, *step),
                cut(&tensors.v, first, *step),
                cut(&tensors.out, first, *step),
            )
            .decay(tensors.decay.as_ref().map(|t| cut(t, first, *step)))
            .beta(tensors.beta.as_ref().map(|t| cut(t, first, *step)));
            let last = tensors.last.view();
            let call = match (n, &tensors.initial) {
                (0, initial) => call.initial_state(initial.as_ref().map(Placed::view)).final_state(last),
                _ => call.state(last),
            };
            self.submit(setup, &call)?;
            first += step;
        }
        let out = tensors.out.download_async("out", profile).await?;
        let last = tensors.last.download_async("final state", profile).await?;
        Ok(Ran { ratio: self.judge(dtype, &out, &last)?, out, last })
    }

    /// Runs the backward pass. Returns the largest error over tolerance, and the gradients; those
    /// of absent tensors are empty.
    pub async fn backward_async(&self, setup: &OperatorSetup) -> Result<(f64, Vec<Vec<f64>>), String> {
        let OperatorSetup { profile, gradient, layout, accumulates, .. } = *setup;
        profile.tidy();
        let tensors = self.place(setup);
        let [keys, values] = [self.keys_shape(), self.shape.out()];
        let token = [values[0], values[1], values[2], 1];
        let shapes = [keys, keys, values, self.decay_shape(), token, self.states_shape()];
        let wanted = [true, true, true, !self.decay.is_empty() && !self.is_constant(), self.delta, true];
        let places = layout.places(shapes);
        let types = [gradient, gradient, gradient, gradient, gradient, DType::F32];
        let before: Vec<Vec<f32>> = (0..6)
            .map(|n| stored(&Rng::new(n as u64).normals(shapes[n].iter().product()), types[n]))
            .collect();
        let written: Vec<Option<Placed>> = (0..6)
            .map(|n| {
                wanted[n].then(|| Placed::gradient(profile, &before[n], (types[n], places[n]), accumulates))
            })
            .collect();
        let view = |n: usize| written[n].as_ref().map(Placed::view);
        let input = |x: &[f32], dtype, place| Placed::input(profile, Values::Floats(x), dtype, place);
        let [d_out_at, d_last_at] = layout.places([values, self.states_shape()]);
        let d_out = input(&self.d_out, setup.dtype, d_out_at);
        let d_last = (!self.d_last.is_empty()).then(|| input(&self.d_last, DType::F32, d_last_at));
        let call = RecurrentBackward::new(tensors.call(), d_out.view())
            .d_final_state(d_last.as_ref().map(Placed::view))
            .d_q(view(0))
            .d_k(view(1))
            .d_v(view(2))
            .d_decay(view(3))
            .d_beta(view(4))
            .d_initial_state(view(5))
            .accumulate(accumulates);
        let gpu = &profile.gpu;
        let operator = self.operator(setup)?;
        let size = operator.backward_scratch_size(&call).map_err(refused)?;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        gpu.submit(|e| operator.backward(e, &call, &mut scratch)).map_err(refused)?;
        let (exact, naive) = (self.all_gradients::<f64>(), self.gradients::<f32>());
        let of_states = largest(exact.d_states.iter().copied());
        let strongest = self.decay.iter().filter(|x| x.is_finite()).fold(0f32, |most, x| most.max(x.abs()));
        let strongest = f64::from(strongest);
        let mut all = Vec::new();
        let mut worst: f64 = 0.0;
        for (n, (exact, naive)) in in_order(exact).into_iter().zip(naive).enumerate() {
            let Some(placed) = &written[n] else {
                all.push(Vec::new());
                continue;
            };
            let got = placed.download_async(GRADIENTS[n], profile).await?;
            let own = largest(exact.iter().copied());
            let magnitude = match n {
                // Terms of the sum are as large as the largest gradient of a state. The sum has the
                // factor exp(x) of all decays, whose relative error is |x| ε.
                5 => own.max(of_states) * (1.0 + strongest),
                _ => own,
            };
            let before = accumulates.then_some(&before[n][..]);
            let judged = Judged::gradient([exact, widened(&naive, DType::F32)], before, types[n], magnitude);
            worst = worst.max(judged.judge(&got).map_err(|e| format!("{}: {e}", GRADIENTS[n]))?);
            all.push(got);
        }
        Ok((worst, all))
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl RecurrentCase {
    /// Like `forward_async`, blocking.
    pub fn forward(&self, setup: &OperatorSetup) -> Result<Ran, String> {
        pollster::block_on(self.forward_async(setup))
    }

    /// Like `in_steps_async`, blocking.
    pub fn in_steps(&self, setup: &OperatorSetup, steps: &[usize]) -> Result<Ran, String> {
        pollster::block_on(self.in_steps_async(setup, steps))
    }

    /// Like `backward_async`, blocking.
    pub fn backward(&self, setup: &OperatorSetup) -> Result<(f64, Vec<Vec<f64>>), String> {
        pollster::block_on(self.backward_async(setup))
    }
}

fn in_order<R>(got: RecurrentGradients<R>) -> [Vec<R>; 6] {
    [got.d_q, got.d_k, got.d_v, got.d_decay, got.d_beta, got.d_initial]
}

fn refused(e: wgpu_attention::Error) -> String {
    format!("refused: {e}")
}

/// The tensors of a call on the device.
struct Tensors {
    q: Placed,
    k: Placed,
    v: Placed,
    out: Placed,
    decay: Option<Placed>,
    beta: Option<Placed>,
    initial: Option<Placed>,
    last: Placed,
    starts: Option<Placed>,
    lengths: Option<Placed>,
}

impl Tensors {
    fn call(&self) -> RecurrentForward<'_> {
        RecurrentForward::new(self.q.view(), self.k.view(), self.v.view(), self.out.view())
            .decay(self.decay.as_ref().map(Placed::view))
            .beta(self.beta.as_ref().map(Placed::view))
            .initial_state(self.initial.as_ref().map(Placed::view))
            .packed(self.starts.as_ref().map(Placed::view))
            .lengths(self.lengths.as_ref().map(Placed::view))
    }
}
