//! Selected attention: cases, their expected results, and runs.

use wgpu_attention::reference::{self, Attended, Gradients, Options, Real, SelectedKeys, widen};
use wgpu_attention::selected::{SelectedAttention, SelectedBackward, SelectedConfig, SelectedForward};
use wgpu_attention::{Backward, Config, DType, Forward, KernelOptions, Scratch, Shape, TensorView};

use super::case::{Case, HostData, Judged, largest, widened};
use super::memory::{Values, stored, stored_error};
use super::operator_setup::OperatorSetup;
use super::random::Rng;
use super::run::{Placed, PlacedRules, place_values};

/// The gradients of a call, in the order of their tensors.
pub const GRADIENTS: [&str; 4] = ["d_q", "d_k", "d_v", "d_sinks"];

/// A problem of selected attention. In a latent case, values are the first channels of the keys.
#[derive(Clone, Debug)]
pub struct SelectedCase {
    pub case: Case,
    /// `[batch, list heads, q_len, count]`.
    pub indices: HostData<u32>,
    pub block: usize,
    pub window: usize,
    pub latent: bool,
    pub d_out: Vec<f32>,
}

/// The outcome of a run.
#[derive(Clone, Debug)]
pub struct Ran {
    /// The largest error over tolerance.
    pub ratio: f64,
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub weights: Vec<f64>,
}

impl SelectedCase {
    /// Returns a case with lists of `count` random indices in each query, of which some repeat and
    /// some name nothing. Each of `list_heads` heads has lists.
    pub fn random(
        name: impl Into<String>,
        shape: Shape,
        [list_heads, count]: [usize; 2],
        block: usize,
    ) -> Self {
        let case = Case::random(name, shape);
        let mut rng = Rng::named(&format!("{} indices", case.name));
        let names = shape.kv_len.div_ceil(block);
        let lists = shape.batch * list_heads * shape.q_len;
        let index = |rng: &mut Rng| match rng.below(12) {
            0 => u32::MAX,
            1 => [names as u32, names as u32 + 7, 1 << 31, u32::MAX - 1][rng.below(4)],
            _ => rng.below(names) as u32,
        };
        let indices = (0..lists * count).map(|_| index(&mut rng)).collect();
        let d_out = rng.normals(shape.out().iter().product());
        SelectedCase {
            case,
            indices: HostData::new(indices, [shape.batch, list_heads, shape.q_len, count]),
            block,
            window: 0,
            latent: false,
            d_out,
        }
    }

    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        if self.latent {
            self.case.v = self.latent_values();
        }
        self
    }

    /// The first channels of the keys.
    fn latent_values(&self) -> Vec<f32> {
        let Shape { head_dim, value_dim, .. } = self.case.shape;
        self.case.k.chunks(head_dim).flat_map(|row| row[..value_dim].iter().copied()).collect()
    }

    /// Returns the case with inputs rounded to the type of a run.
    pub fn stored(&self, dtype: DType) -> Self {
        let d_out = stored(&self.d_out, dtype);
        SelectedCase { case: self.case.stored(dtype, DType::F32), d_out, ..self.clone() }
    }

    pub fn keys(&self) -> SelectedKeys<'_> {
        let SelectedCase { block, window, .. } = *self;
        SelectedKeys { indices: self.indices.host(), heads: self.case.shape.heads, block, window }
    }

    /// Calls `f` with the tensors and options of the reference.
    fn with_options<R: Real, T>(&self, f: impl FnOnce([&[R]; 4], &Options) -> T) -> T {
        let keys = self.keys();
        let sees = |at: &_| keys.names(at);
        let Case { scale, softcap, rules, .. } = &self.case;
        let mask = rules.host().mask_fn(&sees);
        let options = Options::new().scale(*scale).softcap(*softcap).mask(mask).weights(true);
        let [q, k, v, d_out] = [&self.case.q, &self.case.k, &self.case.v, &self.d_out].map(|x| widen::<R>(x));
        f([&q, &k, &v, &d_out], &options)
    }

    pub fn reference<R: Real>(&self) -> Attended<R> {
        self.with_options(|[q, k, v, _], options| {
            reference::attention(q, k, v, self.case.shape, options).expect("it fits")
        })
    }

    /// The weights of indices.
    pub fn weights<R: Real>(&self, attended: &Attended<R>) -> Vec<R> {
        let weights = attended.weights.as_ref().expect("asked for");
        self.keys().weights(weights, self.case.shape.kv_len).expect("it fits")
    }

    pub fn gradients<R: Real>(&self) -> [Vec<R>; 4] {
        self.in_order(self.with_options(|[q, k, v, d_out], options| {
            reference::attention_backward(q, k, v, d_out, None, self.case.shape, options).expect("it fits")
        }))
    }

    /// The sums of the absolute values of the terms of gradients.
    fn magnitudes(&self) -> [Vec<f64>; 4] {
        self.in_order(self.with_options(|[q, k, v, d_out], options| {
            reference::attention_backward_magnitudes(q, k, v, d_out, None, self.case.shape, options)
                .expect("it fits")
        }))
    }

    /// Gradients in the order of their tensors. Latent values add theirs to the keys'.
    fn in_order<R: Real>(&self, got: Gradients<R>) -> [Vec<R>; 4] {
        let Shape { head_dim, value_dim, .. } = self.case.shape;
        let Gradients { d_q, mut d_k, mut d_v, d_sinks, .. } = got;
        if self.latent {
            for (row, values) in d_k.chunks_mut(head_dim).zip(d_v.chunks(value_dim)) {
                row.iter_mut().zip(values).for_each(|(x, y)| *x = *x + *y);
            }
            d_v.clear();
        }
        [d_q, d_k, d_v, d_sinks.unwrap_or_default()]
    }

    pub fn config(&self, setup: &OperatorSetup) -> SelectedConfig {
        let Case { shape, scale, softcap, .. } = &self.case;
        let config = Config::of(shape)
            .dtype(setup.dtype)
            .scale(*scale)
            .softcap(*softcap)
            .kernel_options(KernelOptions::new().target(setup.form));
        SelectedConfig::new(config).block(self.block).window(self.window).latent(self.latent)
    }

    pub fn operator(&self, setup: &OperatorSetup) -> Result<SelectedAttention, String> {
        let pipelines = setup.profile.gpu.pipelines();
        SelectedAttention::with_pipelines(pipelines, self.config(setup)).map_err(refused)
    }

    fn place(&self, setup: &OperatorSetup) -> Tensors {
        let OperatorSetup { profile, dtype, layout, .. } = *setup;
        let shape = self.case.shape;
        let [q, k, v, out, lse] = layout.places([shape.q(), shape.k(), shape.v(), shape.out(), shape.lse()]);
        let input = |x: &[f32], place| Placed::input(profile, Values::Floats(x), dtype, place);
        let indices = Values::Numbers(&self.indices.data);
        Tensors {
            q: input(&self.case.q, q),
            k: input(&self.case.k, k),
            v: (!self.latent).then(|| input(&self.case.v, v)),
            out: Placed::output(profile, dtype, out),
            lse: Placed::output(profile, DType::F32, lse),
            indices: place_values(profile, indices, DType::U32, self.indices.shape, layout, 21),
            rules: PlacedRules::new(profile, &self.case.rules, DType::F32, layout),
            value_dim: shape.value_dim,
        }
    }

    /// Runs the forward pass, with the weights of indices for all heads or for their mean.
    pub async fn forward_async(&self, setup: &OperatorSetup, mean: bool) -> Result<Ran, String> {
        let OperatorSetup { profile, dtype, layout, .. } = *setup;
        profile.tidy();
        let tensors = self.place(setup);
        let Shape { batch, heads, q_len, .. } = self.case.shape;
        let count = self.indices.shape[3];
        let shape = [batch, if mean { 1 } else { heads }, q_len, count];
        let weights = Placed::output(profile, DType::F32, layout.places([[1; 4], shape])[1]);
        let wanted = self.case.softcap.is_none();
        let call = tensors.call().weights(wanted.then(|| weights.view()));
        let operator = self.operator(setup)?;
        let size = operator.scratch_size(&call).map_err(refused)?;
        let gpu = &profile.gpu;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        gpu.submit(|e| operator.forward(e, &call, &mut scratch)).map_err(refused)?;
        let out = tensors.out.download_async("out", profile).await?;
        let lse = tensors.lse.download_async("lse", profile).await?;
        let weights = if wanted { weights.download_async("weights", profile).await? } else { Vec::new() };
        let (exact, naive) = (self.reference::<f64>(), self.reference::<f32>());
        let values = largest(self.case.v.iter().map(|v| f64::from(*v)));
        let of_out = Judged::new(&widened(&naive.out, dtype), exact.out.clone(), values);
        let scores = self.case.largest_score() + 1.0;
        let of_lse = Judged::new(&widened(&naive.lse, DType::F32), exact.lse.clone(), scores);
        let mut ratio = of_out.judge(&out).map_err(|e| format!("out: {e}"))?;
        ratio = ratio.max(of_lse.judge(&lse).map_err(|e| format!("lse: {e}"))?);
        if wanted {
            let average = |x: Vec<f64>| {
                if mean { reference::average_heads(&x, batch, heads).expect("it fits") } else { x }
            };
            let [exact, naive] =
                [self.weights(&exact), widened(&self.weights(&naive), DType::F32)].map(average);
            // A weight is the exponential of a score.
            let judged = Judged::new(&naive, exact, scores);
            ratio = ratio.max(judged.judge(&weights).map_err(|e| format!("weights: {e}"))?);
        }
        Ok(Ran { ratio, out, lse, weights })
    }

    /// Runs both passes. Returns the largest error over tolerance, and the gradients. Gradients of
    /// absent tensors are empty.
    pub async fn backward_async(&self, setup: &OperatorSetup) -> Result<(f64, Vec<Vec<f64>>), String> {
        let OperatorSetup { profile, dtype, gradient, layout, accumulates, .. } = *setup;
        profile.tidy();
        let tensors = self.place(setup);
        let (operator, gpu) = (self.operator(setup)?, &profile.gpu);
        let forward = tensors.call();
        let size = operator.scratch_size(&forward).map_err(refused)?;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        gpu.submit(|e| operator.forward(e, &forward, &mut scratch)).map_err(refused)?;

        let shape = self.case.shape;
        let sinks = self.case.rules.sinks.as_ref();
        let shapes = [shape.q(), shape.k(), shape.v(), sinks.map_or([1; 4], |sinks| sinks.shape)];
        let wanted = [true, true, !self.latent, sinks.is_some()];
        let types = [gradient, gradient, gradient, DType::F32];
        let places = layout.places(shapes);
        let before: Vec<Vec<f32>> = (0..4)
            .map(|n| stored(&Rng::new(n as u64).normals(shapes[n].iter().product()), types[n]))
            .collect();
        let written: Vec<Option<Placed>> = (0..4)
            .map(|n| {
                wanted[n].then(|| Placed::gradient(profile, &before[n], (types[n], places[n]), accumulates))
            })
            .collect();
        let view = |n: usize| written[n].as_ref().map(Placed::view);
        let [d_out_at] = layout.places([shape.out()]);
        let d_out = Placed::input(profile, Values::Floats(&self.d_out), dtype, d_out_at);
        let backward = Backward::new(tensors.forward(), d_out.view())
            .d_q(view(0))
            .d_k(view(1))
            .d_v(view(2))
            .d_sinks(view(3))
            .accumulate(accumulates);
        let call = SelectedBackward::new(backward, tensors.indices.view());
        let size = operator.backward_scratch_size(&call).map_err(refused)?;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        gpu.submit(|e| operator.backward(e, &call, &mut scratch)).map_err(refused)?;

        let (exact, naive, sizes) = (self.gradients::<f64>(), self.gradients::<f32>(), self.magnitudes());
        let mut all = Vec::new();
        let mut worst: f64 = 0.0;
        for (n, (exact, naive)) in exact.into_iter().zip(naive).enumerate() {
            let Some(placed) = &written[n] else {
                all.push(Vec::new());
                continue;
            };
            let got = placed.download_async(GRADIENTS[n], profile).await?;
            let before = accumulates.then_some(&before[n][..]);
            let magnitude = largest(sizes[n].iter().copied());
            let mut judged =
                Judged::gradient([exact, widened(&naive, DType::F32)], before, types[n], magnitude);
            // `out` and the weights that the kernels compute again differ by the rounding of `out`.
            judged.tolerance.absolute += stored_error(dtype) * magnitude;
            worst = worst.max(judged.judge(&got).map_err(|e| format!("{}: {e}", GRADIENTS[n]))?);
            all.push(got);
        }
        Ok((worst, all))
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl SelectedCase {
    /// Like `forward_async`, blocking.
    pub fn forward(&self, setup: &OperatorSetup, mean: bool) -> Result<Ran, String> {
        pollster::block_on(self.forward_async(setup, mean))
    }

    /// Like `backward_async`, blocking.
    pub fn backward(&self, setup: &OperatorSetup) -> Result<(f64, Vec<Vec<f64>>), String> {
        pollster::block_on(self.backward_async(setup))
    }
}

fn refused(e: wgpu_attention::Error) -> String {
    format!("refused: {e}")
}

/// The tensors of a call on the device.
struct Tensors {
    q: Placed,
    k: Placed,
    v: Option<Placed>,
    out: Placed,
    lse: Placed,
    indices: Placed,
    rules: PlacedRules,
    value_dim: usize,
}

impl Tensors {
    fn forward(&self) -> Forward<'_> {
        let k: TensorView = self.k.view();
        let v = self.v.as_ref().map_or(k.slice(3, 0, self.value_dim), Placed::view);
        Forward::new(self.q.view(), k, v, self.out.view()).mask(self.rules.mask()).lse(self.lse.view())
    }

    fn call(&self) -> SelectedForward<'_> {
        SelectedForward::new(self.forward(), self.indices.view())
    }
}
