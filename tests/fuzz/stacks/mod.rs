//! Stacks of encoder and decoder layers: their weights on the host and on the device, and the
//! comparison of results.

mod decoder;
mod encoder;

pub use decoder::{decoder, decoder_steps};
pub use encoder::{encoder, encoder_backward};

use wgpu_attention::layers::{
    DecoderLayerWeights, EncoderLayerGradients, EncoderLayerWeights, FeedForwardGradients,
    FeedForwardWeights, LinearGradients, MultiHeadGradients, MultiHeadWeights, NormOrder,
    TransformerLayerConfig,
};
use wgpu_attention::matmul::Activation;
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, max_error};
use wgpu_attention::reference::{
    HostDecoderLayer, HostEncoderLayer, HostFeedForward, HostLinear, HostNorm, HostWeights, Real,
};
use wgpu_attention::rows::{NormConfig, NormGradients, NormWeights};
use wgpu_attention::tuning::Target;
use wgpu_attention::{
    DType, Error, KernelOptions, Linear, TensorView, TransformerDecoder, TransformerEncoder,
};

use crate::arena::{Window, view};
use crate::call::{float, judge_within};
use crate::choices::Choices;
use crate::layer_options::LayerOptions;
use crate::random::Rng;
use crate::world::World;

/// A weight and its bias, or the places of their gradients.
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

/// The contents of windows, exact, or with each element off by up to four f32 units in the last
/// place.
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

/// Returns how far several results move if each input is off by a few units in the last place. A
/// norm of nearly equal features, or a difference of large numbers, amplifies such rounding.
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

/// Compares a result with the exact one. `moved` is the effect of earlier roundings.
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

/// A layer of an encoder, with one attention and two norms, or of a decoder, with two and three.
#[derive(Clone, Debug)]
struct Layer {
    /// Query, key, value, out of each attention.
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

    fn attention<'a>(&self, n: usize, buffers: &'a [wgpu::Buffer]) -> MultiHeadWeights<'a> {
        let [query, key, value, out] = self.attentions[n].each_ref().map(|part| part.linear(buffers));
        let bias_kv = self.appended.map(|pair| pair.map(|w| view(buffers, &w)));
        MultiHeadWeights { query, key, value, out, bias_kv, qk_norm: None, gate: None }
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
            attention: MultiHeadGradients {
                query,
                key,
                value,
                out,
                bias_kv,
                qk_norm: Default::default(),
                gate: Default::default(),
            },
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
        HostWeights { query, key, value, out, bias_kv, qk_norm: None, gate: None }
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

/// The data of a stack.
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
    form: Target,
}

impl Stack {
    /// Draws a stack with this number of attentions per layer.
    fn new(f: &mut Choices, c: &mut Choices, attentions: usize) -> Self {
        let [mut own, of_weights, of_biases] = [(); 3].map(|()| float(f));
        // Only f32 results are judged.
        if f.one_in(2) {
            own = DType::F32;
        }
        let kv_heads = f.between(1, 2);
        let mut options = LayerOptions::new(8, kv_heads * f.between(1, 2));
        options.kv_heads = kv_heads;
        options.head_dim = f.pick(&[4, 3]);
        options.value_dim = f.pick(&[4, 5]);
        options.dtype = own;
        // The scale keeps scores small, so that the softmax is more than its largest term.
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
            form: f.pick(&[Target::Software, Target::Gpu]),
        }
    }

    fn config(&self) -> TransformerLayerConfig {
        let norm = if self.rms { NormConfig::rms() } else { NormConfig::layer() };
        TransformerLayerConfig::new(self.attention.config(), self.hidden)
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
                // One layer that differs from all others, or none.
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
    /// Like [`TransformerEncoder::with_pipelines`].
    fn encoder(&self, world: &World, buffers: &[wgpu::Buffer]) -> Result<TransformerEncoder, Error> {
        let layers: Vec<_> = self.layers.iter().map(|layer| layer.encoder(buffers)).collect();
        let last = self.final_norm.map(|part| part.norm(buffers));
        let stack = TransformerEncoder::with_pipelines(world.gpu.pipelines(), self.config(), &layers, last)?;
        Ok(stack.kernel_options(KernelOptions::new().target(self.form)))
    }

    /// # Errors
    /// Like [`TransformerDecoder::with_pipelines`].
    fn decoder(&self, world: &World, buffers: &[wgpu::Buffer]) -> Result<TransformerDecoder, Error> {
        let layers: Vec<_> = self.layers.iter().map(|layer| layer.decoder(buffers)).collect();
        let last = self.final_norm.map(|part| part.norm(buffers));
        let stack = TransformerDecoder::with_pipelines(world.gpu.pipelines(), self.config(), &layers, last)?;
        Ok(stack.kernel_options(KernelOptions::new().target(self.form)))
    }

    /// True if the stack's weights permit results to be judged.
    fn is_tame(&mut self) -> bool {
        // Other types round tensors between kernels, and no naive computation here rounds them in
        // the same way.
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
