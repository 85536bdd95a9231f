//! A decoder stack with its data: on the host in any arithmetic, and on the device.

use wgpu_attention::layers::{
    DecoderLayerGradients, DecoderLayerWeights, FeedForwardGradients, FeedForwardWeights, MultiHeadConfig,
    MultiHeadGradients, MultiHeadWeights, NormOrder, OutputGate, TransformerLayerConfig,
};
use wgpu_attention::matmul::Activation;
use wgpu_attention::reference::{
    self, HostDecoderLayer, HostFeedForward, HostNorm, HostWeights, MultiHeadShape, Options, Real, widen,
};
use wgpu_attention::rows::{NormConfig, NormGradients};
use wgpu_attention::{DType, Error, TensorView, TransformerDecoder};

use super::FAMILY;
use super::by_layer::LayerData;
use super::data::{Part, PlacedPart};
use crate::harness::layer::LinearData;
use crate::harness::rotary::RotaryData;
use crate::harness::run::{Layout, Placed};
use crate::harness::{HostData, Profile, Rng, Rules, Values, Vector, stored};

pub const NAMES: &[&str] = &["decoder_post_relu_1layer"];

/// The data of a stack and of a call.
#[derive(Clone)]
pub struct Stack {
    pub batch: usize,
    pub length: usize,
    pub memory_len: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub features: usize,
    pub hidden: usize,
    pub activation: Activation,
    pub gated: bool,
    /// True if its linear layers and norms have biases.
    pub biased: bool,
    /// True if its attentions append a learned key and value, and a key and value of zeros.
    pub appends: [bool; 2],
    pub order: NormOrder,
    pub norm: NormConfig,
    /// The norm of queries and keys in both attentions.
    pub qk_norm: Option<NormConfig>,
    /// The gate of the heads' outputs in both attentions, in gated stacks with norms of queries and
    /// keys.
    pub output_gate: Option<OutputGate>,
    /// The rules of self-attention, and of attention to the memory.
    pub rules: [Rules; 2],
    /// The rotation of self-attention.
    pub rotary: Option<RotaryData>,
    /// The options of each layer's self-attention instead of `rules[0]` and `rotary`. Empty if all
    /// layers are alike.
    pub each: Vec<LayerData>,
    /// The parts of each layer: query, key, value, out of both attentions, up, down, three norms.
    /// Then the key that each attention appends, with the value as its bias. Otherwise the norms of
    /// queries and keys of both attentions, and the gates of their heads' outputs. The gate of the
    /// feed-forward part is last.
    pub layers: Vec<Vec<LinearData>>,
    pub final_norm: Option<LinearData>,
    pub x: Vec<f32>,
    pub memory: Vec<f32>,
}

impl Stack {
    pub fn config(&self, dtype: DType) -> TransformerLayerConfig {
        self.config_of(&LayerData::default(), dtype)
    }

    /// Returns the configuration of each layer.
    pub fn configs(&self, dtype: DType) -> Vec<TransformerLayerConfig> {
        match &self.each[..] {
            [] => vec![self.config(dtype); self.layers.len()],
            each => each.iter().map(|layer| self.config_of(layer, dtype)).collect(),
        }
    }

    fn config_of(&self, layer: &LayerData, dtype: DType) -> TransformerLayerConfig {
        let attention = MultiHeadConfig::new(self.features, self.heads)
            .kv_heads(self.kv_heads)
            .add_zero_attn(self.appends[1])
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

    /// Returns the layer whose part layer `n` uses, if its self-attention reads that layer's keys.
    /// The parts are key, value, the appended ones and the norm of keys.
    pub fn lender(&self, n: usize, part: usize) -> Option<usize> {
        let source = self.each.get(n)?.keys_of?;
        Self::is_of_keys(part, self.layers[n].len()).then_some(source)
    }

    /// True if a part belongs to the keys of self-attention, in a layer of `parts` parts.
    fn is_of_keys(part: usize, parts: usize) -> bool {
        match part {
            1 | 2 => true,
            13 => matches!(parts, 15 | 16),
            14 => parts >= 17,
            _ => false,
        }
    }

    /// Returns the number of layers that project keys.
    pub fn layers_with_keys(&self) -> usize {
        self.layers.len() - self.each.iter().filter(|layer| layer.keys_of.is_some()).count()
    }

    /// Returns the number of layers' outputs that a call can save.
    pub fn kept(&self) -> usize {
        self.layers.len() - usize::from(self.final_norm.is_none())
    }

    /// Returns the number of keys that an attention appends.
    pub fn appended(&self) -> usize {
        self.appends.iter().filter(|appends| **appends).count()
    }

    /// Returns the appended parts of a layer.
    pub fn appended_parts<T>(parts: &[T]) -> Option<[&T; 2]> {
        matches!(parts.len(), 15 | 16).then(|| [&parts[13], &parts[14]])
    }

    /// Returns the norms of queries and of keys of the attention whose parts begin at `n`. Such a
    /// layer appends nothing.
    pub fn qk_norms<T>(parts: &[T], n: usize) -> Option<[&T; 2]> {
        (parts.len() >= 17).then(|| [&parts[13 + n / 2], &parts[14 + n / 2]])
    }

    /// Returns the gate of the heads' outputs of the attention whose parts begin at `n`.
    pub fn output_gate<T>(parts: &[T], n: usize) -> Option<&T> {
        (parts.len() == 20).then(|| &parts[17 + n / 4])
    }

    /// Returns the gate of the feed-forward part.
    pub fn gate<T>(parts: &[T]) -> Option<&T> {
        parts.last().filter(|_| parts.len().is_multiple_of(2))
    }

    /// True if a part is a norm, or has a weight and a bias of equal length like a norm.
    fn is_norm(shape: [usize; 2]) -> bool {
        shape[0] == 1
    }

    pub fn part_shapes(&self) -> Vec<[usize; 2]> {
        let (e, f) = (self.features, self.hidden);
        let narrow = e / self.heads * self.kv_heads;
        let attention = [[e, e], [narrow, e], [narrow, e], [e, e]];
        let mut shapes = [attention; 2].concat();
        shapes.extend([[f, e], [e, f], [1, e], [1, e], [1, e]]);
        let appended = self.appends[0].then_some([[1, narrow]; 2]);
        shapes.extend(appended.into_iter().flatten());
        shapes.extend(self.qk_norm.iter().flat_map(|_| [[1, e / self.heads]; 4]));
        shapes.extend(self.output_gate.iter().flat_map(|gate| match gate {
            OutputGate::Headwise => [[self.heads, e]; 2],
            _ => [[e, e]; 2],
        }));
        shapes.extend(self.gated.then_some([f, e]));
        shapes
    }

    pub fn random(rng: &mut Rng, layers: usize, final_norm: bool, mut stack: Stack) -> Self {
        let (e, biased) = (stack.features, stack.biased);
        let mut part = |[out, from]: [usize; 2], n: usize| {
            let norm = Self::is_norm([out, from]);
            let appended = norm && n >= 13;
            let scale = 1.0 / (from as f32).sqrt();
            let near = f32::from(u8::from(norm));
            let weight = rng.normals(out * from).iter().map(|w| w * scale + near).collect();
            let bias = rng.normals(if norm { from } else { out }).iter().map(|b| 0.3 * b).collect();
            LinearData { weight, bias: (biased || appended).then_some(bias) }
        };
        let shapes = stack.part_shapes();
        let layer = |part: &mut dyn FnMut([usize; 2], usize) -> LinearData| {
            shapes.iter().enumerate().map(|(n, shape)| part(*shape, n)).collect()
        };
        stack.layers = (0..layers).map(|_| layer(&mut part)).collect();
        for n in 0..stack.each.len() {
            for part in 0..stack.layers[n].len() {
                if let Some(source) = stack.lender(n, part) {
                    stack.layers[n][part] = stack.layers[source][part].clone();
                }
            }
        }
        stack.final_norm = final_norm.then(|| part([1, e], 0));
        stack.x = rng.normals(stack.batch * stack.length * e);
        stack.memory = rng.normals(stack.batch * stack.memory_len * e);
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
            memory: stored(&self.memory, dtype),
            layers: self.layers.iter().map(|parts| parts.iter().map(part).collect()).collect(),
            final_norm: self.final_norm.as_ref().map(part),
            ..self.clone()
        }
    }

    /// Calls `with` with its weights, its input and the memory in the arithmetic of `R`.
    pub fn on_host<R: Real, T>(
        &self,
        with: impl FnOnce([&[R]; 2], &[HostDecoderLayer<R>], Option<&HostNorm<R>>) -> T,
    ) -> T {
        let parts: Vec<Vec<Part<R>>> =
            self.layers.iter().map(|parts| parts.iter().map(Part::of).collect()).collect();
        let layers: Vec<_> = parts
            .iter()
            .map(|p| {
                let weights = |n: usize| HostWeights {
                    query: p[n].linear(),
                    key: p[n + 1].linear(),
                    value: p[n + 2].linear(),
                    out: p[n + 3].linear(),
                    bias_kv: Stack::appended_parts(p)
                        .map(|parts| parts[n / 4])
                        .and_then(|part| Some([&part.weight[..], part.bias.as_deref()?])),
                    qk_norm: Stack::qk_norms(p, n).map(|norms| norms.map(Part::norm)),
                    gate: Stack::output_gate(p, n).map(Part::linear),
                };
                HostDecoderLayer {
                    self_attention: weights(0),
                    cross_attention: weights(4),
                    feed_forward: HostFeedForward {
                        up: p[8].linear(),
                        gate: Stack::gate(p).map(Part::linear),
                        down: p[9].linear(),
                    },
                    norms: [p[10].norm(), p[11].norm(), p[12].norm()],
                }
            })
            .collect();
        let last = self.final_norm.as_ref().map(Part::<R>::of);
        let (x, memory) = (widen::<R>(&self.x), widen::<R>(&self.memory));
        with([&x, &memory], &layers, last.as_ref().map(Part::norm).as_ref())
    }

    pub fn shape(&self) -> MultiHeadShape {
        MultiHeadShape { batch: self.batch, q_len: self.length, kv_len: self.memory_len }
    }

    /// Returns the options of self-attention, and of attention to the memory.
    pub fn options(&self) -> [Options<'_>; 2] {
        let [own, cross] = self.rules.each_ref().map(|rules| Options::new().mask(rules.host()));
        [self.rotary.as_ref().map_or(own, |rotary| rotary.options(own)), cross]
    }

    /// Returns the configuration and the options of each layer for the reference, if layers differ.
    pub fn calls(&self) -> Vec<(TransformerLayerConfig, [Options<'_>; 2])> {
        let options = self.each.iter().map(|layer| [layer.options(), self.options()[1]]);
        self.configs(DType::F32).into_iter().zip(options).collect()
    }

    pub fn reference<R: Real>(&self) -> reference::Encoded<R> {
        let got = self.on_host(|inputs, layers, last| {
            if !self.each.is_empty() {
                return reference::decoder_by_layer(inputs, self.shape(), &self.calls(), layers, last);
            }
            let [own, cross] = &self.options();
            let config = self.config(DType::F32);
            reference::decoder(inputs, self.shape(), &config, layers, last, [own, cross])
        });
        got.expect("the stack fits the reference")
    }
}

/// The weights of a stack on the device.
pub struct Weights {
    layers: Vec<Vec<PlacedPart>>,
    final_norm: Option<PlacedPart>,
    /// For each layer, the layer whose keys its self-attention reads.
    sources: Vec<Option<usize>>,
}

impl Weights {
    pub fn new(stack: &Stack, profile: &'static Profile, dtype: DType) -> Self {
        Self::placed(stack, |data, shape| {
            let [at] = Layout::Dense.places([shape]);
            Placed::input(profile, Values::Floats(data), dtype, at)
        })
    }

    /// Makes places of gradients. With `hold`, they hold the weights first.
    pub fn gradients(
        stack: &Stack,
        profile: &'static Profile,
        dtype: DType,
        hold: bool,
        layout: Layout,
    ) -> Self {
        Self::placed(stack, |data, shape| {
            let [at] = layout.places([shape]);
            if hold { Placed::holding(profile, data, dtype, at) } else { Placed::output(profile, dtype, at) }
        })
    }

    fn placed(stack: &Stack, place: impl Fn(&[f32], [usize; 4]) -> Placed) -> Self {
        let part = |l: &LinearData, [out, from]: [usize; 2], norm: bool| PlacedPart {
            weight: place(&l.weight, [1, 1, out, from]),
            bias: l.bias.as_ref().map(|b| place(b, [1, 1, 1, if norm { from } else { out }])),
        };
        let shapes = stack.part_shapes();
        let layer = |parts: &Vec<LinearData>| {
            parts.iter().zip(&shapes).map(|(l, shape)| part(l, *shape, Stack::is_norm(*shape))).collect()
        };
        Weights {
            layers: stack.layers.iter().map(layer).collect(),
            final_norm: stack.final_norm.as_ref().map(|l| part(l, [1, stack.features], true)),
            sources: (0..stack.layers.len()).map(|n| stack.each.get(n).and_then(|own| own.keys_of)).collect(),
        }
    }

    fn weights(&self) -> Vec<DecoderLayerWeights<'_>> {
        let of = |n: usize| weights_of(&self.layers[n], &self.layers[self.sources[n].unwrap_or(n)]);
        (0..self.layers.len()).map(of).collect()
    }

    pub fn decoder(
        &self,
        profile: &Profile,
        config: TransformerLayerConfig,
    ) -> Result<TransformerDecoder, Error> {
        let layers = self.weights();
        let last = self.final_norm.as_ref().map(PlacedPart::norm);
        TransformerDecoder::with_pipelines(profile.gpu.pipelines(), config, &layers, last)
    }

    /// Returns a stack of layers with these configurations.
    pub fn decoder_of(
        &self,
        profile: &Profile,
        configs: &[TransformerLayerConfig],
    ) -> Result<TransformerDecoder, Error> {
        let layers = self.weights();
        let last = self.final_norm.as_ref().map(PlacedPart::norm);
        TransformerDecoder::with_configs(profile.gpu.pipelines(), configs, &layers, last)
    }

    /// Returns the same tensors as places of gradients.
    pub fn layer_gradients(&self) -> Vec<DecoderLayerGradients<'_>> {
        let of = |n: usize| {
            let mut gradients = gradients_of(&self.layers[n]);
            if self.sources[n].is_some() {
                let attention = &mut gradients.self_attention;
                (attention.key, attention.value, attention.bias_kv) = Default::default();
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
}

/// Returns the key and value that the attention whose parts begin at `n` appends.
fn appended_of(p: &[PlacedPart], n: usize) -> Option<[TensorView<'_>; 2]> {
    let part = Stack::appended_parts(p)?[n / 4];
    Some([part.weight.view(), part.bias.as_ref()?.view()])
}

fn gradients_of(p: &[PlacedPart]) -> DecoderLayerGradients<'_> {
    let attention = |n: usize| MultiHeadGradients {
        query: p[n].linear_gradients(),
        key: p[n + 1].linear_gradients(),
        value: p[n + 2].linear_gradients(),
        out: p[n + 3].linear_gradients(),
        bias_kv: appended_of(p, n),
        qk_norm: Stack::qk_norms(p, n).map(|norms| norms.map(PlacedPart::norm_gradients)).unwrap_or_default(),
        gate: Stack::output_gate(p, n).map(PlacedPart::linear_gradients).unwrap_or_default(),
    };
    DecoderLayerGradients {
        self_attention: attention(0),
        cross_attention: attention(4),
        feed_forward: FeedForwardGradients {
            up: p[8].linear_gradients(),
            gate: Stack::gate(p).map(PlacedPart::linear_gradients).unwrap_or_default(),
            down: p[9].linear_gradients(),
        },
        norms: [p[10].norm_gradients(), p[11].norm_gradients(), p[12].norm_gradients()],
    }
}

/// Returns a layer's weights. `keys` are the parts of the layer whose keys self-attention reads.
fn weights_of<'a>(p: &'a [PlacedPart], keys: &'a [PlacedPart]) -> DecoderLayerWeights<'a> {
    let attention = |n: usize, keys: &'a [PlacedPart]| MultiHeadWeights {
        query: p[n].linear(),
        key: keys[n + 1].linear(),
        value: keys[n + 2].linear(),
        out: p[n + 3].linear(),
        bias_kv: appended_of(keys, n),
        qk_norm: Stack::qk_norms(p, n)
            .zip(Stack::qk_norms(keys, n))
            .map(|([q_norm, _], [_, k_norm])| [q_norm.norm(), k_norm.norm()]),
        gate: Stack::output_gate(p, n).map(PlacedPart::linear),
    };
    DecoderLayerWeights {
        self_attention: attention(0, keys),
        cross_attention: attention(4, p),
        feed_forward: FeedForwardWeights {
            up: p[8].linear(),
            gate: Stack::gate(p).map(PlacedPart::linear),
            down: p[9].linear(),
        },
        norms: [p[10].norm(), p[11].norm(), p[12].norm()],
    }
}

/// Returns the stack of a vector.
pub fn vector(name: &str) -> (Stack, Vector) {
    let vector = Vector::load(FAMILY, name);
    let linear = |layer: usize, weight: &str, bias: &str| LinearData {
        weight: vector.f32(&format!("l{layer}.{weight}")),
        bias: Some(vector.f32(&format!("l{layer}.{bias}"))),
    };
    let parts = [
        ["w_q", "b_q"],
        ["w_k", "b_k"],
        ["w_v", "b_v"],
        ["w_o", "b_o"],
        ["x_w_q", "x_b_q"],
        ["x_w_k", "x_b_k"],
        ["x_w_v", "x_b_v"],
        ["x_w_o", "x_b_o"],
        ["w_1", "b_1"],
        ["w_2", "b_2"],
        ["ln1_w", "ln1_b"],
        ["ln2_w", "ln2_b"],
        ["ln3_w", "ln3_b"],
    ];
    let [_, batch, length, features] = vector.shape4("x");
    let memory_len = vector.shape4("memory")[2];
    assert_eq!((&vector.attrs["activation"], &vector.attrs["norm"]), (&"relu".into(), &"post".into()));
    let key_mask = HostData::new(vector.bools("memory_key_mask").data, [batch, 1, 1, memory_len]);
    let stack = Stack {
        batch,
        length,
        memory_len,
        heads: vector.size("num_heads"),
        kv_heads: vector.size("num_heads"),
        features,
        hidden: vector.size("ffn_dim"),
        activation: Activation::Relu,
        gated: false,
        rotary: None,
        each: Vec::new(),
        biased: true,
        appends: [false; 2],
        order: NormOrder::Post,
        norm: NormConfig::layer().eps(vector.number("ln_eps").expect("ln_eps")),
        qk_norm: None,
        output_gate: None,
        rules: [
            Rules { attn_mask: Some(vector.bools("mask")), ..Default::default() },
            Rules { key_padding_mask: Some(key_mask), ..Default::default() },
        ],
        layers: (0..vector.size("layers"))
            .map(|n| parts.iter().map(|[w, b]| linear(n, w, b)).collect())
            .collect(),
        final_norm: None,
        x: vector.f32("x"),
        memory: vector.f32("memory"),
    };
    (stack, vector)
}

/// Returns a stack with a mixture of options, by its number. With `of_gradients`, its masks include
/// those that no cache supports.
pub fn drawn(n: u64, of_gradients: bool) -> Stack {
    let rng = &mut Rng::new(n ^ 0xdec0_de0c);
    let heads = rng.pick(&[1, 2, 4]);
    let (batch, length, memory_len) = (rng.pick(&[1, 2, 3]), rng.pick(&[1, 7, 18]), rng.pick(&[1, 9, 40]));
    let gated = n % 3 == 2;
    let padding = |len: usize| {
        let mask = HostData::of([batch, 1, 1, len], |[b, _, _, j]| j + b < len || j == 0);
        Rules { key_padding_mask: Some(mask), ..Default::default() }
    };
    let starts = |len: usize| HostData::new(vec![0, len as u32 / 3, len as u32], [1, 1, 1, 3]);
    let packed = |keys: usize| Rules { packed: Some([starts(length), starts(keys)]), ..Default::default() };
    let causal = Rules { causal: true, ..Default::default() };
    // Caches support causal ones.
    let rules = match n % 5 {
        0 | 1 => [causal, padding(memory_len)],
        2 if of_gradients => [padding(length), Rules::default()],
        3 if of_gradients && batch == 1 => [packed(length), packed(memory_len)],
        _ => [causal, Rules::default()],
    };
    let head_dim = rng.pick(&[8, 16]);
    let rotary = match n % 3 {
        0 => None,
        _ if of_gradients => RotaryData::random(rng, [batch, length, head_dim]),
        _ => Some(RotaryData { tables: n.is_multiple_of(2), ..RotaryData::in_order(head_dim) }),
    };
    // No cache supports them.
    let appends = [of_gradients && n % 4 == 1, of_gradients && n % 3 == 1];
    let qk_norm = (!appends[0] && !n.is_multiple_of(3))
        .then(|| [NormConfig::rms(), NormConfig::layer()][n as usize / 3 % 2]);
    let gate = [Some(OutputGate::Elementwise), Some(OutputGate::Headwise).filter(|_| heads > 1), None];
    let gate = gate[n as usize / 2 % 3];
    let stack = Stack {
        batch,
        length,
        memory_len,
        rotary,
        qk_norm,
        output_gate: gate.filter(|_| gated && qk_norm.is_some()),
        each: Vec::new(),
        heads,
        kv_heads: if n % 4 == 3 { heads.div_ceil(2) } else { heads },
        features: heads * head_dim,
        hidden: rng.pick(&[24, 64]),
        activation: Activation::ALL[n as usize % 4],
        gated,
        biased: n % 6 != 5,
        appends,
        order: if n.is_multiple_of(2) { NormOrder::Pre } else { NormOrder::Post },
        norm: if gated { NormConfig::rms() } else { NormConfig::layer() },
        rules,
        layers: Vec::new(),
        final_norm: None,
        x: Vec::new(),
        memory: Vec::new(),
    };
    let (layers, final_norm) = (1 + n as usize % 3, rng.chance(0.5));
    Stack::random(rng, layers, final_norm, stack)
}
