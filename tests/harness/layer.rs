//! A multi-head attention layer with its data, its expected results, and its runs.

use std::collections::HashMap;
use std::fmt;

use wgpu_attention::layers::{MultiHeadForward, MultiHeadWeights, OutputGate};
use wgpu_attention::matmul::Activation;
use wgpu_attention::reference::compare::{EPSILON_BF16, EPSILON_F16, EPSILON_F32, Tolerance};
use wgpu_attention::reference::{
    self, Attended, MultiHeadShape, Options, Real, average_heads, join_heads, project, split_heads, widen,
};
use wgpu_attention::rows::{NormConfig, NormWeights};
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{DType, KernelOptions, Linear, MultiHeadAttention, Scratch, TensorView};

use super::case::{DropoutData, Expected, HIDES, Judged, Rules, Truth, Weights, in_f32, largest, widened};
use super::device::{Profile, defaults, full};
use super::layer_options::LayerOptions;
use super::memory::{Image, Place, Values, stored};
use super::random::Rng;
use super::report::{Report, judge_outputs};
use super::rest::{due, rest};
use super::rotary::{PlacedRotary, RotaryData};
use super::run::{
    FORMS, Got, Layout, Placed, PlacedRules, device_dropout, place_dropout, weights_wanted, window,
};

/// Weight and bias of one projection. Narrow weights are `[heads or 1, dim, in / heads]`.
#[derive(Clone, Debug)]
pub struct LinearData {
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
}

/// Weight and bias of the norm of queries or of keys, `[head_dim]` each.
#[derive(Clone, Debug, Default)]
pub struct NormData {
    pub weight: Option<Vec<f32>>,
    pub bias: Option<Vec<f32>>,
}

impl NormData {
    /// Returns normalised rows of heads.
    pub fn normed<R: Real>(&self, x: &[R], dim: usize, config: &NormConfig) -> Vec<R> {
        let [weight, bias] = [&self.weight, &self.bias].map(|t| t.as_ref().map(|t| widen::<R>(t)));
        reference::norm(x, dim, weight.as_deref(), bias.as_deref(), config).expect("it fits")
    }
}

/// A layer, its inputs `[batch, length, features]`, and one call.
#[derive(Clone, Debug)]
pub struct LayerCase {
    pub name: String,
    /// The setup chooses the dtype.
    pub config: LayerOptions,
    pub shape: MultiHeadShape,
    /// Inputs of queries, keys, values.
    pub inputs: [Vec<f32>; 3],
    /// True if queries, keys and values are one tensor.
    pub one_input: bool,
    /// Projections of queries, keys, values, output.
    pub linears: [LinearData; 4],
    /// True if one narrow matrix serves all heads of a side.
    pub shared: bool,
    pub appended: Option<[Vec<f32>; 2]>,
    /// Norms of queries and of keys, if the configuration has them.
    pub norms: [NormData; 2],
    /// The gate of the heads' outputs, if the configuration has it.
    pub gate: Option<LinearData>,
    pub rotary: Option<RotaryData>,
    pub rules: Rules,
    pub dropout: Option<DropoutData>,
    pub expected: Expected,
}

impl LayerCase {
    /// Returns a layer with random data, the same for the same name.
    pub fn random(name: String, config: LayerOptions, shape: MultiHeadShape, appended: bool) -> Self {
        let mut rng = Rng::named(&name);
        let MultiHeadShape { batch, q_len, kv_len } = shape;
        let inputs = [
            rng.normals(batch * q_len * config.query_features),
            rng.normals(batch * kv_len * config.key_features),
            rng.normals(batch * kv_len * config.value_features),
        ];
        let mut case = LayerCase {
            name,
            config,
            shape,
            inputs,
            one_input: false,
            linears: [(); 4].map(|()| LinearData { weight: Vec::new(), bias: None }),
            shared: false,
            appended: appended
                .then(|| [config.head_dim, config.value_dim].map(|dim| rng.normals(config.kv_heads * dim))),
            norms: Default::default(),
            gate: None,
            rotary: None,
            rules: Default::default(),
            dropout: None,
            expected: Expected::default(),
        };
        for (n, [_, heads, out, features]) in case.weight_shapes().into_iter().enumerate() {
            let scale = 1.0 / (features as f32).sqrt();
            let weight = rng.normals(heads * out * features).iter().map(|w| w * scale).collect();
            case.linears[n] = LinearData { weight, bias: Some(rng.normals(heads * out)) };
        }
        case
    }

    /// Adds norms of queries and keys with random weights and biases.
    pub fn with_norms(mut self, config: NormConfig) -> Self {
        let mut rng = Rng::named(&format!("norms of {}", self.name));
        let mut near = |one: f32| {
            Some(rng.normals(self.config.head_dim).iter().map(|x| one + 0.3 * x).collect::<Vec<f32>>())
        };
        self.norms = [(); 2].map(|()| NormData { weight: near(1.0), bias: near(0.0) });
        self.config.qk_norm = Some(config);
        self
    }

    /// Adds a gate of the heads' outputs with random weights.
    pub fn with_gate(mut self, gate: OutputGate) -> Self {
        let mut rng = Rng::named(&format!("gate of {}", self.name));
        self.config.output_gate = Some(gate);
        let [_, heads, out, features] = self.gate_shape().expect("a gate");
        let scale = 2.0 / (features as f32).sqrt();
        let weight = rng.normals(heads * out * features).iter().map(|w| w * scale).collect();
        let rows = self.gate_channels();
        self.gate = Some(LinearData { weight, bias: Some(rng.normals(rows)) });
        self
    }

    /// Returns the kind of the gate, and its heads, channels per head and features.
    pub fn gate_side(&self) -> Option<(OutputGate, [usize; 3])> {
        let c = &self.config;
        let gate = c.output_gate?;
        let dim = if gate == OutputGate::Headwise { 1 } else { c.value_dim };
        Some((gate, [c.heads, dim, c.query_features]))
    }

    /// Returns the number of gate channels of a query.
    pub fn gate_channels(&self) -> usize {
        self.gate_side().map_or(0, |(_, [heads, dim, _])| heads * dim)
    }

    /// Returns the shape of the gate's weight on the device, `[1, heads or 1, out, in]`.
    pub fn gate_shape(&self) -> Option<[usize; 4]> {
        self.gate_side().map(|(_, [heads, dim, features])| self.side_shape((heads, dim, features)))
    }

    /// Returns the gate's logits, naive sums stored as `dtype`: `[batch · q_len, heads ·
    /// channels]`.
    pub fn naive_logits(&self, dtype: DType) -> Option<Vec<f32>> {
        let (gate, (_, [heads, dim, features])) = self.gate.as_ref().zip(self.gate_side())?;
        let weight = self.wide_of(&gate.weight, (heads, dim, features));
        let y = project(&self.inputs[0], &weight, gate.bias.as_deref(), features, heads * dim);
        Some(stored(&y.expect("it fits"), dtype))
    }

    /// Multiplies the joined heads' outputs with their gates, if the layer has any. `f` is the
    /// sigmoid or its slope.
    pub fn gated(context: &[f32], logits: Option<&[f32]>, f: impl Fn(f32) -> f32) -> Vec<f32> {
        let Some(logits) = logits else { return context.to_vec() };
        let channels = context.len() / logits.len();
        context.iter().enumerate().map(|(n, x)| x * f(logits[n / channels])).collect()
    }

    pub fn appended_len(&self) -> usize {
        usize::from(self.appended.is_some()) + usize::from(self.config.add_zero_attn)
    }

    /// Returns the shape of the inner attention.
    pub fn attention(&self) -> wgpu_attention::Shape {
        let MultiHeadShape { batch, q_len, kv_len } = self.shape;
        self.config.shape(batch, q_len, kv_len, self.appended_len())
    }

    /// Returns heads, channels per head and features of the sides: queries, keys, values.
    pub fn sides(&self) -> [(usize, usize, usize); 3] {
        let c = &self.config;
        [
            (c.heads, c.head_dim, c.query_features),
            (c.kv_heads, c.head_dim, c.key_features),
            (c.kv_heads, c.value_dim, c.value_features),
        ]
    }

    /// Returns the shapes of the four weights on the device, `[1, heads or 1, out, in]`.
    pub fn weight_shapes(&self) -> [[usize; 4]; 4] {
        let c = &self.config;
        let [q, k, v] = self.sides().map(|side| self.side_shape(side));
        [q, k, v, [1, 1, c.out_features, c.heads * c.value_dim]]
    }

    fn side_shape(&self, (heads, dim, features): (usize, usize, usize)) -> [usize; 4] {
        match (self.config.narrow, self.shared) {
            (false, _) => [1, 1, heads * dim, features],
            (true, false) => [1, heads, dim, features / heads],
            (true, true) => [1, 1, dim, features / heads],
        }
    }

    pub fn stored(&self, setup: &LayerSetup) -> Self {
        let linear = |l: &LinearData| LinearData {
            weight: stored(&l.weight, setup.weight),
            bias: l.bias.as_ref().map(|b| stored(b, setup.bias)),
        };
        LayerCase {
            inputs: self.inputs.each_ref().map(|x| stored(x, setup.dtype)),
            linears: self.linears.each_ref().map(linear),
            gate: self.gate.as_ref().map(linear),
            appended: self.appended.as_ref().map(|pair| pair.each_ref().map(|x| stored(x, setup.weight))),
            norms: self.norms.each_ref().map(|n| NormData {
                weight: n.weight.as_ref().map(|w| stored(w, setup.weight)),
                bias: n.bias.as_ref().map(|b| stored(b, setup.bias)),
            }),
            rules: self.rules.stored(setup.bias),
            ..self.clone()
        }
    }

    pub fn options(&self) -> Options<'_> {
        let options = self.inner_options();
        self.rotary.as_ref().map_or(options, |rotary| rotary.options(options))
    }

    fn inner_options(&self) -> Options<'_> {
        Options::new()
            .mask(self.rules.host())
            .dropout(self.dropout.as_ref().map(DropoutData::host))
            .weights(true)
    }

    /// Returns the weight with a matrix for every head, repeated if heads share one.
    pub fn per_head(&self, side: usize) -> Vec<f32> {
        let weight = &self.linears[side].weight;
        if side < 3 { self.repeated(weight, self.sides()[side].0) } else { weight.clone() }
    }

    /// Repeats a shared matrix for each of `heads`.
    pub fn repeated(&self, weight: &[f32], heads: usize) -> Vec<f32> {
        if self.config.narrow && self.shared { weight.repeat(heads) } else { weight.to_vec() }
    }

    /// Returns the exact result.
    pub fn exact(&self) -> Attended<f64> {
        let inputs = self.inputs.each_ref().map(|x| widen::<f64>(x));
        let weights = self.wide_weights::<f64>();
        let inputs = [&inputs[0][..], &inputs[1], &inputs[2]];
        reference::multi_head(inputs, self.shape, &self.config.config(), &weights.host(), &self.options())
            .expect("the case fits the reference")
    }

    /// Returns projected queries, keys and values, with appended ones, as naive sums stored as
    /// `dtype`.
    pub fn naive_heads(&self, dtype: DType) -> [Vec<f32>; 3] {
        let MultiHeadShape { q_len, kv_len, .. } = self.shape;
        std::array::from_fn(|n| {
            let (heads, dim, features) = self.sides()[n];
            let weight = self.wide(n);
            let bias = self.linears[n].bias.as_deref();
            let mut y = project(&self.inputs[n], &weight, bias, features, heads * dim).expect("it fits");
            let length = if n == 0 { q_len } else { kv_len };
            if let Some(config) = self.config.qk_norm.as_ref().filter(|_| n < 2) {
                y = self.norms[n].normed(&stored(&y, dtype), dim, config);
            }
            if let Some(rotary) = self.rotary.as_ref().filter(|_| n < 2) {
                y = rotary.turned(&stored(&y, dtype), [heads, length, dim], false);
            }
            let mut full = Vec::new();
            for sequence in y.chunks_exact_mut(length * heads * dim) {
                full.extend_from_slice(sequence);
                if n > 0 {
                    full.extend(self.appended.iter().flat_map(|pair| pair[n - 1].iter().copied()));
                    full.extend(vec![0.0; usize::from(self.config.add_zero_attn) * heads * dim]);
                }
            }
            let length = if n == 0 { q_len } else { kv_len + self.appended_len() };
            stored(&split_heads(&full, length, heads, dim).expect("it fits"), dtype)
        })
    }

    /// Returns the options of the inner attention.
    pub fn attention_options(&self) -> Options<'_> {
        let LayerOptions { scale, softcap, .. } = self.config;
        self.inner_options().appended(self.appended_len()).scale(scale).softcap(softcap)
    }

    /// Computes the layer in f32 in the naive way, with intermediate tensors stored as `dtype`.
    fn naive(&self, dtype: DType) -> Naive {
        let c = &self.config;
        let shape = self.attention();
        let MultiHeadShape { batch, q_len, .. } = self.shape;
        let heads = self.naive_heads(dtype);
        let [q, k, v] = &heads;
        let attended = reference::attention(q, k, v, shape, &self.attention_options())
            .expect("the case fits the reference");
        let context =
            stored(&join_heads(&attended.out, q_len, c.heads, c.value_dim).expect("it fits"), dtype);
        let sigmoid = |x: f32| reference::activate(x, Activation::Sigmoid);
        let gated = LayerCase::gated(&context, self.naive_logits(dtype).as_deref(), sigmoid);
        let context = stored(&gated, dtype);
        let width = c.heads * c.value_dim;
        let out = &self.linears[3];
        let y = project(&context, &out.weight, out.bias.as_deref(), width, c.out_features).expect("it fits");
        let scores = reference::scores::<f64>(
            &widen(q),
            &widen(k),
            shape,
            c.scale.unwrap_or(1.0 / (shape.head_dim as f64).sqrt()),
        )
        .expect("it fits");
        let bias = self.rules.bias.iter().flat_map(|b| &b.data).map(|b| f64::from(*b));
        let bias = bias.filter(|b| b.abs() < HIDES);
        let most = |x: &[f32]| largest(x.iter().map(|x| f64::from(*x)));
        Naive {
            out: widened(&y, dtype),
            lse: widened(&attended.lse, DType::F32),
            term: most(&context) * most(&out.weight) + out.bias.as_deref().map_or(0.0, most),
            score: largest(scores) + largest(bias) + 1.0,
            weights: attended.weights.expect("asked for"),
            batch,
        }
    }

    /// Returns the weight `[heads · dim, features]` that is equivalent to a narrow one.
    pub fn wide(&self, side: usize) -> Vec<f32> {
        self.wide_of(&self.linears[side].weight, self.sides()[side])
    }

    pub fn wide_of(&self, weight: &[f32], (heads, dim, features): (usize, usize, usize)) -> Vec<f32> {
        let weight = self.repeated(weight, heads);
        if !self.config.narrow {
            return weight;
        }
        let read = features / heads;
        let mut wide = vec![0.0; heads * dim * features];
        for (row, part) in weight.chunks_exact(read).enumerate() {
            wide[row * features + row / dim * read..][..read].copy_from_slice(part);
        }
        wide
    }

    /// Returns the expected results of a run with `setup`. Call it on the result of
    /// [`LayerCase::stored`].
    pub fn truth(&self, setup: &LayerSetup) -> Truth {
        let exact = self.exact();
        let exact_weights = exact.weights.expect("asked for");
        let naive = self.naive(setup.dtype);
        // Intermediates are rounded too, so an f16 layer may be off by several f16 spacings.
        let epsilon = match setup.dtype {
            DType::F16 => EPSILON_F16,
            DType::BF16 => EPSILON_BF16,
            _ => EPSILON_F32,
        };
        let judged = |naive: &[f64], want: Vec<f64>, magnitude| {
            let tolerance = Tolerance::from_naive(naive, &want, magnitude, epsilon);
            Judged { want, tolerance }
        };
        let factor = self.dropout.as_ref().map_or(1.0, DropoutData::factor);
        let heads = self.config.heads;
        let weights = match setup.weights {
            Weights::None => None,
            Weights::PerHead(d) => Some(judged(&widened(&naive.weights, d), exact_weights, factor)),
            Weights::Mean(d) => Some(judged(
                &widened(&average_heads(&naive.weights, naive.batch, heads).expect("it fits"), d),
                average_heads(&exact_weights, naive.batch, heads).expect("it fits"),
                factor,
            )),
        };
        Truth {
            out: judged(&naive.out, exact.out, naive.term * factor),
            lse: judged(&naive.lse, in_f32(exact.lse), naive.score),
            weights,
        }
    }
}

struct Naive {
    out: Vec<f64>,
    lse: Vec<f64>,
    weights: Vec<f32>,
    batch: usize,
    /// The largest term of the output projection's sums.
    term: f64,
    /// The largest score.
    score: f64,
}

/// The memory layout of a layer's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Dense `[out, in]`, each in a separate buffer.
    Separate,
    /// All weights in one buffer, all biases in another, `gap` elements between them.
    OneBuffer { gap: usize },
    /// `[in, out]`, each in a separate buffer.
    Transposed,
    /// Random windows.
    Window(u64),
}

/// The device, target, path, types and layout of a run.
#[derive(Clone, Copy, Debug)]
pub struct LayerSetup {
    pub profile: &'static Profile,
    pub form: Target,
    pub path: Algorithm,
    /// The type of inputs, intermediates and output.
    pub dtype: DType,
    /// The type of weights and of appended keys and values.
    pub weight: DType,
    /// The type of biases, and of the mask's bias.
    pub bias: DType,
    pub layout: LayerLayout,
    pub storage: Storage,
    pub lse: bool,
    pub weights: Weights,
}

/// The memory layout of inputs and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerLayout {
    /// `[batch, length, features]`.
    Dense,
    /// `[length, batch, features]`.
    SeqFirst,
    Window(u64),
}

impl fmt::Display for LayerSetup {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let LayerSetup { profile, form, path, dtype, weight, bias, layout, storage, lse, weights } = self;
        write!(
            f,
            "{}, {path:?}, {form:?}, {dtype:?}, weights {weight:?}, biases {bias:?}, {layout:?}, {storage:?}, lse {lse}, \
             weights {weights:?}",
            profile.name
        )
    }
}

/// Returns setups for every device, target and type. Both targets together have every layout and
/// storage, with three runs each in f32. One target has a run in f16, the other one a run on the
/// plain device, in f32 or bf16. One of the three f32 runs always runs, and one of the other two
/// runs. The mask's rules choose them, so that layers with the same rules share kernels.
pub fn layer_setups(case: &LayerCase) -> Vec<LayerSetup> {
    let rules = case.rules.names().join(" ");
    let (seed, due) = (Rng::named(&rules).word() | 1, due(&rules));
    let mut all = Vec::new();
    for (n, form) in FORMS.into_iter().enumerate() {
        let plain = [DType::F32, DType::BF16][(seed >> 42) as usize % 2];
        let other = [(full(), DType::F16, 3, 1), (defaults(), plain, 4, 1)];
        let runs = [(full(), DType::F32, 0, 3), other[(n + (seed >> 40) as usize) % 2]];
        for (profile, dtype, from, count) in runs {
            let kinds = [
                (LayerLayout::Dense, Storage::Separate, false, Weights::Mean(DType::F32)),
                (LayerLayout::Dense, Storage::OneBuffer { gap: 0 }, true, Weights::None),
                (LayerLayout::SeqFirst, Storage::Transposed, true, Weights::PerHead(DType::F32)),
                (LayerLayout::Window(seed), Storage::Window(seed), false, Weights::Mean(dtype)),
                (LayerLayout::Dense, Storage::OneBuffer { gap: 3 }, true, Weights::PerHead(dtype)),
            ];
            let first = (seed >> 32) as usize % kinds.len() + 3 * n + from;
            for at in first..first + count {
                let (layout, storage, lse, weights) = kinds[at % kinds.len()];
                let mixed = storage == Storage::Transposed;
                let other = if mixed { DType::F32 } else { dtype };
                let setup = LayerSetup {
                    profile,
                    form,
                    path: Algorithm::Auto,
                    dtype,
                    weight: other,
                    bias: if layout == LayerLayout::Dense { other } else { DType::F32 },
                    layout,
                    storage,
                    lse,
                    weights,
                };
                let always = at == first && (from == 0 || n == (seed >> 41) as usize % 2);
                if always && due || rest(&format!("{}, {setup}", case.name)) {
                    all.push(setup);
                }
            }
        }
    }
    all
}

/// Places tensors of one kind, each in a separate buffer or all in one.
fn place_all(
    profile: &Profile,
    tensors: &[(&[f32], [usize; 4])],
    dtype: DType,
    storage: Storage,
) -> Vec<(Image, Place, wgpu::Buffer)> {
    if let Storage::OneBuffer { gap } = storage {
        let mut offset = gap;
        let places: Vec<Place> = tensors
            .iter()
            .map(|(_, shape)| {
                let mut place = Place::dense(*shape);
                place.offset += offset;
                place.len += offset;
                offset += shape.iter().product::<usize>() + gap;
                place
            })
            .collect();
        let parts: Vec<_> =
            tensors.iter().zip(&places).map(|((x, _), place)| (Values::Floats(x), *place)).collect();
        let image = Image::inputs(&parts, dtype);
        let buffer = image.upload(&profile.gpu);
        return places.into_iter().map(|place| (image.clone(), place, buffer.clone())).collect();
    }
    let seed = if let Storage::Window(seed) = storage { seed } else { 0 };
    let mut rng = Rng::new(seed);
    tensors
        .iter()
        .map(|(x, shape)| {
            let place = match storage {
                Storage::Window(_) => window(*shape, &mut rng, seed),
                Storage::Transposed => Place::transposed(*shape),
                _ => Place::dense(*shape),
            };
            let image = Image::input(Values::Floats(x), dtype, &place);
            let buffer = image.upload(&profile.gpu);
            (image, place, buffer)
        })
        .collect()
}

/// Runs `case`, whose data must fit `setup`'s types, and checks everything around its outputs.
/// `change` sets further options of the configuration.
#[cfg(not(target_arch = "wasm32"))]
pub fn run_layer_with(
    case: &LayerCase,
    setup: &LayerSetup,
    change: impl FnOnce(KernelOptions) -> KernelOptions,
) -> Result<Got, String> {
    pollster::block_on(run_layer_async(case, setup, change))
}

/// Like [`run_layer_with`], not blocking.
pub async fn run_layer_async(
    case: &LayerCase,
    setup: &LayerSetup,
    change: impl FnOnce(KernelOptions) -> KernelOptions,
) -> Result<Got, String> {
    let LayerSetup { profile, dtype, .. } = *setup;
    profile.tidy();
    let mut placed = PlacedLayer::new(case, setup);
    let out_at = placed.place(case.shape.q_len, case.config.out_features);
    let shape = case.attention();
    let outputs = setup.layout.outputs();
    let out = Placed::output(profile, dtype, out_at);
    let lse = setup.lse.then(|| Placed::output(profile, DType::F32, outputs.places([shape.lse()])[0]));
    let matrix = weights_wanted(setup.weights, shape.weights())
        .map(|(dtype, shape)| Placed::output(profile, dtype, outputs.places([[1; 4], shape])[1]));
    let call = placed
        .call(out.view())
        .lse(lse.as_ref().map(Placed::view))
        .weights(matrix.as_ref().map(Placed::view));

    let refused = |e: wgpu_attention::Error| format!("refused: {e}");
    let device = profile.gpu.device();
    let layer = placed.layer(change).map_err(refused)?;
    let mut scratch = Scratch::new(device, layer.scratch_size(&call).map_err(refused)?).map_err(refused)?;
    let mut encoder = device.create_command_encoder(&Default::default());
    layer.forward(&mut encoder, &call, &mut scratch).map_err(refused)?;
    profile.gpu.queue().submit([encoder.finish()]);
    Got::read(profile, &out, lse.as_ref(), matrix.as_ref()).await
}

impl LayerLayout {
    /// Returns the layout of the attention's outputs.
    pub fn outputs(self) -> Layout {
        match self {
            LayerLayout::Window(seed) => Layout::Window(seed ^ 6),
            LayerLayout::SeqFirst => Layout::Blhd,
            LayerLayout::Dense => Layout::Dense,
        }
    }
}

/// The tensors that a layer reads, on the device.
pub struct PlacedLayer<'c> {
    case: &'c LayerCase,
    setup: LayerSetup,
    /// Draws places.
    rng: Rng,
    inputs: Vec<Placed>,
    weights: Vec<(Image, Place, wgpu::Buffer)>,
    biases: Vec<(Image, Place, wgpu::Buffer)>,
    /// The linears that have a bias.
    with_bias: Vec<usize>,
    extra: Vec<(Image, Place, wgpu::Buffer)>,
    /// Weights and biases of the norms, in the order of [`LayerCase::norms`].
    norms: Vec<Option<Placed>>,
    /// Weight and bias of the gate.
    gate: [Vec<(Image, Place, wgpu::Buffer)>; 2],
    rules: PlacedRules,
    rotary: Option<PlacedRotary>,
    keep: Option<Placed>,
}

impl<'c> PlacedLayer<'c> {
    pub fn new(case: &'c LayerCase, setup: &LayerSetup) -> Self {
        let LayerSetup { profile, dtype, layout, storage, .. } = *setup;
        let MultiHeadShape { q_len, kv_len, .. } = case.shape;
        let config = case.config;
        let shapes = case.weight_shapes();
        let tensors: Vec<_> = (0..4).map(|n| (&case.linears[n].weight[..], shapes[n])).collect();
        let with_bias: Vec<_> = (0..4).filter(|n| case.linears[*n].bias.is_some()).collect();
        let vector = |x: &'c [f32]| (x, [1, 1, 1, x.len()]);
        let biases = with_bias.iter().filter_map(|n| case.linears[*n].bias.as_deref());
        let biases: Vec<_> = biases.map(vector).collect();
        let extra: Vec<_> = case.appended.iter().flatten().map(|x| vector(x)).collect();
        let gate = case.gate.as_ref().zip(case.gate_shape());
        let of_gate: Vec<_> = gate.iter().map(|(gate, shape)| (&gate.weight[..], *shape)).collect();
        let bias_of_gate: Vec<_> =
            gate.iter().filter_map(|(gate, _)| Some(vector(gate.bias.as_deref()?))).collect();
        let mut placed = PlacedLayer {
            case,
            setup: *setup,
            rng: Rng::new(if let LayerLayout::Window(seed) = layout { seed } else { 0 }),
            inputs: Vec::new(),
            weights: place_all(profile, &tensors, setup.weight, storage),
            biases: place_all(profile, &biases, setup.bias, storage),
            with_bias,
            extra: place_all(profile, &extra, setup.weight, storage),
            norms: case
                .norms
                .iter()
                .flat_map(|norm| [(&norm.weight, setup.weight), (&norm.bias, setup.bias)])
                .map(|(x, dtype)| {
                    let x = x.as_ref()?;
                    let [at] = layout.outputs().places([[1, 1, 1, x.len()]]);
                    Some(Placed::input(profile, Values::Floats(x), dtype, at))
                })
                .collect(),
            gate: [
                place_all(profile, &of_gate, setup.weight, storage),
                place_all(profile, &bias_of_gate, setup.bias, storage),
            ],
            rules: PlacedRules::new(profile, &case.rules, setup.bias, layout.outputs()),
            rotary: case.rotary.as_ref().map(|rotary| rotary.place(profile)),
            keep: place_dropout(profile, case.dropout.as_ref(), layout.outputs()),
        };
        let sides =
            [(q_len, config.query_features), (kv_len, config.key_features), (kv_len, config.value_features)];
        let places = sides.map(|(length, features)| placed.place(length, features));
        let inputs = (0..3).take(if case.one_input { 1 } else { 3 });
        placed.inputs = inputs
            .map(|n| Placed::input(profile, Values::Floats(&case.inputs[n]), dtype, places[n]))
            .collect();
        placed
    }

    /// Returns a place for a tensor `[batch, 1, length, features]`.
    pub fn place(&mut self, length: usize, features: usize) -> Place {
        let shape = [self.case.shape.batch, 1, length, features];
        match self.setup.layout {
            LayerLayout::Dense => Place::dense(shape),
            LayerLayout::SeqFirst => Place::lbhd(shape),
            LayerLayout::Window(seed) => window(shape, &mut self.rng, seed),
        }
    }

    pub fn layer(
        &self,
        change: impl FnOnce(KernelOptions) -> KernelOptions,
    ) -> Result<MultiHeadAttention, wgpu_attention::Error> {
        fn view((image, place, buffer): &(Image, Place, wgpu::Buffer)) -> TensorView<'_> {
            image.view(buffer, place)
        }
        let LayerSetup { profile, form, path, dtype, .. } = self.setup;
        let linear = |n: usize| Linear {
            weight: view(&self.weights[n]),
            bias: self.with_bias.iter().position(|with| *with == n).map(|at| view(&self.biases[at])),
        };
        let norm = |n: usize| NormWeights {
            weight: self.norms[n].as_ref().map(Placed::view),
            bias: self.norms[n + 1].as_ref().map(Placed::view),
        };
        let weights = MultiHeadWeights {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            bias_kv: self.case.appended.as_ref().map(|_| [view(&self.extra[0]), view(&self.extra[1])]),
            qk_norm: self.case.config.qk_norm.map(|_| [0, 2].map(norm)),
            gate: self.gate[0]
                .first()
                .map(|weight| Linear { weight: view(weight), bias: self.gate[1].first().map(view) }),
        };
        let config = LayerOptions { dtype, ..self.case.config };
        let layer = MultiHeadAttention::with_pipelines(profile.gpu.pipelines(), config.config(), &weights)?;
        Ok(layer.kernel_options(change(KernelOptions::new().target(form).algorithm(path))))
    }

    /// Returns the call, without optional outputs.
    pub fn call<'a>(&'a self, out: TensorView<'a>) -> MultiHeadForward<'a> {
        let input =
            |n: usize| if self.case.one_input { self.inputs[0].view() } else { self.inputs[n].view() };
        let call = MultiHeadForward::new(input(0), input(1), input(2), out)
            .mask(self.rules.mask())
            .dropout(device_dropout(self.case.dropout.as_ref(), self.keep.as_ref()));
        match &self.rotary {
            Some(rotary) => call.rotary(rotary.rotation(), rotary.at()),
            None => call,
        }
    }
}

/// The expected results of layers, by types of tensors, weights and biases, and by attention
/// weights.
pub type LayerTruths = HashMap<(DType, DType, DType, Weights), (LayerCase, Truth)>;

impl Report {
    /// Runs a layer in every setup.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check_layer(&mut self, case: &LayerCase) {
        let mut truths = HashMap::new();
        for setup in layer_setups(case) {
            self.check_layer_in(case, &setup, &mut truths);
        }
    }

    /// Runs a layer in one setup.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check_layer_in(&mut self, case: &LayerCase, setup: &LayerSetup, truths: &mut LayerTruths) {
        pollster::block_on(self.check_layer_async(case, setup, truths));
    }

    /// Like [`check_layer_in`](Self::check_layer_in), not blocking.
    pub async fn check_layer_async(
        &mut self,
        case: &LayerCase,
        setup: &LayerSetup,
        truths: &mut LayerTruths,
    ) {
        let LayerSetup { dtype, weight, bias, weights, .. } = *setup;
        let (stored, truth) = truths.entry((dtype, weight, bias, weights)).or_insert_with(|| {
            let stored = case.stored(setup);
            let truth = stored.truth(setup);
            (stored, truth)
        });
        let exact = [dtype, weight, bias].iter().all(|d| *d == DType::F32);
        let shape = case.attention();
        let judged = run_layer_async(stored, setup, |kernel_options| kernel_options)
            .await
            .and_then(|got| judge_outputs(&case.expected, shape, truth, &got, exact));
        self.record(&case.name, setup, judged);
    }
}
