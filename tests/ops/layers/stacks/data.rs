//! A stack with its data: on the host in any arithmetic, and on the device.

use wgpu_attention::layers::{
    EncoderLayerGradients, EncoderLayerWeights, FeedForwardGradients, FeedForwardWeights, LinearGradients,
    MultiHeadConfig, MultiHeadGradients, MultiHeadWeights, NormOrder, OutputGate, TransformerLayerConfig,
};
use wgpu_attention::matmul::Activation;
use wgpu_attention::position::RowPositions;
use wgpu_attention::reference::{
    self, HostEncoderLayer, HostFeedForward, HostLinear, HostNorm, HostWeights, Options, Real, activate,
    attention, join_heads, norm, project, split_heads, widen,
};
use wgpu_attention::rows::{NormConfig, NormGradients, NormWeights};
use wgpu_attention::{DType, Linear, Shape, TransformerEncoder};

use super::by_layer::LayerData;
use crate::harness::layer::{LayerCase, LinearData};
use crate::harness::rotary::RotaryData;
use crate::harness::run::{Layout, Placed};
use crate::harness::{Place, Profile, Rng, Rules, Values, stored};

/// The data of a stack.
#[derive(Clone, Debug)]
pub struct Stack {
    pub batch: usize,
    pub length: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub features: usize,
    pub hidden: usize,
    pub activation: Activation,
    pub gated: bool,
    /// True if its linear layers and norms have biases.
    pub biased: bool,
    pub order: NormOrder,
    /// The norm of queries and keys.
    pub qk_norm: Option<NormConfig>,
    /// The gate of the heads' outputs, in gated stacks with norms of queries and keys.
    pub output_gate: Option<OutputGate>,
    pub norm: NormConfig,
    pub rules: Rules,
    pub rotary: Option<RotaryData>,
    /// The options of each layer instead of `rules` and `rotary`. Empty if all layers are alike.
    pub each: Vec<LayerData>,
    /// The parts of each layer: query, key, value, out, up, down, both norms. Optional parts
    /// follow: the norms of queries and keys, the gate of the heads' outputs, the feed-forward
    /// gate.
    pub layers: Vec<Vec<LinearData>>,
    pub final_norm: Option<LinearData>,
    /// True if weights are `[in, out]` in memory, as GPT-2 has them.
    pub transposed: bool,
    pub x: Vec<f32>,
}

/// A part's weight and bias in some arithmetic.
pub struct Part<R> {
    pub weight: Vec<R>,
    pub bias: Option<Vec<R>>,
}

impl<R: Real> Part<R> {
    pub fn of(data: &LinearData) -> Self {
        Part { weight: widen(&data.weight), bias: data.bias.as_ref().map(|b| widen(b)) }
    }

    pub fn linear(&self) -> HostLinear<'_, R> {
        HostLinear { weight: &self.weight, bias: self.bias.as_deref() }
    }

    pub fn norm(&self) -> HostNorm<'_, R> {
        HostNorm { weight: Some(&self.weight), bias: self.bias.as_deref() }
    }
}

/// Returns the bias of a norm.
fn uneven(features: usize) -> Vec<f32> {
    (0..features).map(|n| 0.1 * (n % 5) as f32 - 0.15).collect()
}

impl Stack {
    /// A stack with random weights.
    pub fn random(rng: &mut Rng, layers: usize, final_norm: bool, mut stack: Stack) -> Self {
        let e = stack.features;
        let biased = stack.biased;
        let mut linear = |[out, from]: [usize; 2], with_bias: bool| {
            let scale = 1.0 / (from as f32).sqrt();
            LinearData {
                weight: rng.normals(out * from).iter().map(|w| w * scale).collect(),
                bias: with_bias.then(|| rng.normals(out).iter().map(|b| 0.3 * b).collect()),
            }
        };
        let mut norm = |with_bias: bool| {
            let with_bias = with_bias && biased;
            let near_one = linear([1, e], with_bias);
            LinearData {
                weight: near_one.weight.iter().map(|w| 1.0 + w).collect(),
                bias: with_bias.then(|| uneven(e)),
            }
        };
        let norms: Vec<[LinearData; 2]> = (0..layers).map(|n| [norm(true), norm(n % 2 == 0)]).collect();
        stack.final_norm = final_norm.then(|| norm(true));
        stack.layers = norms
            .into_iter()
            .map(|[first, second]| {
                let shapes = stack.part_shapes();
                let mut parts: Vec<_> = shapes[..6].iter().map(|shape| linear(*shape, biased)).collect();
                parts.extend([first, second]);
                for shape in &shapes[8..] {
                    let is_norm = shape[0] == 1;
                    let mut part = linear(*shape, is_norm);
                    if is_norm {
                        part.weight.iter_mut().for_each(|w| *w += 1.0);
                        part.bias = part.bias.map(|_| uneven(shape[1]));
                    }
                    parts.push(part);
                }
                parts
            })
            .collect();
        for n in 0..stack.each.len() {
            for part in 0..stack.layers[n].len() {
                if let Some(source) = stack.lender(n, part) {
                    stack.layers[n][part] = stack.layers[source][part].clone();
                }
            }
        }
        stack.x = rng.normals(stack.batch * stack.length * e);
        stack
    }

    /// Returns the stack rounded to the types.
    pub fn stored(&self, dtype: DType, weight: DType) -> Self {
        let part = |l: &LinearData| LinearData {
            weight: stored(&l.weight, weight),
            bias: l.bias.as_ref().map(|b| stored(b, weight)),
        };
        Stack {
            x: stored(&self.x, dtype),
            layers: self.layers.iter().map(|parts| parts.iter().map(part).collect()).collect(),
            final_norm: self.final_norm.as_ref().map(part),
            ..self.clone()
        }
    }

    pub fn config(&self, dtype: DType) -> TransformerLayerConfig {
        self.config_of(&LayerData::default(), dtype)
    }

    fn config_of(&self, layer: &LayerData, dtype: DType) -> TransformerLayerConfig {
        let attention = MultiHeadConfig::new(self.features, self.heads)
            .kv_heads(self.kv_heads)
            .qk_norm(self.qk_norm)
            .output_gate(self.output_gate)
            .dtype(dtype);
        TransformerLayerConfig::new(layer.attention(attention), self.hidden)
            .activation(self.activation)
            .gated(self.gated)
            .order(self.order)
            .norm(self.norm)
            .keys_of(layer.keys_of)
    }

    /// Returns the configuration of each layer.
    pub fn configs(&self, dtype: DType) -> Vec<TransformerLayerConfig> {
        match &self.each[..] {
            [] => vec![self.config(dtype); self.layers.len()],
            each => each.iter().map(|layer| self.config_of(layer, dtype)).collect(),
        }
    }

    pub fn options(&self) -> Options<'_> {
        let options = Options::new().mask(self.rules.host());
        self.rotary.as_ref().map_or(options, |rotary| rotary.options(options))
    }

    /// Returns the configuration and the options of each layer, for the reference.
    pub fn calls(&self) -> Vec<(TransformerLayerConfig, Options<'_>)> {
        let options: Vec<_> = match &self.each[..] {
            [] => vec![self.options(); self.layers.len()],
            each => each.iter().map(LayerData::options).collect(),
        };
        self.configs(DType::F32).into_iter().zip(options).collect()
    }

    /// Returns the layer whose part layer `n` uses, if it reads that layer's keys. The parts are
    /// key, value and the norm of keys.
    pub fn lender(&self, n: usize, part: usize) -> Option<usize> {
        let source = self.each.get(n)?.keys_of?;
        Self::is_of_keys(part, self.layers[n].len()).then_some(source)
    }

    /// True if a part belongs to the keys, in a layer of `parts` parts.
    fn is_of_keys(part: usize, parts: usize) -> bool {
        matches!(part, 1 | 2) || part == 9 && parts >= 10
    }

    /// Returns the number of layers that project keys.
    pub fn layers_with_keys(&self) -> usize {
        self.layers.len() - self.each.iter().filter(|layer| layer.keys_of.is_some()).count()
    }

    /// Returns the norms of queries and of keys among a layer's parts.
    pub fn qk_norms<T>(parts: &[T]) -> Option<[&T; 2]> {
        (parts.len() >= 10).then(|| [&parts[8], &parts[9]])
    }

    /// Returns the gate of the heads' outputs.
    pub fn output_gate<T>(parts: &[T]) -> Option<&T> {
        (parts.len() == 12).then(|| &parts[10])
    }

    /// Returns the gate of the feed-forward part.
    pub fn gate<T>(parts: &[T]) -> Option<&T> {
        parts.last().filter(|_| matches!(parts.len(), 9 | 11 | 12))
    }

    /// Returns the shapes of a layer's parts on the device.
    pub fn part_shapes(&self) -> Vec<[usize; 2]> {
        let (e, f) = (self.features, self.hidden);
        let narrow = e / self.heads * self.kv_heads;
        let mut shapes = vec![[e, e], [narrow, e], [narrow, e], [e, e], [f, e], [e, f], [1, e], [1, e]];
        shapes.extend(self.qk_norm.iter().flat_map(|_| [[1, e / self.heads]; 2]));
        shapes.extend(self.output_gate.map(|gate| match gate {
            OutputGate::Headwise => [self.heads, e],
            _ => [e, e],
        }));
        shapes.extend(self.gated.then_some([f, e]));
        shapes
    }

    /// Calls `with` with the layers' weights in the arithmetic of `R`.
    pub fn on_host<R: Real, T>(
        &self,
        with: impl FnOnce(&[R], &[HostEncoderLayer<R>], Option<&HostNorm<R>>) -> T,
    ) -> T {
        let parts: Vec<Vec<Part<R>>> =
            self.layers.iter().map(|parts| parts.iter().map(Part::of).collect()).collect();
        let layers: Vec<_> = parts
            .iter()
            .map(|p| HostEncoderLayer {
                attention: HostWeights {
                    query: p[0].linear(),
                    key: p[1].linear(),
                    value: p[2].linear(),
                    out: p[3].linear(),
                    bias_kv: None,
                    qk_norm: Stack::qk_norms(p).map(|norms| norms.map(Part::norm)),
                    gate: Stack::output_gate(p).map(Part::linear),
                },
                feed_forward: HostFeedForward {
                    up: p[4].linear(),
                    gate: Stack::gate(p).map(Part::linear),
                    down: p[5].linear(),
                },
                norms: [p[6].norm(), p[7].norm()],
            })
            .collect();
        let last = self.final_norm.as_ref().map(Part::<R>::of);
        with(&widen(&self.x), &layers, last.as_ref().map(Part::norm).as_ref())
    }

    /// Returns the exact result.
    pub fn exact(&self) -> reference::Encoded<f64> {
        self.on_host(|x, layers, last| {
            let rows = [self.batch, self.length];
            let calls = self.calls().into_iter().map(|(config, options)| (config, options.weights(true)));
            let got = match &self.each[..] {
                [] => {
                    let options = self.options().weights(true);
                    reference::encoder(x, rows, &self.config(DType::F32), layers, last, &options)
                }
                _ => reference::encoder_by_layer(x, rows, &calls.collect::<Vec<_>>(), layers, last),
            };
            got.expect("the stack fits the reference")
        })
    }

    /// Returns the same in f32, with each tensor between kernels stored as `dtype`.
    pub fn naive(&self, dtype: DType) -> Naive {
        let keep = |x: Vec<f32>| stored(&x, dtype);
        let (e, f, heads) = (self.features, self.hidden, self.heads);
        let dim = e / heads;
        let shape = Shape { kv_heads: self.kv_heads, ..Shape::new(self.batch, heads, self.length, dim) };
        let product = |x: &[f32], l: &LinearData, from, to| {
            project(x, &l.weight, l.bias.as_deref(), from, to).expect("it fits")
        };
        let normed = |x: &[f32], l: &LinearData| {
            norm(x, e, Some(&l.weight), l.bias.as_deref(), &self.norm).expect("it fits")
        };
        let added = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<f32>>();
        let mut weights = Vec::new();
        // Keys and values of each layer.
        let mut kept: Vec<[Vec<f32>; 2]> = Vec::new();
        let mut attend = |x: &[f32], parts: &[LinearData], own: &LayerData| {
            let [q, mut k, mut v] = [0, 1, 2].map(|n| {
                let heads = if n == 0 { heads } else { self.kv_heads };
                let mut y = keep(product(x, &parts[n], e, heads * dim));
                if let (Some(norms), Some(of), 0..2) = (Stack::qk_norms(parts), &self.qk_norm, n) {
                    let (weight, bias) = (&norms[n].weight, norms[n].bias.as_deref());
                    y = keep(norm(&y, dim, Some(weight), bias, of).expect("it fits"));
                }
                if let Some(rotary) = own.rotary.as_ref().filter(|_| n < 2) {
                    y = keep(rotary.turned(&y, [heads, self.length, dim], false));
                }
                split_heads(&y, self.length, heads, dim).expect("it fits")
            });
            if let Some(source) = own.keys_of {
                [k, v] = kept[source].clone();
            }
            kept.push([k.clone(), v.clone()]);
            let options = own.options().rotary(None, RowPositions::Start(0));
            let options = options.scale(own.scale).softcap(own.softcap).weights(true);
            let got = attention(&q, &k, &v, shape, &options).expect("it fits");
            weights.extend(got.weights);
            let context = keep(join_heads(&got.out, self.length, heads, dim).expect("it fits"));
            let logits =
                Stack::output_gate(parts).map(|gate| keep(product(x, gate, e, gate.weight.len() / e)));
            let sigmoid = |x: f32| activate(x, Activation::Sigmoid);
            let context = keep(LayerCase::gated(&context, logits.as_deref(), sigmoid));
            keep(product(&context, &parts[3], e, e))
        };
        let feed = |x: &[f32], parts: &[LinearData]| {
            let up = product(x, &parts[4], e, f);
            let hidden = match Stack::gate(parts) {
                Some(gate) => keep(product(x, gate, e, f))
                    .iter()
                    .zip(keep(up))
                    .map(|(g, u)| activate(*g, self.activation) * u)
                    .collect(),
                None => up.iter().map(|u| activate(*u, self.activation)).collect(),
            };
            keep(product(&keep(hidden), &parts[5], f, e))
        };
        let mut x = self.x.clone();
        let mut hidden = Vec::new();
        let common =
            LayerData { rules: self.rules.clone(), rotary: self.rotary.clone(), ..Default::default() };
        for (n, parts) in self.layers.iter().enumerate() {
            let own = self.each.get(n).unwrap_or(&common);
            x = match self.order {
                NormOrder::Post => {
                    let middle = keep(normed(&added(&x, &attend(&x, parts, own)), &parts[6]));
                    keep(normed(&added(&middle, &feed(&middle, parts)), &parts[7]))
                }
                NormOrder::Pre => {
                    let middle = keep(added(&x, &attend(&keep(normed(&x, &parts[6])), parts, own)));
                    let branch = feed(&keep(normed(&middle, &parts[7])), parts);
                    keep(added(&middle, &branch))
                }
            };
            hidden.push(x.clone());
        }
        let out = self.final_norm.as_ref().map_or(x.clone(), |l| keep(normed(&x, l)));
        Naive { out, hidden, weights }
    }

    /// Puts the weights on the device.
    pub fn place(&self, profile: &'static Profile, dtype: DType) -> PlacedStack {
        let order = if self.transposed { [0, 1, 3, 2] } else { [0, 1, 2, 3] };
        self.place_as(|data, shape| {
            let at = Place::nested(shape, order, [0; 4], 1, 0);
            Placed::input(profile, Values::Floats(data), dtype, at)
        })
    }

    /// Places the gradients of the weights on the device. With `hold`, their buffers hold the
    /// weights first.
    pub fn place_gradients(
        &self,
        profile: &'static Profile,
        dtype: DType,
        hold: bool,
        layout: Layout,
    ) -> PlacedStack {
        self.place_as(|data, shape| {
            let [at] = layout.places([shape]);
            if hold { Placed::holding(profile, data, dtype, at) } else { Placed::output(profile, dtype, at) }
        })
    }

    fn place_as(&self, place: impl Fn(&[f32], [usize; 4]) -> Placed) -> PlacedStack {
        let e = self.features;
        let part = |l: &LinearData, [out, from]: [usize; 2], is_norm: bool| PlacedPart {
            weight: place(&l.weight, [1, 1, out, from]),
            bias: l.bias.as_ref().map(|b| place(b, [1, 1, 1, if is_norm { from } else { out }])),
        };
        let shapes = self.part_shapes();
        let layer = |parts: &Vec<LinearData>| {
            parts.iter().zip(&shapes).map(|(l, shape)| part(l, *shape, shape[0] == 1)).collect()
        };
        PlacedStack {
            layers: self.layers.iter().map(layer).collect(),
            final_norm: self.final_norm.as_ref().map(|l| part(l, [1, e], true)),
            sources: (0..self.layers.len()).map(|n| self.each.get(n).and_then(|own| own.keys_of)).collect(),
        }
    }
}

/// The result of a stack in f32.
pub struct Naive {
    pub out: Vec<f32>,
    /// The output of each layer.
    pub hidden: Vec<Vec<f32>>,
    /// The weights of each layer's heads.
    pub weights: Vec<Vec<f32>>,
}

pub struct PlacedPart {
    pub weight: Placed,
    pub bias: Option<Placed>,
}

impl PlacedPart {
    pub fn linear(&self) -> Linear<'_> {
        Linear { weight: self.weight.view(), bias: self.bias.as_ref().map(Placed::view) }
    }

    pub fn norm(&self) -> NormWeights<'_> {
        NormWeights { weight: Some(self.weight.view()), bias: self.bias.as_ref().map(Placed::view) }
    }

    pub fn linear_gradients(&self) -> LinearGradients<'_> {
        LinearGradients { weight: Some(self.weight.view()), bias: self.bias.as_ref().map(Placed::view) }
    }

    pub fn norm_gradients(&self) -> NormGradients<'_> {
        NormGradients { weight: Some(self.weight.view()), bias: self.bias.as_ref().map(Placed::view) }
    }
}

/// The weights of a stack on the device.
pub struct PlacedStack {
    layers: Vec<Vec<PlacedPart>>,
    final_norm: Option<PlacedPart>,
    /// For each layer, the layer whose keys it reads.
    sources: Vec<Option<usize>>,
}

impl PlacedStack {
    pub fn weights(&self) -> Vec<EncoderLayerWeights<'_>> {
        let of = |n: usize| weights_of(&self.layers[n], &self.layers[self.sources[n].unwrap_or(n)]);
        (0..self.layers.len()).map(of).collect()
    }

    /// Returns the same tensors as places of gradients, except those of another layer's keys.
    pub fn gradients(&self) -> Vec<EncoderLayerGradients<'_>> {
        let of = |n: usize| {
            let mut gradients = gradients_of(&self.layers[n]);
            if self.sources[n].is_some() {
                let attention = &mut gradients.attention;
                (attention.key, attention.value) = Default::default();
                attention.qk_norm[1] = NormGradients::default();
            }
            gradients
        };
        (0..self.layers.len()).map(of).collect()
    }

    pub fn final_gradients(&self) -> NormGradients<'_> {
        self.final_norm.as_ref().map(PlacedPart::norm_gradients).unwrap_or_default()
    }

    /// Returns all tensors in order, each weight before its bias, except those of another layer.
    pub fn tensors(&self) -> impl Iterator<Item = &Placed> {
        let layers = self.layers.iter().zip(&self.sources).flat_map(|(parts, source)| {
            let own = |part: &usize| source.is_none() || !Stack::is_of_keys(*part, parts.len());
            (0..parts.len()).filter(own).map(|part| &parts[part])
        });
        let parts = layers.chain(&self.final_norm);
        parts.flat_map(|part| std::iter::once(&part.weight).chain(&part.bias))
    }

    pub fn encoder(
        &self,
        profile: &Profile,
        config: TransformerLayerConfig,
    ) -> Result<TransformerEncoder, wgpu_attention::Error> {
        let last = self.final_norm.as_ref().map(PlacedPart::norm);
        TransformerEncoder::with_pipelines(profile.gpu.pipelines(), config, &self.weights(), last)
    }

    /// Returns a stack of layers with these configurations.
    pub fn encoder_of(
        &self,
        profile: &Profile,
        configs: &[TransformerLayerConfig],
    ) -> Result<TransformerEncoder, wgpu_attention::Error> {
        let last = self.final_norm.as_ref().map(PlacedPart::norm);
        TransformerEncoder::with_configs(profile.gpu.pipelines(), configs, &self.weights(), last)
    }
}

fn weights_of<'a>(p: &'a [PlacedPart], keys: &'a [PlacedPart]) -> EncoderLayerWeights<'a> {
    EncoderLayerWeights {
        attention: MultiHeadWeights {
            query: p[0].linear(),
            key: keys[1].linear(),
            value: keys[2].linear(),
            out: p[3].linear(),
            bias_kv: None,
            qk_norm: Stack::qk_norms(p).map(|[q_norm, _]| [q_norm.norm(), keys[9].norm()]),
            gate: Stack::output_gate(p).map(PlacedPart::linear),
        },
        feed_forward: FeedForwardWeights {
            up: p[4].linear(),
            gate: Stack::gate(p).map(PlacedPart::linear),
            down: p[5].linear(),
        },
        norms: [p[6].norm(), p[7].norm()],
    }
}

fn gradients_of(p: &[PlacedPart]) -> EncoderLayerGradients<'_> {
    EncoderLayerGradients {
        attention: MultiHeadGradients {
            query: p[0].linear_gradients(),
            key: p[1].linear_gradients(),
            value: p[2].linear_gradients(),
            out: p[3].linear_gradients(),
            bias_kv: None,
            qk_norm: Stack::qk_norms(p)
                .map(|norms| norms.map(PlacedPart::norm_gradients))
                .unwrap_or_default(),
            gate: Stack::output_gate(p).map(PlacedPart::linear_gradients).unwrap_or_default(),
        },
        feed_forward: FeedForwardGradients {
            up: p[4].linear_gradients(),
            gate: Stack::gate(p).map(PlacedPart::linear_gradients).unwrap_or_default(),
            down: p[5].linear_gradients(),
        },
        norms: [p[6].norm_gradients(), p[7].norm_gradients()],
    }
}
