//! Layers of a stack that read the keys and values of an earlier layer.

use super::attention_part::AttentionPart;
use super::config::{NormOrder, TransformerLayerConfig};
use super::layer_call::LayerCalls;
use super::workspace::{Rows, Workspace, bytes};
use crate::kernel::{Dispatches, Scratch, ScratchSize, Slot, in_scratch};
use crate::layers::multi_head::{
    MultiHeadAttention, MultiHeadForward, MultiHeadGradients, MultiHeadWeights, key_layouts,
};
use crate::matmul::Linear;
use crate::matmul::projection::dispatch_backward::Gradient;
use crate::rows::elementwise::dispatch::ElementwiseOp;
use crate::rows::norm::OwnedNorm;
use crate::tensor::{DType, Error, Shape, TensorView, count, same_view};

/// The layers of a stack that read the keys and values of other layers.
#[derive(Clone, Debug)]
pub(crate) struct SharedKeys {
    /// For each layer, the layer whose keys it reads, if these are another layer's keys.
    sources: Vec<Option<usize>>,
    /// The layers whose keys other layers read.
    read: Vec<usize>,
}

impl SharedKeys {
    /// `weights` returns the weights of a layer's self-attention.
    ///
    /// # Errors
    /// A layer that reads the keys of another layer, and has other weights of keys.
    pub fn new<'a>(
        configs: &[TransformerLayerConfig],
        weights: impl Fn(usize) -> &'a MultiHeadWeights<'a>,
    ) -> Result<Self, Error> {
        let sources: Vec<_> = configs.iter().map(|config| config.keys_of).collect();
        let others = |(n, source): (usize, &Option<usize>)| {
            source.is_some_and(|source| !have_same_keys(weights(n), weights(source)))
        };
        if sources.iter().enumerate().any(others) {
            let why = "`key`, `value`, `bias_kv` and the key norm must be the tensors of the layer whose keys it reads";
            return Err(Error::Unsupported {
                what: "different key weights in a layer with `TransformerLayerConfig::keys_of`",
                why,
            });
        }
        let mut read: Vec<_> = sources.iter().flatten().copied().collect();
        read.sort_unstable();
        read.dedup();
        Ok(SharedKeys { sources, read })
    }

    /// True if all layers have their own keys.
    pub fn is_empty(&self) -> bool {
        self.read.is_empty()
    }

    /// The layer whose keys layer `n` reads, if these are another layer's keys.
    pub fn source(&self, n: usize) -> Option<usize> {
        self.sources[n]
    }

    /// The index of layer `n`'s keys among the keys that several layers read, if they are among
    /// these.
    fn place(&self, n: usize) -> Option<usize> {
        self.read.binary_search(&self.sources[n].unwrap_or(n)).ok()
    }

    /// True if a later layer reads the same keys as layer `n`. A backward pass visits that layer
    /// earlier.
    fn is_read_later(&self, n: usize) -> bool {
        let source = self.sources[n].unwrap_or(n);
        self.sources[n + 1..].contains(&Some(source))
    }

    /// The number of layers of a cache.
    pub fn cache_layers(&self) -> usize {
        self.sources.iter().filter(|source| source.is_none()).count()
    }

    /// The layer of a cache that layer `n` attends to.
    pub fn cache_layer(&self, n: usize) -> usize {
        let own = self.sources[n].unwrap_or(n);
        self.sources[..own].iter().filter(|source| source.is_none()).count()
    }

    /// Refuses a layer whose rotation differs from the rotation of the layer whose keys it reads.
    pub fn check(&self, calls: &LayerCalls) -> Result<(), Error> {
        for (n, source) in self.sources.iter().enumerate() {
            let Some(source) = source else { continue };
            let same = match (calls.rotary_of(n), calls.rotary_of(*source)) {
                (None, None) => true,
                (Some(a), Some(b)) => a.is_same(&b),
                _ => false,
            };
            if !same {
                let why =
                    "use the rotation and positions of the layer whose keys it reads, or no rotation in both";
                let what = "a different rotation in a layer with `TransformerLayerConfig::keys_of`";
                return Err(calls.at(n, Error::Unsupported { what, why }));
            }
        }
        Ok(())
    }

    /// The scratch of keys and values that several layers read.
    pub fn forward_size(
        &self,
        layer: &MultiHeadAttention,
        rows: Rows,
        limit: u64,
    ) -> Result<ScratchSize, Error> {
        let shape = layer.shape_of([rows.batch, rows.length, rows.length]);
        let dtype = layer.dtype();
        let (_, elements) = key_layouts(&shape, dtype);
        let elements = (elements as u64).saturating_mul(self.read.len() as u64);
        let bytes = elements.saturating_mul(dtype.bytes() as u64);
        // Kernels count elements in 32 bits, and the dispatch of appended keys binds the whole
        // buffer.
        if elements > u64::from(u32::MAX / 2) || bytes > limit {
            return Err(Error::BindingLimit { tensor: "scratch", bytes, limit });
        }
        Ok(ScratchSize::default().with(Slot::SharedKeys, bytes))
    }

    /// Returns `call` of layer `n`, with a place for its keys and values in `buffer` if several
    /// layers read them.
    pub fn placed<'a>(
        &self,
        n: usize,
        call: MultiHeadForward<'a>,
        (shape, dtype): (&Shape, DType),
        buffer: &'a wgpu::Buffer,
    ) -> MultiHeadForward<'a> {
        let Some(place) = self.place(n) else { return call };
        let (layouts, elements) = key_layouts(shape, dtype);
        let keys = layouts.map(|layout| {
            let view = TensorView::with_layout(buffer, dtype, layout);
            view.with_offset(layout.offset + place * elements)
        });
        match self.sources[n] {
            None => call.keeps_keys(keys),
            Some(_) => call.projected_keys(keys),
        }
    }

    /// As [`placed`](Self::placed), in a scratch.
    pub fn placed_in<'a>(
        &self,
        n: usize,
        call: MultiHeadForward<'a>,
        of: (&Shape, DType),
        scratch: &'a Scratch,
    ) -> Result<MultiHeadForward<'a>, Error> {
        Ok(if self.is_empty() { call } else { self.placed(n, call, of, scratch.buffer(Slot::SharedKeys)?) })
    }

    /// Returns layer `n`'s attention with the places of its gradients. `of` returns the places that
    /// the caller set for a layer. If layer `n` reads the keys of another layer, gradients of keys'
    /// weights go to the places of that layer.
    ///
    /// # Errors
    /// Gradients of keys' weights in a layer that reads the keys of another layer.
    pub fn part<'a>(
        &self,
        n: usize,
        (layer, slots): (&'a MultiHeadAttention, [Slot; 2]),
        of: impl Fn(usize) -> MultiHeadGradients<'a>,
    ) -> Result<AttentionPart<'a>, Error> {
        let own = of(n);
        let mut to = own;
        if let Some(source) = self.sources[n] {
            let [q_norm, k_norm] = own.qk_norm;
            let unwanted =
                [own.key.weight, own.key.bias, own.value.weight, own.value.bias, k_norm.weight, k_norm.bias];
            if own.bias_kv.is_some() || unwanted.iter().any(Option::is_some) {
                let why = "request them in the layer whose keys it reads; they are summed over all layers that read these keys";
                let what = "gradients of keys and values in a layer with `TransformerLayerConfig::keys_of`";
                return Err(Error::Unsupported { what, why });
            }
            let MultiHeadGradients { key, value, bias_kv, qk_norm, .. } = of(source);
            to = MultiHeadGradients { key, value, bias_kv, qk_norm: [q_norm, qk_norm[1]], ..own };
        }
        Ok(AttentionPart { layer, to, own, adds_keys: self.is_read_later(n), slots })
    }

    /// The scratch of a backward pass for the inputs of keys that several layers read, and for
    /// their gradients.
    pub fn backward_size(&self, config: &TransformerLayerConfig, rows: &Rows) -> ScratchSize {
        if self.is_empty() {
            return ScratchSize::default();
        }
        let elements = input_gradient_elements(config, rows).saturating_mul(self.read.len());
        let size = ScratchSize::default().with(Slot::KeyInputGradient, 4 * elements as u64);
        match config.order {
            NormOrder::Post => size,
            NormOrder::Pre => size.with(Slot::KeyInput, bytes(config, rows, config.features())),
        }
    }

    /// The keys of layer `n` in a backward pass. `of` returns the input and the first norm of a
    /// layer.
    pub fn turn<'a>(
        &self,
        n: usize,
        of: impl FnOnce(usize) -> (TensorView<'a>, &'a OwnedNorm),
        work: &Workspace<'a>,
        dispatches: &mut Dispatches<'a>,
    ) -> Result<KeysTurn<'a>, Error> {
        let Some(place) = self.place(n) else { return Ok(KeysTurn::Own) };
        let buffer = work.scratch.buffer(Slot::KeyInputGradient)?;
        let shape = work.rows.shape(work.config.features());
        let d =
            in_scratch(buffer, DType::F32, shape, place * input_gradient_elements(work.config, &work.rows));
        let Some(source) = self.sources[n] else { return Ok(KeysTurn::Read(d)) };
        let (x, norm) = of(source);
        let input = match work.config.order {
            NormOrder::Post => x,
            NormOrder::Pre => {
                let normed = work.features(Slot::KeyInput)?;
                dispatches.push(work.norm(norm, x, None, normed, None));
                normed
            }
        };
        Ok(KeysTurn::Reads { input, d: Gradient { view: d, accumulates: self.is_read_later(n) } })
    }
}

/// The keys of a layer in a backward pass.
#[derive(Clone, Copy)]
pub(crate) enum KeysTurn<'a> {
    /// The layer projects the keys, and is their only reader.
    Own,
    /// The layer projects the keys, and other layers read them too. They have left this gradient of
    /// the projection's input.
    Read(TensorView<'a>),
    /// An earlier layer has projected the keys from `input`. The gradient of that input goes to
    /// `d`.
    Reads { input: TensorView<'a>, d: Gradient<'a> },
}

impl<'a> KeysTurn<'a> {
    /// Returns the call of the layer with the input of its keys.
    pub fn call(&self, call: MultiHeadForward<'a>) -> MultiHeadForward<'a> {
        match *self {
            KeysTurn::Reads { input, .. } => call.keys_from(input),
            _ => call,
        }
    }

    /// The place for the gradient of the input of keys and values. `own` is the place of a layer
    /// that projects its keys.
    pub fn gradient(&self, own: Gradient<'a>) -> Gradient<'a> {
        match *self {
            KeysTurn::Reads { d, .. } => d,
            _ => own,
        }
    }

    /// Adds the gradient from other readers of the keys to the gradient of their input.
    pub fn add_to(&self, d_input: TensorView<'a>, work: &Workspace<'a>) -> Dispatches<'a> {
        let KeysTurn::Read(more) = *self else { return Dispatches::new() };
        let copy = ElementwiseOp { activation: None, x: more, multiply: None, residual: None };
        vec![copy.backward(more, Some(d_input), None, true, work.device)]
    }
}

/// Elements from the gradient of one input of keys to the next gradient. Every device can bind at
/// its beginning.
fn input_gradient_elements(config: &TransformerLayerConfig, rows: &Rows) -> usize {
    count(rows.shape(config.features())).next_multiple_of(64)
}

fn have_same_keys(a: &MultiHeadWeights, b: &MultiHeadWeights) -> bool {
    let same = |a: Option<TensorView>, b: Option<TensorView>| match (a, b) {
        (Some(a), Some(b)) => same_view(&a, &b),
        (None, None) => true,
        _ => false,
    };
    let linear = |a: &Linear, b: &Linear| same_view(&a.weight, &b.weight) && same(a.bias, b.bias);
    let [a_norm, b_norm] = [a, b].map(|weights| weights.qk_norm.unwrap_or_default()[1]);
    linear(&a.key, &b.key)
        && linear(&a.value, &b.value)
        && same(a_norm.weight, b_norm.weight)
        && same(a_norm.bias, b_norm.bias)
        && [0, 1].into_iter().all(|n| same(a.bias_kv.map(|pair| pair[n]), b.bias_kv.map(|pair| pair[n])))
}
