//! Stacks of encoder and decoder layers.

use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, max_error};
use wgpu_attention::reference::{
    self, HostDecoderLayer, HostEncoderLayer, HostFeedForward, HostLinear, HostNorm, HostWeights, LayerShape,
    Options, Real,
};
use wgpu_attention::{
    Activation, BlockConfig, Cache, CacheConfig, CacheLayout, CacheStorage, DType, DecoderForward,
    DecoderLayerWeights, DecoderMemory, EncoderBackward, EncoderForward, EncoderLayerGradients,
    EncoderLayerWeights, Error, FeedForwardGradients, FeedForwardWeights, KernelForm, LayerGradients,
    LayerWeights, Linear, LinearGradients, NormConfig, NormGradients, NormOrder, NormWeights, Scratch,
    TensorView, Tokens, TransformerDecoder, TransformerEncoder, Tuning,
};

use crate::arena::{BYTES, Buf, Window, view};
use crate::call::Memory;
use crate::call::{faults, float, judge, judge_within, largest, scratch_for, settle};
use crate::case::widened;
use crate::choices::Choices;
use crate::gradients::at;
use crate::layer_options::LayerOptions;
use crate::masks::MaskSpec;
use crate::operands::{record, recorded, refuses, small};
use crate::random::Rng;
use crate::world::{Outcome, World, refused};

/// A weight and its bias, or where their gradients go.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    weight: Option<Window>,
    bias: Option<Window>,
}

impl Part {
    fn views<'a>(&self, buffers: &'a [wgpu::Buffer]) -> [Option<TensorView<'a>>; 2] {
        [self.weight, self.bias].map(|w| w.map(|w| view(buffers, &w)))
    }

    fn linear<'a>(&self, buffers: &'a [wgpu::Buffer]) -> Linear<'a> {
        let [weight, bias] = self.views(buffers);
        Linear { weight: weight.expect("linear layers have weights"), bias }
    }

    fn norm<'a>(&self, buffers: &'a [wgpu::Buffer]) -> NormWeights<'a> {
        let [weight, bias] = self.views(buffers);
        NormWeights { weight, bias }
    }

    fn linear_gradients<'a>(&self, buffers: &'a [wgpu::Buffer]) -> LinearGradients<'a> {
        let [weight, bias] = self.views(buffers);
        LinearGradients { weight, bias }
    }

    fn norm_gradients<'a>(&self, buffers: &'a [wgpu::Buffer]) -> NormGradients<'a> {
        let [weight, bias] = self.views(buffers);
        NormGradients { weight, bias }
    }

    fn host<R: Real>(&self, data: &mut Data) -> HostPart<R> {
        let [weight, bias] = [self.weight, self.bias].map(|w| w.map(|w| data.of(&w)));
        HostPart { weight, bias }
    }

    fn windows(&mut self) -> impl Iterator<Item = &mut Window> {
        self.weight.iter_mut().chain(&mut self.bias)
    }
}

/// What windows hold: as it is, or each element off by up to four units in the last place of f32.
struct Data<'a> {
    bytes: &'a [Vec<u8>],
    nudged: Option<Rng>,
}

impl Data<'_> {
    fn of<R: Real>(&mut self, window: &Window) -> Vec<R> {
        let mut x = window.wide::<f64>(self.bytes);
        if let Some(rng) = &mut self.nudged {
            x.iter_mut().for_each(|x| *x *= 1.0 + (8.0 * rng.unit() - 4.0) * EPSILON_F32);
        }
        x.into_iter().map(R::of).collect()
    }
}

/// How far each of several results moves where all that they are computed from is off by a few units in the last place: what
/// a norm of nearly equal features, or a difference of large numbers, makes of any rounding.
fn moves(
    bytes: &[Vec<u8>],
    want: &[Vec<f64>],
    compute: impl Fn(&mut Data) -> Result<Vec<Vec<f64>>, String>,
) -> Result<Vec<f64>, String> {
    let mut most = vec![0f64; want.len()];
    for seed in 0..4 {
        let got = compute(&mut Data { bytes, nudged: Some(Rng::new(seed)) })?;
        for (most, (got, want)) in most.iter_mut().zip(got.iter().zip(want)) {
            *most = most.max(max_error(got, want));
        }
    }
    Ok(most)
}

/// Compares a result with the truth; `moved` says by what any rounding before it moves it.
fn judge_moved(
    what: &str,
    world: &World,
    window: &Window,
    (want, own): (&[f64], Tolerance),
    moved: f64,
) -> Result<(), String> {
    judge_within(what, world, window, want, Tolerance { absolute: own.absolute + 2.0 * moved })
}

/// The elements of a [`Part`].
struct HostPart<R> {
    weight: Option<Vec<R>>,
    bias: Option<Vec<R>>,
}

impl<R: Real> HostPart<R> {
    fn linear(&self) -> HostLinear<'_, R> {
        HostLinear {
            weight: self.weight.as_deref().expect("linear layers have weights"),
            bias: self.bias.as_deref(),
        }
    }

    fn norm(&self) -> HostNorm<'_, R> {
        HostNorm { weight: self.weight.as_deref(), bias: self.bias.as_deref() }
    }
}

/// A layer of an encoder, which has one attention and two norms, or of a decoder, which has two and three.
#[derive(Clone, Debug)]
struct Layer {
    /// Query, key, value, out of each.
    attentions: Vec<[Part; 4]>,
    appended: Option<[Window; 2]>,
    up: Part,
    gate: Option<Part>,
    down: Part,
    norms: Vec<Part>,
}

impl Layer {
    fn windows(&mut self) -> impl Iterator<Item = &mut Window> {
        let parts = self.attentions.iter_mut().flatten().chain([&mut self.up, &mut self.down]);
        let parts = parts.chain(&mut self.gate).chain(&mut self.norms);
        parts.flat_map(Part::windows).chain(self.appended.iter_mut().flatten())
    }

    fn attention<'a>(&self, n: usize, buffers: &'a [wgpu::Buffer]) -> LayerWeights<'a> {
        let [query, key, value, out] = self.attentions[n].each_ref().map(|part| part.linear(buffers));
        let bias_kv = self.appended.map(|pair| pair.map(|w| view(buffers, &w)));
        LayerWeights { query, key, value, out, bias_kv }
    }

    fn feed_forward<'a>(&self, buffers: &'a [wgpu::Buffer]) -> FeedForwardWeights<'a> {
        FeedForwardWeights {
            up: self.up.linear(buffers),
            gate: self.gate.as_ref().map(|part| part.linear(buffers)),
            down: self.down.linear(buffers),
        }
    }

    fn encoder<'a>(&self, buffers: &'a [wgpu::Buffer]) -> EncoderLayerWeights<'a> {
        EncoderLayerWeights {
            attention: self.attention(0, buffers),
            feed_forward: self.feed_forward(buffers),
            norms: [0, 1].map(|n| self.norms[n].norm(buffers)),
        }
    }

    fn decoder<'a>(&self, buffers: &'a [wgpu::Buffer]) -> DecoderLayerWeights<'a> {
        DecoderLayerWeights {
            self_attention: self.attention(0, buffers),
            cross_attention: self.attention(1, buffers),
            feed_forward: self.feed_forward(buffers),
            norms: [0, 1, 2].map(|n| self.norms[n].norm(buffers)),
        }
    }

    fn gradients<'a>(&self, buffers: &'a [wgpu::Buffer]) -> EncoderLayerGradients<'a> {
        let [query, key, value, out] =
            self.attentions[0].each_ref().map(|part| part.linear_gradients(buffers));
        let bias_kv = self.appended.map(|pair| pair.map(|w| view(buffers, &w)));
        EncoderLayerGradients {
            attention: LayerGradients { query, key, value, out, bias_kv },
            feed_forward: FeedForwardGradients {
                up: self.up.linear_gradients(buffers),
                gate: self.gate.map(|part| part.linear_gradients(buffers)).unwrap_or_default(),
                down: self.down.linear_gradients(buffers),
            },
            norms: [0, 1].map(|n| self.norms[n].norm_gradients(buffers)),
        }
    }

    fn host<R: Real>(&self, data: &mut Data) -> HostLayer<R> {
        HostLayer {
            attentions: self.attentions.iter().map(|of| of.each_ref().map(|p| p.host(data))).collect(),
            appended: self.appended.map(|pair| pair.map(|w| data.of(&w))),
            up: self.up.host(data),
            gate: self.gate.map(|part| part.host(data)),
            down: self.down.host(data),
            norms: self.norms.iter().map(|part| part.host(data)).collect(),
        }
    }
}

/// The elements of a [`Layer`].
struct HostLayer<R> {
    attentions: Vec<[HostPart<R>; 4]>,
    appended: Option<[Vec<R>; 2]>,
    up: HostPart<R>,
    gate: Option<HostPart<R>>,
    down: HostPart<R>,
    norms: Vec<HostPart<R>>,
}

impl<R: Real> HostLayer<R> {
    fn attention(&self, n: usize) -> HostWeights<'_, R> {
        let [query, key, value, out] = self.attentions[n].each_ref().map(HostPart::linear);
        let bias_kv = self.appended.as_ref().map(|pair| pair.each_ref().map(|x| &x[..]));
        HostWeights { query, key, value, out, bias_kv }
    }

    fn feed_forward(&self) -> HostFeedForward<'_, R> {
        HostFeedForward {
            up: self.up.linear(),
            gate: self.gate.as_ref().map(HostPart::linear),
            down: self.down.linear(),
        }
    }

    fn encoder(&self) -> HostEncoderLayer<'_, R> {
        HostEncoderLayer {
            attention: self.attention(0),
            feed_forward: self.feed_forward(),
            norms: [0, 1].map(|n| self.norms[n].norm()),
        }
    }

    fn decoder(&self) -> HostDecoderLayer<'_, R> {
        HostDecoderLayer {
            self_attention: self.attention(0),
            cross_attention: self.attention(1),
            feed_forward: self.feed_forward(),
            norms: [0, 1, 2].map(|n| self.norms[n].norm()),
        }
    }
}

/// What a stack is made of.
#[derive(Clone, Debug)]
struct Stack {
    attention: LayerOptions,
    hidden: usize,
    activation: Activation,
    gated: bool,
    order: NormOrder,
    rms: bool,
    eps: f64,
    layers: Vec<Layer>,
    final_norm: Option<Part>,
    form: KernelForm,
}

impl Stack {
    /// One of so many attentions to a layer.
    fn new(f: &mut Choices, c: &mut Choices, f16: bool, attentions: usize) -> Self {
        let [mut own, of_weights, of_biases] = [(); 3].map(|()| float(f, f16));
        // Of other types nothing is judged.
        if f.one_in(2) {
            own = DType::F32;
        }
        let kv_heads = f.between(1, 2);
        let mut options = LayerOptions::new(8, kv_heads * f.between(1, 2));
        options.kv_heads = kv_heads;
        options.head_dim = f.pick(&[4, 3]);
        options.value_dim = f.pick(&[4, 5]);
        options.dtype = own;
        // Scores of a size that a softmax is not all but the largest of.
        options.scale = Some(0.125);
        options.add_zero_attn = attentions == 1 && f.one_in(6);
        let features = f.pick(&[8, 4, 5]);
        options.query_features = features;
        options.key_features = features;
        options.value_features = features;
        options.out_features = features;
        let (gated, biased, appends) = (f.one_in(2), f.one_in(2), attentions == 1 && f.one_in(4));
        let hidden = c.between(1, 9);
        let LayerOptions { heads, head_dim, value_dim, .. } = options;
        let vector = |c: &mut Choices, n: usize| Window::input(c, of_biases, [1, 1, 1, n], false);
        let linear = |c: &mut Choices, [out, from]: [usize; 2]| Part {
            weight: Some(Window::input(c, of_weights, [1, 1, out, from], false)),
            bias: biased.then(|| vector(c, out)),
        };
        let norm = |c: &mut Choices| {
            let [weight, bias] = [c.one_in(4), c.one_in(3)].map(|without| !without);
            let vector = |c: &mut Choices| Window::input(c, of_biases, [1, 1, 1, features], false);
            Part { weight: weight.then(|| vector(c)), bias: bias.then(|| vector(c)) }
        };
        let layers = (0..c.between(1, 2))
            .map(|_| Layer {
                attentions: (0..attentions)
                    .map(|_| {
                        let sizes = [
                            [heads * head_dim, features],
                            [kv_heads * head_dim, features],
                            [kv_heads * value_dim, features],
                            [features, heads * value_dim],
                        ];
                        sizes.map(|size| linear(c, size))
                    })
                    .collect(),
                appended: appends.then(|| {
                    [head_dim, value_dim]
                        .map(|dim| Window::input(c, of_weights, [1, 1, 1, kv_heads * dim], false))
                }),
                up: linear(c, [hidden, features]),
                gate: gated.then(|| linear(c, [hidden, features])),
                down: linear(c, [features, hidden]),
                norms: (0..=attentions).map(|_| norm(c)).collect(),
            })
            .collect();
        Stack {
            attention: options,
            hidden,
            activation: f.pick(&Activation::ALL),
            gated,
            order: f.pick(&[NormOrder::Post, NormOrder::Pre]),
            rms: f.one_in(3),
            eps: 1e-5,
            layers,
            final_norm: f.one_in(2).then(|| norm(c)),
            form: f.pick(&[KernelForm::Cpu, KernelForm::Gpu]),
        }
    }

    fn config(&self) -> BlockConfig {
        let norm = if self.rms { NormConfig::rms() } else { NormConfig::layer() };
        BlockConfig::new(self.attention.config(), self.hidden)
            .activation(self.activation)
            .gated(self.gated)
            .order(self.order)
            .norm(norm.eps(self.eps))
    }

    fn windows(&mut self) -> Vec<&mut Window> {
        let layers = self.layers.iter_mut().flat_map(Layer::windows);
        layers.chain(self.final_norm.iter_mut().flat_map(Part::windows)).collect()
    }

    fn spoil(&mut self, c: &mut Choices) {
        let options = &mut self.attention;
        match c.below(12) {
            0 => *[&mut options.heads, &mut options.kv_heads][c.below(2)] = c.size(),
            1 => *[&mut options.head_dim, &mut options.value_dim][c.below(2)] = c.size(),
            2 => {
                *[
                    &mut options.query_features,
                    &mut options.key_features,
                    &mut options.value_features,
                    &mut options.out_features,
                ][c.below(4)] = c.size();
            }
            3 => self.hidden = c.size(),
            4 => self.gated = !self.gated,
            5 => options.add_zero_attn = !options.add_zero_attn,
            6 => self.eps = c.float().into(),
            7 => options.dtype = c.pick(&[DType::F32, DType::F16, DType::BF16, DType::U32]),
            8 => {
                // One layer like no other, or none.
                let first = self.layers.iter_mut().take(1);
                match c.below(3) {
                    0 => self.layers.clear(),
                    1 => first.for_each(|layer| layer.appended = None),
                    _ => first.for_each(|layer| layer.gate = None),
                }
            }
            _ => {
                let mut all = self.windows();
                if !all.is_empty() {
                    let n = c.below(all.len());
                    all[n].spoil(c);
                }
            }
        }
    }

    /// # Errors
    /// As [`TransformerEncoder::with_pipelines`].
    fn encoder(&self, world: &World, buffers: &[wgpu::Buffer]) -> Result<TransformerEncoder, Error> {
        let layers: Vec<_> = self.layers.iter().map(|layer| layer.encoder(buffers)).collect();
        let last = self.final_norm.map(|part| part.norm(buffers));
        let stack = TransformerEncoder::with_pipelines(world.gpu.pipelines(), self.config(), &layers, last)?;
        Ok(stack.tuning(Tuning::new().form(self.form)))
    }

    /// # Errors
    /// As [`TransformerDecoder::with_pipelines`].
    fn decoder(&self, world: &World, buffers: &[wgpu::Buffer]) -> Result<TransformerDecoder, Error> {
        let layers: Vec<_> = self.layers.iter().map(|layer| layer.decoder(buffers)).collect();
        let last = self.final_norm.map(|part| part.norm(buffers));
        let stack = TransformerDecoder::with_pipelines(world.gpu.pipelines(), self.config(), &layers, last)?;
        Ok(stack.tuning(Tuning::new().form(self.form)))
    }

    /// Whether results can be judged, as far as it is the stack's weights that say so.
    fn is_tame(&mut self) -> bool {
        // Between kernels, tensors of other types are rounded as no naive computation here rounds them.
        self.attention.dtype == DType::F32
            && (1e-6..1.0).contains(&self.eps)
            && self.windows().iter().all(|w| w.is_tame())
    }

    fn on_host<R: Real, T>(
        &self,
        data: &mut Data,
        with: impl FnOnce(&[HostLayer<R>], Option<&HostNorm<R>>) -> T,
    ) -> T {
        let layers: Vec<_> = self.layers.iter().map(|layer| layer.host(data)).collect();
        let last = self.final_norm.map(|part| part.host::<R>(data));
        with(&layers, last.as_ref().map(HostPart::norm).as_ref())
    }
}

/// One call of an encoder.
#[derive(Clone, Debug)]
struct EncoderSpec {
    stack: Stack,
    x: Window,
    out: Window,
    kept: Option<Window>,
    maps: Option<Window>,
    mask: MaskSpec,
}

impl EncoderSpec {
    fn new(f: &mut Choices, c: &mut Choices, f16: bool) -> Self {
        let mut stack = Stack::new(f, c, f16, 1);
        let (batch, length) = (c.between(1, 2), c.between(1, 6));
        let LayerOptions { heads, dtype, out_features, add_zero_attn, .. } = stack.attention;
        let rows = [batch, 1, length, out_features];
        let layers = stack.layers.len();
        let kept = [(layers - usize::from(stack.final_norm.is_none())) * batch, 1, length, out_features];
        let appended = usize::from(stack.layers[0].appended.is_some()) + usize::from(add_zero_attn);
        let of_map = [layers * batch, if f.one_in(2) { 1 } else { heads }, length, length + appended];
        let [keeps, weighs, masked] = [(); 3].map(|()| f.one_in(3));
        let shape = stack.attention.shape(batch, length, length, 0);
        if c.one_in(30) {
            stack.layers.truncate(1);
        }
        EncoderSpec {
            stack,
            x: Window::input(c, dtype, rows, false),
            out: at(c, (Buf::OutA, 0), dtype, rows, false),
            kept: (keeps && kept[0] > 0).then(|| at(c, (Buf::OutB, 0), dtype, kept, false)),
            maps: weighs.then(|| at(c, (Buf::OutC, 0), DType::F32, of_map, false)),
            mask: if masked { MaskSpec::new(f, c, &shape, f16) } else { MaskSpec::default() },
        }
    }

    fn spoil(&mut self, c: &mut Choices) {
        match c.below(8) {
            0 | 1 => self.stack.spoil(c),
            2 => self.mask.spoil(c),
            3 => self.kept.iter_mut().chain(&mut self.maps).for_each(|w| w.spoil(c)),
            4 | 5 => self.x.spoil(c),
            _ => self.out.spoil(c),
        }
    }

    fn call<'a>(&self, buffers: &'a [wgpu::Buffer]) -> EncoderForward<'a> {
        EncoderForward::new(view(buffers, &self.x), view(buffers, &self.out))
            .mask(self.mask.device(buffers))
            .hidden(self.kept.map(|w| view(buffers, &w)))
            .weights(self.maps.map(|w| view(buffers, &w)))
    }

    /// All that a call has.
    fn windows(&mut self) -> Vec<Window> {
        let stack = self.stack.windows().into_iter().map(|w| *w);
        let own = [Some(self.x), Some(self.out), self.kept, self.maps].into_iter().flatten();
        stack.chain(own).chain(self.mask.windows().map(|w| *w)).collect()
    }

    fn is_tame(&mut self, bytes: &[Vec<u8>]) -> bool {
        self.stack.is_tame() && self.x.is_tame() && self.mask.is_tame(bytes)
    }

    /// The output, what is kept, and the weights as the call asks for them.
    fn reference<R: Real>(&self, data: &mut Data) -> Result<Vec<Vec<R>>, String> {
        let rules = self.mask.rules(data.bytes);
        let options = Options::new().mask(rules.host()).weights(true);
        let [batch, _, length, _] = self.x.shape;
        let x = data.of::<R>(&self.x);
        let got = self.stack.on_host::<R, _>(data, |layers, last| {
            let layers: Vec<_> = layers.iter().map(HostLayer::encoder).collect();
            reference::encoder(&x, [batch, length], &self.stack.config(), &layers, last, &options)
                .map_err(refuses)
        })?;
        let mut hidden = got.hidden.concat();
        hidden.truncate(self.kept.map_or(hidden.len(), |w| w.count()));
        let mut weights = got.weights.concat();
        let heads = self.stack.attention.heads;
        if let Some(maps) = self.maps.filter(|maps| maps.shape[1] < heads) {
            let pairs = maps.shape[2] * maps.shape[3];
            let entries = weights.len() / (heads * pairs);
            weights = reference::average_heads(&weights, entries, heads).map_err(refuses)?;
        }
        Ok(vec![got.out, hidden, weights])
    }
}

pub fn encoder(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let mut spec = EncoderSpec::new(f, c, world.f16);
    for _ in 0..faults(c) {
        spec.spoil(c);
    }
    *said = format!("{spec:?}");
    let buffers = world.arena.buffers.clone();
    let operator = match spec.stack.encoder(world, &buffers) {
        Ok(operator) => operator,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let call = spec.call(&buffers);
    let size = operator.scratch_size(&call);
    let all = spec.windows();
    let writes: Vec<_> = [Some(spec.out), spec.kept, spec.maps].into_iter().flatten().collect();
    let tame = spec.is_tame(&world.arena.before) && writes.iter().all(Window::is_watched);
    let record = record!(operator, forward, forward_in_pass, &call);
    let outcome = recorded(world, c, size, (&all, &writes, tame), record)?;
    if matches!(outcome, Outcome::Judged) {
        let bytes = &world.arena.before;
        let plain = || Data { bytes, nudged: None };
        let (naive, want) = (spec.reference::<f32>(&mut plain())?, spec.reference::<f64>(&mut plain())?);
        let moved = moves(bytes, &want, |data| spec.reference(data))?;
        let most = largest(&want[0]).max(largest(&want[1]));
        let results =
            [("out", Some(spec.out), most), ("hidden", spec.kept, most), ("weights", spec.maps, 1.0)];
        for (n, (what, window, magnitude)) in results.into_iter().enumerate() {
            let Some(window) = window else { continue };
            let naive = widened(&naive[n], window.dtype);
            let own = Tolerance::from_naive(&naive, &want[n], magnitude, EPSILON_F32);
            judge_moved(what, world, &window, (&want[n], own), moved[n])?;
        }
    }
    Ok(outcome)
}

/// Where gradients go, one after the other.
struct Room {
    buffers: Vec<Buf>,
    bytes: usize,
}

impl Room {
    /// A place for one like `window`, of F32, if it is wanted and there is any left.
    fn place(&mut self, c: &mut Choices, window: Option<Window>) -> Option<Window> {
        let window = window.filter(|_| c.one_in(2))?;
        let mut place = Window::new(c, Buf::OutB, DType::F32, window.shape, false);
        let reach: usize = (0..4).map(|a| (place.shape[a] - 1) * place.strides[a]).sum();
        place.offset %= 16;
        let bytes = 4 * (place.offset + reach + 1);
        if self.bytes + bytes > BYTES {
            self.buffers.pop();
            self.bytes = 0;
        }
        place.buf = *self.buffers.last()?;
        place.offset += self.bytes / 4;
        self.bytes = (self.bytes + bytes).next_multiple_of(256);
        Some(place)
    }

    fn part(&mut self, c: &mut Choices, part: &Part) -> Part {
        Part { weight: self.place(c, part.weight), bias: self.place(c, part.bias) }
    }

    fn layer(&mut self, c: &mut Choices, layer: &Layer) -> Layer {
        let appended = layer.appended.and_then(|[key, value]| {
            let pair = [self.place(c, Some(key)), self.place(c, Some(value))];
            let [Some(key), Some(value)] = pair else { return None };
            Some([key, value])
        });
        Layer {
            attentions: layer
                .attentions
                .iter()
                .map(|parts| parts.each_ref().map(|part| self.part(c, part)))
                .collect(),
            appended,
            up: self.part(c, &layer.up),
            gate: layer.gate.map(|part| self.part(c, &part)),
            down: self.part(c, &layer.down),
            norms: layer.norms.iter().map(|part| self.part(c, part)).collect(),
        }
    }
}

/// The gradients of x and of a stack, whose parts are in the order of [`Layer::parts`].
fn flat<R: Real>(got: reference::EncoderGradients<R>) -> Vec<[Option<Vec<R>>; 2]> {
    let mut all = vec![[Some(got.d_x), None]];
    for layer in got.layers {
        let reference::LayerGradients { query, key, value, out, d_bias_kv, .. } = layer.attention;
        let reference::FeedForwardGradients { up, gate, down, .. } = layer.feed_forward;
        all.extend([query, key, value, out, up, down].map(|l| [Some(l.d_weight), l.d_bias]));
        all.extend(gate.map(|l| [Some(l.d_weight), l.d_bias]));
        all.extend(layer.norms.map(|norm| [Some(norm.d_weight), Some(norm.d_bias)]));
        all.extend(d_bias_kv.map(|pair| pair.map(Some)));
    }
    all.extend(got.final_norm.map(|norm| [Some(norm.d_weight), Some(norm.d_bias)]));
    all
}

impl Layer {
    /// The gradients that are judged, in the order of [`flat`]; `appends` says whether the layer has an appended key. Those of queries'
    /// and keys' weights are sums of differences that may be all rounding: where a row has one key they are 0. `stacks::backward`
    /// and `layer_backward` judge them where terms are of ordinary size.
    fn judged(&self, appends: bool) -> Vec<[Option<Window>; 2]> {
        let parts =
            self.attentions.iter().flat_map(|[_, _, value, out]| [None, None, Some(value), Some(out)]);
        let parts = parts.chain([&self.up, &self.down].map(Some));
        let parts = parts.chain(self.gate.as_ref().map(Some)).chain(self.norms.iter().map(Some));
        let windows = |part: Option<&Part>| part.map_or([None; 2], |part| [part.weight, part.bias]);
        let mut all: Vec<_> = parts.map(windows).collect();
        if appends {
            all.push([None, self.appended.map(|[_, value]| value)]);
        }
        all
    }
}

pub fn encoder_backward(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let mut spec = EncoderSpec::new(f, c, world.f16);
    spec.maps = None;
    let rows = spec.x.shape;
    let mut d_out = Window::input(c, spec.stack.attention.dtype, rows, false);
    let of_x = float(f, world.f16);
    let of_weights = f.one_in(2);
    let mut d_x = (!of_weights || f.one_in(2)).then(|| at(c, (Buf::OutA, BYTES / 2), of_x, rows, false));
    let mut room = Room { buffers: vec![Buf::OutC, Buf::OutB], bytes: 0 };
    if spec.kept.is_some() {
        room.buffers.pop();
    }
    let mut gradients: Vec<Layer> = match of_weights {
        true => spec.stack.layers.iter().map(|layer| room.layer(c, layer)).collect(),
        false => Vec::new(),
    };
    let d_final = spec.stack.final_norm.filter(|_| of_weights).map(|part| room.part(c, &part));
    let accumulates = c.one_in(6);
    for _ in 0..faults(c) {
        match c.below(6) {
            0 | 1 => spec.spoil(c),
            2 => d_out.spoil(c),
            3 => d_x.iter_mut().for_each(|w| w.spoil(c)),
            4 => gradients.truncate(1),
            _ => {
                let mut all: Vec<_> = gradients.iter_mut().flat_map(Layer::windows).collect();
                if !all.is_empty() {
                    let n = c.below(all.len());
                    all[n].spoil(c);
                }
            }
        }
    }
    *said = format!("{spec:?}, {d_out:?} to {d_x:?}, {gradients:?}, {d_final:?}, accumulates {accumulates}");
    let buffers = world.arena.buffers.clone();
    let operator = match spec.stack.encoder(world, &buffers) {
        Ok(operator) => operator,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    // What layers give is in no input: it is computed again unless nothing is judged.
    let computed = spec.kept.is_none();
    let d_layers: Vec<_> = gradients.iter().map(|layer| layer.gradients(&buffers)).collect();
    let call = EncoderBackward::new(spec.call(&buffers), view(&buffers, &d_out))
        .d_x(d_x.map(|w| view(&buffers, &w)))
        .d_layers(&d_layers)
        .d_final_norm(d_final.map(|part| part.norm_gradients(&buffers)).unwrap_or_default())
        .accumulate(accumulates);
    let size = operator.backward_scratch_size(&call);
    let of_layers = gradients.iter_mut().flat_map(Layer::windows).map(|w| *w);
    let mut writes: Vec<Window> = d_x.into_iter().chain(of_layers).collect();
    writes.extend(d_final.iter().flat_map(|part| [part.weight, part.bias]).flatten());
    let mut all = spec.windows();
    all.extend(writes.iter().chain([&d_out]));
    let tame = computed
        && !accumulates
        && spec.is_tame(&world.arena.before)
        && d_out.is_tame()
        && writes.iter().all(Window::is_watched);
    let record = record!(operator, backward, backward_in_pass, &call);
    let outcome = recorded(world, c, size, (&all, &writes, tame), record)?;
    if matches!(outcome, Outcome::Judged) {
        /// Of all weights and of x, with the windows that they go to.
        fn truth<R: Real>(
            spec: &EncoderSpec,
            d_out: &Window,
            data: &mut Data,
        ) -> Result<Vec<[Option<Vec<R>>; 2]>, String> {
            let rules = spec.mask.rules(data.bytes);
            let options = Options::new().mask(rules.host());
            let [batch, _, length, _] = spec.x.shape;
            let [x, d_out] = [&spec.x, d_out].map(|w| data.of::<R>(w));
            let got = spec.stack.on_host::<R, _>(data, |layers, last| {
                let layers: Vec<_> = layers.iter().map(HostLayer::encoder).collect();
                let config = spec.stack.config();
                reference::encoder_backward(&x, [batch, length], &config, &layers, last, &options, &d_out)
            });
            Ok(flat(got.map_err(refuses)?))
        }
        let appends = spec.stack.layers.iter().any(|layer| layer.appended.is_some());
        let mut parts = vec![[d_x, None]];
        parts.extend(gradients.iter().flat_map(|layer| layer.judged(appends)));
        parts.extend(d_final.map(|part| [part.weight, part.bias]));
        let windows: Vec<_> = parts.iter().flatten().collect();
        // Also those that are not asked for: of all terms the largest counts, as a gradient may be 0 but for rounding.
        let all = |gradients: Vec<[Option<Vec<f64>>; 2]>| -> Vec<Vec<f64>> {
            gradients.into_iter().flatten().map(Option::unwrap_or_default).collect()
        };
        let bytes = &world.arena.before;
        let plain = || Data { bytes, nudged: None };
        let naive = truth::<f32>(&spec, &d_out, &mut plain())?;
        let naive: Vec<_> = naive.into_iter().flatten().map(Option::unwrap_or_default).collect();
        let want = all(truth(&spec, &d_out, &mut plain())?);
        let moved = moves(bytes, &want, |data| Ok(all(truth(&spec, &d_out, data)?)))?;
        let sizes: Vec<_> = want.iter().map(|want| largest(want)).collect();
        let most = largest(&sizes);
        // What moves one gradient moves those before it too, some of them by luck less: as in `stacks::backward`.
        let shares = moved.iter().zip(&sizes).filter(|(_, size)| **size > 1e-3 * most);
        let share = shares.map(|(moved, size)| moved / size).fold(0.0, f64::max);
        for (n, window) in windows.into_iter().enumerate() {
            let Some(window) = window else { continue };
            let naive = widened(&naive[n], window.dtype);
            let own = Tolerance::gradient(&naive, &want[n], most, EPSILON_F32);
            let moved = moved[n].max(share * sizes[n]);
            judge_moved(&format!("gradient {n}"), world, window, (&want[n], own), moved)?;
        }
    }
    Ok(outcome)
}

/// One call of a decoder.
#[derive(Clone, Debug)]
struct DecoderSpec {
    stack: Stack,
    x: Window,
    memory: Window,
    keys: Window,
    values: Window,
    out: Window,
    masks: [MaskSpec; 2],
}

impl DecoderSpec {
    /// With masks of any parts, or with a causal one if it goes in steps.
    fn new(f: &mut Choices, c: &mut Choices, f16: bool, in_steps: bool) -> Self {
        let stack = Stack::new(f, c, f16, 2);
        let (batch, length, memory_len) = (c.between(1, 2), c.between(1, 6), c.between(1, 7));
        let LayerOptions { kv_heads, head_dim, value_dim, dtype, out_features, .. } = stack.attention;
        let rows = [batch, 1, length, out_features];
        let entries = stack.layers.len() * batch;
        let kept = [head_dim, value_dim].map(|dim| [entries, kv_heads, memory_len, dim]);
        let [masked, memory_masked] = [(); 2].map(|()| f.one_in(2));
        let shapes = [length, memory_len].map(|kv_len| stack.attention.shape(batch, length, kv_len, 0));
        let mask = match (in_steps, masked) {
            (true, _) => MaskSpec { causal: !f.one_in(4), ..Default::default() },
            (false, true) => MaskSpec::new(f, c, &shapes[0], f16),
            (false, false) => MaskSpec::default(),
        };
        // Rows of a step would have to be cut out of a mask that has rows.
        let memory_mask = match memory_masked && !in_steps {
            true => MaskSpec::new(f, c, &shapes[1], f16),
            false => MaskSpec::default(),
        };
        DecoderSpec {
            stack,
            x: Window::input(c, dtype, rows, false),
            memory: Window::input(c, dtype, [batch, 1, memory_len, out_features], false),
            keys: at(c, (Buf::OutB, 0), dtype, kept[0], false),
            values: at(c, (Buf::OutC, 0), dtype, kept[1], false),
            out: at(c, (Buf::OutA, 0), dtype, rows, false),
            masks: [mask, memory_mask],
        }
    }

    fn spoil(&mut self, c: &mut Choices) {
        match c.below(9) {
            0 | 1 => self.stack.spoil(c),
            2 => self.masks[c.below(2)].spoil(c),
            3 | 4 => self.x.spoil(c),
            5 => self.memory.spoil(c),
            6 => self.keys.spoil(c),
            7 => self.values.spoil(c),
            _ => self.out.spoil(c),
        }
    }

    fn memory_views<'a>(&self, buffers: &'a [wgpu::Buffer]) -> DecoderMemory<'a> {
        DecoderMemory { keys: view(buffers, &self.keys), values: view(buffers, &self.values) }
    }

    fn call<'a>(&self, buffers: &'a [wgpu::Buffer]) -> DecoderForward<'a> {
        let [x, out] = [&self.x, &self.out].map(|w| view(buffers, w));
        DecoderForward::new(x, self.memory_views(buffers), out)
            .mask(self.masks[0].device(buffers))
            .memory_mask(self.masks[1].device(buffers))
    }

    fn windows(&mut self) -> Vec<Window> {
        let stack: Vec<_> = self.stack.windows().into_iter().map(|w| *w).collect();
        let own = [self.x, self.memory, self.keys, self.values, self.out];
        let masks = self.masks.iter_mut().flat_map(MaskSpec::windows).map(|w| *w);
        stack.into_iter().chain(own).chain(masks).collect()
    }

    /// Whether results can be judged, after the memory has been projected.
    fn is_tame(&mut self, bytes: &[Vec<u8>]) -> bool {
        self.stack.is_tame()
            && [self.x, self.memory].iter().all(Window::is_tame)
            && [self.keys, self.values, self.out].iter().all(|w| Buf::OUTS.contains(&w.buf))
            && self.masks.iter().all(|mask| mask.is_tame(bytes))
    }

    /// The output, and what all layers give.
    fn reference<R: Real>(&self, data: &mut Data) -> Result<Vec<Vec<R>>, String> {
        let rules = self.masks.each_ref().map(|mask| mask.rules(data.bytes));
        let [own, cross] = rules.each_ref().map(|rules| Options::new().mask(rules.host()));
        let [batch, _, q_len, _] = self.x.shape;
        let shape = LayerShape { batch, q_len, kv_len: self.memory.shape[2] };
        let inputs = [&self.x, &self.memory].map(|w| data.of::<R>(w));
        let inputs = inputs.each_ref().map(|x| &x[..]);
        let got = self.stack.on_host::<R, _>(data, |layers, last| {
            let layers: Vec<_> = layers.iter().map(HostLayer::decoder).collect();
            reference::decoder(inputs, shape, &self.stack.config(), &layers, last, [&own, &cross])
        });
        let got = got.map_err(refuses)?;
        Ok(vec![got.out, got.hidden.concat()])
    }

    fn judge(&self, world: &World) -> Result<(), String> {
        let bytes = &world.arena.before;
        let plain = || Data { bytes, nudged: None };
        let (naive, want) = (self.reference::<f32>(&mut plain())?, self.reference::<f64>(&mut plain())?);
        let moved = moves(bytes, &want, |data| self.reference(data))?;
        let most = largest(&want[0]).max(largest(&want[1]));
        let naive = widened(&naive[0], self.out.dtype);
        let own = Tolerance::from_naive(&naive, &want[0], most, EPSILON_F32);
        judge_moved("out", world, &self.out, (&want[0], own), moved[0])
    }

    /// The keys or the values of all layers' attention to the memory.
    fn projected<R: Real>(&self, bytes: &[Vec<u8>], values: bool) -> Result<Vec<R>, String> {
        let LayerOptions { kv_heads, head_dim, value_dim, out_features, .. } = self.stack.attention;
        let (n, dim) = if values { (2, value_dim) } else { (1, head_dim) };
        let memory = self.memory.wide::<R>(bytes);
        self.stack.on_host::<R, _>(&mut Data { bytes, nudged: None }, |layers, _| {
            let each = |layer: &HostLayer<R>| {
                let HostLinear { weight, bias } = layer.attentions[1][n].linear();
                let flat = reference::project(&memory, weight, bias, out_features, kv_heads * dim)?;
                reference::split_heads(&flat, self.memory.shape[2], kv_heads, dim)
            };
            let all: Result<Vec<_>, Error> = layers.iter().map(each).collect();
            Ok(all.map_err(refuses)?.concat())
        })
    }
}

pub fn decoder(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let memory_alone = f.one_in(4);
    let mut spec = DecoderSpec::new(f, c, world.f16, false);
    for _ in 0..faults(c) {
        spec.spoil(c);
    }
    *said = format!("{spec:?}, memory alone {memory_alone}");
    let buffers = world.arena.buffers.clone();
    let operator = match spec.stack.decoder(world, &buffers) {
        Ok(operator) => operator,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let (memory, projected) = (view(&buffers, &spec.memory), spec.memory_views(&buffers));
    let all = spec.windows();
    let tame = spec.is_tame(&world.arena.before);
    if memory_alone {
        let writes = [spec.keys, spec.values];
        let size = Ok(Default::default());
        let record = |encoder: &mut wgpu::CommandEncoder, scratch: &mut Scratch, pass: bool| match pass {
            true => {
                let mut pass = encoder.begin_compute_pass(&Default::default());
                operator.project_memory_in_pass(&mut pass, memory, &projected, scratch)
            }
            false => operator.project_memory(encoder, memory, &projected, scratch),
        };
        let outcome = recorded(world, c, size, (&all, &writes, tame), record)?;
        if matches!(outcome, Outcome::Judged) {
            for (window, values) in [(&spec.keys, false), (&spec.values, true)] {
                let bytes = &world.arena.before;
                let (naive, want) =
                    (spec.projected::<f32>(bytes, values)?, spec.projected::<f64>(bytes, values)?);
                judge("projected memory", world, window, &naive, &want, largest(&want))?;
            }
        }
        return Ok(outcome);
    }
    // It may be refused where the call that reads is not.
    let projects = !c.one_in(6)
        && operator.project_memory(&mut world.encoder(), memory, &projected, &mut world.scratch()).is_ok();
    let call = spec.call(&buffers);
    let size = operator.scratch_size(&call);
    let mut writes = vec![spec.out];
    if projects {
        writes.extend([spec.keys, spec.values]);
    }
    let gpu = world.gpu.clone();
    let runs = projects && small(&all) && !all.iter().any(|w| w.buf.fails());
    let record = record!(operator, forward, forward_in_pass, &call);
    let outcome = recorded(world, c, size, (&all, &writes, tame && projects), |encoder, scratch, pass| {
        record(encoder, scratch, pass)?;
        // What is read is there before.
        if runs {
            let mut scratch = Scratch::new(gpu.device(), Default::default())?;
            gpu.submit(|e| operator.project_memory(e, memory, &projected, &mut scratch))?;
        }
        Ok(())
    })?;
    if matches!(outcome, Outcome::Judged) {
        spec.judge(world)?;
    }
    Ok(outcome)
}

/// A cache for the rows of a call, or nearly.
fn cache_config(f: &mut Choices, c: &mut Choices, spec: &DecoderSpec) -> (CacheConfig, CacheStorage) {
    let LayerOptions { kv_heads, head_dim, value_dim, dtype, .. } = spec.stack.attention;
    let storage = match dtype {
        DType::F16 => CacheStorage::F16,
        DType::BF16 => f.pick(&[CacheStorage::BF16, CacheStorage::F32]),
        _ => CacheStorage::F32,
    };
    let [batch, _, length, _] = spec.x.shape;
    let [mut batch, mut layers, mut kv_heads, mut head_dim, mut capacity] =
        [batch, spec.stack.layers.len(), kv_heads, head_dim, length + c.below(4)];
    if c.one_in(6) {
        let of = [&mut batch, &mut layers, &mut kv_heads, &mut head_dim, &mut capacity];
        *of[c.below(5)] = c.between(1, 5);
    }
    let layout = match f.one_in(3) {
        true => CacheLayout::Paged { page: 16, pages: batch.min(8) + c.below(3) },
        false => CacheLayout::Contiguous,
    };
    let config = CacheConfig::new(kv_heads, head_dim, capacity).value_dim(value_dim).batch(batch);
    (config.layers(layers).storage(storage).layout(layout), storage)
}

/// Rows in steps of any lengths, whose keys and values a cache keeps.
pub fn decoder_steps(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let mut spec = DecoderSpec::new(f, c, world.f16, true);
    let (config, storage) = cache_config(f, c, &spec);
    let [batch, _, length, _] = spec.x.shape;
    let mut steps = Vec::new();
    while steps.iter().sum::<usize>() < length {
        let left = length - steps.iter().sum::<usize>();
        steps.push(c.between(1, left.min(4)));
    }
    let planned = format!("{:?}", spec.masks);
    for _ in 0..faults(c) {
        spec.spoil(c);
    }
    // Of rows that come in steps, another mask says something else.
    let as_planned = planned == format!("{:?}", spec.masks);
    let misled = c.one_in(8);
    *said = format!("{spec:?}, {config:?}, {steps:?}, misled {misled}");
    // Axes of windows that were spoiled may have fewer rows than steps take.
    let rows = [&spec.x, &spec.out].map(|w| w.shape[2]);
    if rows.iter().any(|n| *n < length) || spec.x.count() > 4000 || batch > 4 {
        return Ok(Outcome::Accepted);
    }
    let buffers = world.arena.buffers.clone();
    let operator = match spec.stack.decoder(world, &buffers) {
        Ok(operator) => operator,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let foreign = c.one_in(16);
    let pipelines = if foreign { world.foreign.pipelines() } else { world.gpu.pipelines() };
    let mut cache = match Cache::with_pipelines(pipelines, config) {
        Ok(cache) => cache,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let (memory, projected) = (view(&buffers, &spec.memory), spec.memory_views(&buffers));
    let all = spec.windows();
    let runs = small(&all) && !all.iter().any(|w| w.buf.fails());
    let projects = runs
        && operator.project_memory(&mut world.encoder(), memory, &projected, &mut world.scratch()).is_ok();
    let [x, out] = [&spec.x, &spec.out].map(|w| view(&buffers, w));
    let call = |first: usize, rows: usize| {
        let [x, out] = [x, out].map(|t| t.slice(2, first, rows));
        DecoderForward::new(x, projected, out)
            .mask(spec.masks[0].device(&buffers))
            .memory_mask(spec.masks[1].device(&buffers))
    };
    let longest = steps.iter().copied().max().unwrap_or(1);
    let size = operator.scratch_size(&call(0, longest).cache(&cache));
    let (memory_of, mut scratch) = scratch_for(world, Memory::new(c), &size)?;
    let mut encoder = world.encoder();
    let (mut first, mut result) = (0, Ok(()));
    for (n, rows) in steps.iter().enumerate() {
        // A cache that does not know of the rows, or knows of others.
        let told = if misled { rows + n % 2 + 1 } else { *rows };
        if !(misled && c.one_in(2)) {
            let mut own = world.encoder();
            let target = if foreign {
                &mut world.foreign.device().create_command_encoder(&Default::default())
            } else if runs {
                &mut encoder
            } else {
                &mut own
            };
            result = cache.advance(target, Tokens::All(told));
        }
        let call = call(first, *rows).cache(&cache);
        result = result.and_then(|()| match c.one_in(3) {
            true => {
                let mut pass = encoder.begin_compute_pass(&Default::default());
                operator.forward_in_pass(&mut pass, &call, &mut scratch)
            }
            false => operator.forward(&mut encoder, &call, &mut scratch),
        });
        if result.is_err() {
            break;
        }
        first += rows;
    }
    if result.is_ok() && (misled || foreign) {
        return Err("a cache that does not know the rows is accepted".into());
    }
    if result.is_ok() && memory_of == Memory::Foreign {
        world.abandon(encoder)?;
        return Ok(Outcome::Accepted);
    }
    if let (Err(e), true) = (&result, first > 0) {
        // Steps before it are in the encoder.
        let outcome = refused(e);
        drop(encoder);
        return world.works(&mut world.scratch()).map(|()| outcome);
    }
    if result.is_err() && memory_of == Memory::Foreign {
        scratch = world.scratch();
    }
    let mut writes = vec![spec.out];
    if result.is_ok() && projects {
        let mut scratch = world.scratch();
        let projected = world.gpu.submit(|e| operator.project_memory(e, memory, &projected, &mut scratch));
        projected.map_err(|e| format!("the memory is refused the second time: {e}"))?;
        writes.extend([spec.keys, spec.values]);
    }
    // Rows after the last step are not written.
    let whole = rows.iter().all(|n| *n == length);
    let tame = projects
        && whole
        && storage == CacheStorage::F32
        && as_planned
        && spec.masks[0].causal
        && spec.is_tame(&world.arena.before);
    let outcome = settle(world, result, encoder, &mut scratch, &all, &writes, [runs, tame])?;
    if matches!(outcome, Outcome::Judged) {
        spec.judge(world)?;
    }
    Ok(outcome)
}
