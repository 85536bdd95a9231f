//! Small cases of stacks of encoder and decoder layers, with all weights in one buffer.

use wgpu_attention::cache::{CacheStorage, Tokens};
use wgpu_attention::layers::{
    DecoderForward, DecoderLayerWeights, DecoderMemory, EncoderBackward, EncoderForward,
    EncoderLayerGradients, EncoderLayerWeights, FeedForwardWeights, MultiHeadConfig, MultiHeadWeights,
    NormOrder, TransformerLayerConfig,
};
use wgpu_attention::matmul::Activation;
use wgpu_attention::reference::compare::{EPSILON_BF16, EPSILON_F16, EPSILON_F32, Tolerance};
use wgpu_attention::reference::{
    self, HostDecoderLayer, HostEncoderLayer, HostFeedForward, HostLinear, HostNorm, HostWeights,
    MultiHeadShape, Options, Real, widen,
};
use wgpu_attention::rows::{NormConfig, NormWeights};
use wgpu_attention::tuning::Target;
use wgpu_attention::{
    Cache, CacheConfig, DType, Error, KernelOptions, Linear, Scratch, TensorView, TransformerDecoder,
    TransformerEncoder,
};

use super::case::{HostData, Judged, Rules, largest, widened};
use super::device::Profile;
use super::memory::{Image, Values, stored};
use super::random::Rng;
use super::run::{Layout, Placed, PlacedRules};

const HEADS: usize = 2;
const FEATURES: usize = 12;
const HIDDEN: usize = 20;
const LAYERS: usize = 2;
const BATCH: usize = 2;
const MEMORY_LEN: usize = 9;

/// The configuration of a stack.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub order: NormOrder,
    pub gated: bool,
    pub activation: Activation,
    pub form: Target,
    /// The type of rows and weights.
    pub dtype: DType,
}

/// A linear part or a norm of a layer: its start among all weights, and its rows and columns. Its
/// bias follows it. Linear parts come before norms.
struct Part {
    first: usize,
    shape: [usize; 2],
    is_norm: bool,
}

impl Part {
    fn bias_len(&self) -> usize {
        self.shape[usize::from(self.is_norm)]
    }

    fn weight_len(&self) -> usize {
        self.shape[0] * self.shape[1]
    }

    fn end(&self) -> usize {
        self.first + self.weight_len() + self.bias_len()
    }

    fn host<'a, R>(&self, all: &'a [R]) -> [&'a [R]; 2] {
        let (weight, bias) = all[self.first..self.end()].split_at(self.weight_len());
        [weight, bias]
    }

    fn linear<'a, R>(&self, all: &'a [R]) -> HostLinear<'a, R> {
        let [weight, bias] = self.host(all);
        HostLinear { weight, bias: Some(bias) }
    }

    fn norm<'a, R>(&self, all: &'a [R]) -> HostNorm<'a, R> {
        let [weight, bias] = self.host(all).map(Some);
        HostNorm { weight, bias }
    }

    fn views<'a>(&self, buffer: &'a wgpu::Buffer, dtype: DType) -> [TensorView<'a>; 2] {
        let weight = TensorView::matrix(buffer, dtype, self.shape).with_offset(self.first);
        let bias = TensorView::vector(buffer, dtype, self.bias_len());
        [weight, bias.with_offset(self.first + self.weight_len())]
    }

    fn placed<'a>(&self, buffer: &'a wgpu::Buffer, dtype: DType) -> Linear<'a> {
        let [weight, bias] = self.views(buffer, dtype);
        Linear { weight, bias: Some(bias) }
    }

    fn placed_norm<'a>(&self, buffer: &'a wgpu::Buffer, dtype: DType) -> NormWeights<'a> {
        let [weight, bias] = self.views(buffer, dtype).map(Some);
        NormWeights { weight, bias }
    }
}

/// A stack of [`LAYERS`] layers and a final norm, with its weights.
struct Stack {
    kind: Kind,
    /// The number of attentions in a layer.
    attentions: usize,
    parts: Vec<Vec<Part>>,
    last: Part,
    /// The weights as stored.
    weights: Vec<f32>,
}

impl Stack {
    fn new(name: &str, kind: Kind, attentions: usize) -> Self {
        let rng = &mut Rng::named(name);
        let (e, f) = (FEATURES, HIDDEN);
        let mut weights = Vec::new();
        let mut part = |[out, from]: [usize; 2], is_norm: bool| {
            let first = weights.len();
            let scale = if is_norm { 0.2 } else { 1.0 / (from as f32).sqrt() };
            let near = f32::from(u8::from(is_norm));
            weights.extend(rng.normals(out * from).iter().map(|w| near + scale * w));
            let part = Part { first, shape: [out, from], is_norm };
            weights.extend(rng.normals(part.bias_len()).iter().map(|b| 0.3 * b));
            part
        };
        let parts = (0..LAYERS)
            .map(|_| {
                let mut shapes = vec![[e, e]; 4 * attentions];
                shapes.extend([[f, e], [e, f]]);
                shapes.extend(kind.gated.then_some([f, e]));
                let linear: Vec<_> = shapes.into_iter().map(|shape| part(shape, false)).collect();
                let norms = (0..=attentions).map(|_| part([1, e], true));
                linear.into_iter().chain(norms).collect()
            })
            .collect();
        let last = part([1, e], true);
        let weights = stored(&weights, kind.dtype);
        Stack { kind, attentions, parts, last, weights }
    }

    fn config(&self, dtype: DType) -> TransformerLayerConfig {
        let Kind { order, gated, activation, .. } = self.kind;
        let norm = if gated { NormConfig::rms() } else { NormConfig::layer() };
        TransformerLayerConfig::new(MultiHeadConfig::new(FEATURES, HEADS).dtype(dtype), HIDDEN)
            .activation(activation)
            .gated(gated)
            .order(order)
            .norm(norm)
    }

    fn upload(&self, profile: &Profile) -> wgpu::Buffer {
        let [place] = Layout::Dense.places([[1, 1, 1, self.weights.len()]]);
        Image::input(Values::Floats(&self.weights), self.kind.dtype, &place).upload(&profile.gpu)
    }

    /// Returns the norms of a layer, after its linear parts.
    fn norms<'a>(&self, parts: &'a [Part]) -> &'a [Part] {
        &parts[parts.len() - self.attentions - 1..]
    }

    fn attention<'a, R>(&self, parts: &[Part], n: usize, all: &'a [R]) -> HostWeights<'a, R> {
        let [query, key, value, out] = [0, 1, 2, 3].map(|k| parts[4 * n + k].linear(all));
        HostWeights { query, key, value, out, bias_kv: None, qk_norm: None, gate: None }
    }

    fn feed_forward<'a, R>(&self, parts: &[Part], all: &'a [R]) -> HostFeedForward<'a, R> {
        let [up, down, gate] = self.feed_parts(parts).map(|part| part.linear(all));
        HostFeedForward { up, gate: self.kind.gated.then_some(gate), down }
    }

    /// Returns up, down, and gate if there is one.
    fn feed_parts<'a>(&self, parts: &'a [Part]) -> [&'a Part; 3] {
        let first = 4 * self.attentions;
        [&parts[first], &parts[first + 1], &parts[first + if self.kind.gated { 2 } else { 0 }]]
    }

    fn placed_attention<'a>(
        &self,
        parts: &[Part],
        n: usize,
        buffer: &'a wgpu::Buffer,
    ) -> MultiHeadWeights<'a> {
        let [query, key, value, out] = [0, 1, 2, 3].map(|k| parts[4 * n + k].placed(buffer, self.kind.dtype));
        MultiHeadWeights { query, key, value, out, bias_kv: None, qk_norm: None, gate: None }
    }

    fn placed_feed_forward<'a>(&self, parts: &[Part], buffer: &'a wgpu::Buffer) -> FeedForwardWeights<'a> {
        let [up, down, gate] = self.feed_parts(parts).map(|part| part.placed(buffer, self.kind.dtype));
        FeedForwardWeights { up, gate: self.kind.gated.then_some(gate), down }
    }

    fn kernel_options(&self) -> KernelOptions {
        KernelOptions::new().target(self.kind.form)
    }

    fn epsilon(&self) -> f64 {
        match self.kind.dtype {
            DType::F16 => EPSILON_F16,
            DType::BF16 => EPSILON_BF16,
            _ => EPSILON_F32,
        }
    }

    /// Returns rows as stored.
    fn rows(&self, name: &str, length: usize) -> Vec<f32> {
        stored(&Rng::named(name).normals(BATCH * length * FEATURES), self.kind.dtype)
    }

    /// Returns the error over the tolerance of a result, or of an f32 gradient with three times the
    /// naive error. The stages before it round to the stack's type, too.
    async fn judged(
        &self,
        profile: &Profile,
        (what, got, is_gradient): (&str, &Placed, bool),
        (naive, want): (&[f32], Vec<f64>),
        magnitude: f64,
    ) -> Result<f64, String> {
        let dtype = if is_gradient { DType::F32 } else { self.kind.dtype };
        let of = if is_gradient { Tolerance::gradient } else { Tolerance::from_naive };
        let tolerance = of(&widened(naive, dtype), &want, magnitude, self.epsilon());
        let judged = Judged { want, tolerance }.judge(&got.download_async(what, profile).await?);
        judged.map_err(|e| format!("{what}: {e}"))
    }
}

fn shape(length: usize) -> [usize; 4] {
    [BATCH, 1, length, FEATURES]
}

fn refused(e: Error) -> String {
    e.to_string()
}

/// Checks the output of each encoder layer, and the gradients of the input and of one weight.
pub async fn encoder(name: &str, kind: Kind, profile: &'static Profile) -> Result<f64, String> {
    profile.tidy();
    let length = 7;
    let stack = Stack::new(name, kind, 1);
    let (x, d_out) = (stack.rows("rows of an encoder", length), stack.rows("their gradients", length));
    let keep = HostData::of([BATCH, 1, 1, length], |[b, _, _, j]| b + j < length);
    let rules = match kind.order {
        NormOrder::Post => Rules { key_padding_mask: Some(keep), ..Default::default() },
        NormOrder::Pre => Rules { causal: true, ..Default::default() },
    };

    let buffer = stack.upload(profile);
    let layer = |parts: &Vec<Part>| EncoderLayerWeights {
        attention: stack.placed_attention(parts, 0, &buffer),
        feed_forward: stack.placed_feed_forward(parts, &buffer),
        norms: [0, 1].map(|n| stack.norms(parts)[n].placed_norm(&buffer, kind.dtype)),
    };
    let layers: Vec<_> = stack.parts.iter().map(layer).collect();
    let last = stack.last.placed_norm(&buffer, kind.dtype);
    let encoder = TransformerEncoder::with_pipelines(
        profile.gpu.pipelines(),
        stack.config(kind.dtype),
        &layers,
        Some(last),
    );
    let encoder = encoder.map_err(refused)?.kernel_options(stack.kernel_options());
    let layout = Layout::Window(7);
    let [x_at, out_at, d_out_at, d_x_at, kept_at] = layout.places([
        shape(length),
        shape(length),
        shape(length),
        shape(length),
        [LAYERS * BATCH, 1, length, FEATURES],
    ]);
    let [weight_at] = Layout::Dense.places([[1, 1, HIDDEN, FEATURES]]);
    let input = |data: &[f32], at| Placed::input(profile, Values::Floats(data), kind.dtype, at);
    let (x_placed, d_out_placed) = (input(&x, x_at), input(&d_out, d_out_at));
    let [out, kept] = [out_at, kept_at].map(|at| Placed::output(profile, kind.dtype, at));
    let [d_x, d_up] = [d_x_at, weight_at].map(|at| Placed::output(profile, DType::F32, at));
    let placed_rules = PlacedRules::new(profile, &rules, DType::F32, layout);
    let forward = EncoderForward::new(x_placed.view(), out.view()).mask(placed_rules.mask());
    let forward = forward.hidden(kept.view());
    let mut d_layers = [EncoderLayerGradients::default(); LAYERS];
    d_layers[0].feed_forward.up.weight = Some(d_up.view());
    let backward = EncoderBackward::new(forward, d_out_placed.view()).d_x(d_x.view()).d_layers(&d_layers);
    let size = encoder.scratch_size(&forward).map_err(refused)?;
    let size = size.max(encoder.backward_scratch_size(&backward).map_err(refused)?);
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    let recorded = profile.gpu.submit(|e| {
        encoder.forward(e, &forward, &mut scratch)?;
        encoder.backward(e, &backward, &mut scratch)
    });
    recorded.map_err(refused)?;

    /// Returns the output, the layers' outputs, and the gradients of x and of the first layer's
    /// first product.
    fn truth<R: Real>(stack: &Stack, [x, d_out]: [&[f32]; 2], rules: &Rules) -> Result<[Vec<R>; 4], Error> {
        let all: Vec<R> = widen(&stack.weights);
        let layer = |parts: &Vec<Part>| HostEncoderLayer {
            attention: stack.attention(parts, 0, &all),
            feed_forward: stack.feed_forward(parts, &all),
            norms: [0, 1].map(|n| stack.norms(parts)[n].norm(&all)),
        };
        let layers: Vec<_> = stack.parts.iter().map(layer).collect();
        let (last, config) = (stack.last.norm(&all), stack.config(DType::F32));
        let options = Options::new().mask(rules.host());
        let rows = [BATCH, x.len() / BATCH / FEATURES];
        let [x, d_out] = [x, d_out].map(widen::<R>);
        let got = reference::encoder(&x, rows, &config, &layers, Some(&last), &options)?;
        let back = reference::encoder_backward(&x, rows, &config, &layers, Some(&last), &options, &d_out)?;
        let of_up = back.layers[0].feed_forward.up.d_weight.clone();
        Ok([got.out, got.hidden.concat(), back.d_x, of_up])
    }
    let naive = truth::<f32>(&stack, [&x, &d_out], &rules).map_err(refused)?;
    let want = truth::<f64>(&stack, [&x, &d_out], &rules).map_err(refused)?;
    let most = [0, 2].map(|n| largest(want[n].iter().chain(&want[n + 1]).copied()));
    let results =
        [("out", &out, false), ("hidden", &kept, false), ("d_x", &d_x, true), ("d_up", &d_up, true)];
    let mut worst: f64 = 0.0;
    for (n, (result, want)) in results.into_iter().zip(want).enumerate() {
        worst = worst.max(stack.judged(profile, result, (&naive[n], want), most[n / 2]).await?);
    }
    Ok(worst)
}

/// Checks a decoder's output for all rows at once, or in steps of these lengths with a cache.
pub async fn decoder(
    name: &str,
    kind: Kind,
    steps: Option<&[usize]>,
    profile: &'static Profile,
) -> Result<f64, String> {
    profile.tidy();
    let length = 6;
    let stack = Stack::new(name, kind, 2);
    let x = stack.rows("rows of a decoder", length);
    let memory = stack.rows("rows of a memory", MEMORY_LEN);
    let keep = HostData::of([BATCH, 1, 1, MEMORY_LEN], |[b, _, _, j]| 2 * b + j < MEMORY_LEN);
    let rules = [
        Rules { causal: true, ..Default::default() },
        Rules { key_padding_mask: Some(keep), ..Default::default() },
    ];

    let buffer = stack.upload(profile);
    let layer = |parts: &Vec<Part>| DecoderLayerWeights {
        self_attention: stack.placed_attention(parts, 0, &buffer),
        cross_attention: stack.placed_attention(parts, 1, &buffer),
        feed_forward: stack.placed_feed_forward(parts, &buffer),
        norms: [0, 1, 2].map(|n| stack.norms(parts)[n].placed_norm(&buffer, kind.dtype)),
    };
    let layers: Vec<_> = stack.parts.iter().map(layer).collect();
    let last = stack.last.placed_norm(&buffer, kind.dtype);
    let pipelines = profile.gpu.pipelines();
    let decoder =
        TransformerDecoder::with_pipelines(pipelines, stack.config(kind.dtype), &layers, Some(last));
    let decoder = decoder.map_err(refused)?.kernel_options(stack.kernel_options());
    let layout = Layout::Window(7);
    let head_dim = FEATURES / HEADS;
    let heads = [LAYERS * BATCH, HEADS, MEMORY_LEN, head_dim];
    let [x_at, out_at, memory_at, keys_at, values_at] =
        layout.places([shape(length), shape(length), shape(MEMORY_LEN), heads, heads]);
    let input = |data: &[f32], at| Placed::input(profile, Values::Floats(data), kind.dtype, at);
    let (x_placed, memory_placed) = (input(&x, x_at), input(&memory, memory_at));
    let [out, keys, values] = [out_at, keys_at, values_at].map(|at| Placed::output(profile, kind.dtype, at));
    let projected = DecoderMemory { keys: keys.view(), values: values.view() };
    let masks = rules.each_ref().map(|r| PlacedRules::new(profile, r, DType::F32, layout));
    let storage = if kind.dtype == DType::F16 { CacheStorage::F16 } else { CacheStorage::F32 };
    let config = CacheConfig::new(HEADS, head_dim, length + 2).batch(BATCH).layers(LAYERS).storage(storage);
    let mut cache = Cache::with_pipelines(pipelines, config).map_err(refused)?;
    let mut first = 0;
    for rows in steps.unwrap_or(&[length]) {
        let [x, out] = [x_placed.view(), out.view()].map(|t| t.slice(2, first, *rows));
        if steps.is_some() {
            profile.gpu.submit(|e| cache.advance(e, Tokens::All(*rows))).map_err(refused)?;
        }
        let call = DecoderForward::new(x, projected, out)
            .mask(masks[0].mask())
            .memory_mask(masks[1].mask())
            .cache(steps.map(|_| &cache));
        let size = decoder.scratch_size(&call).map_err(refused)?;
        let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
        let recorded = profile.gpu.submit(|e| {
            if first == 0 {
                decoder.project_memory(e, memory_placed.view(), &projected, &mut scratch)?;
            }
            decoder.forward(e, &call, &mut scratch)
        });
        recorded.map_err(refused)?;
        first += rows;
    }

    fn truth<R: Real>(
        stack: &Stack,
        [x, memory]: [&[f32]; 2],
        rules: &[Rules; 2],
    ) -> Result<reference::Encoded<R>, Error> {
        let all: Vec<R> = widen(&stack.weights);
        let layer = |parts: &Vec<Part>| HostDecoderLayer {
            self_attention: stack.attention(parts, 0, &all),
            cross_attention: stack.attention(parts, 1, &all),
            feed_forward: stack.feed_forward(parts, &all),
            norms: [0, 1, 2].map(|n| stack.norms(parts)[n].norm(&all)),
        };
        let layers: Vec<_> = stack.parts.iter().map(layer).collect();
        let [own, cross] = rules.each_ref().map(|rules| Options::new().mask(rules.host()));
        let [q_len, kv_len] = [x, memory].map(|rows| rows.len() / BATCH / FEATURES);
        let inputs = [x, memory].map(widen::<R>);
        reference::decoder(
            inputs.each_ref().map(|x| &x[..]),
            MultiHeadShape { batch: BATCH, q_len, kv_len },
            &stack.config(DType::F32),
            &layers,
            Some(&stack.last.norm(&all)),
            [&own, &cross],
        )
    }
    let naive = truth::<f32>(&stack, [&x, &memory], &rules).map_err(refused)?;
    let want = truth::<f64>(&stack, [&x, &memory], &rules).map_err(refused)?;
    let most = largest(want.hidden.iter().flatten().chain(&want.out).copied());
    stack.judged(profile, ("out", &out, false), (&naive.out, want.out), most).await
}
