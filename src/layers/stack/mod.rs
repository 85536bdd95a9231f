//! A stack of layers of an encoder or a decoder. A decoder's layer has one more part: attention to
//! a memory.

mod attention_part;
mod backward;
mod call;
pub(crate) mod config;
mod feed_forward;
mod forward;
mod gradients;
mod hidden;
mod layer_call;
mod memory;
pub(crate) mod reference;
mod self_attention;
mod shared_keys;
mod workspace;

pub(crate) use backward::{LayersGradients, StackBackward};
pub(crate) use call::StackForward;
pub use feed_forward::{FeedForwardGradients, FeedForwardWeights};
pub use layer_call::LayerCall;
pub use memory::DecoderMemory;
pub(crate) use memory::MemoryCall;

use super::multi_head::{MultiHeadAttention, MultiHeadWeights};
use crate::device::DeviceFacts;
use crate::kernel::{KernelOptions, Pipelines};
use crate::rows::norm::{NormWeights, OwnedNorm};
use crate::tensor::{Access, Error, TensorView, count, expect_shape};
use config::TransformerLayerConfig;
use feed_forward::FeedForward;
use shared_keys::SharedKeys;
use workspace::{Rows, check_rows_of};

/// The weights of one layer.
#[derive(Clone, Copy)]
pub(crate) struct LayerWeights<'a> {
    pub attention: &'a MultiHeadWeights<'a>,
    /// The attention to a memory, in a decoder's layer.
    pub cross: Option<&'a MultiHeadWeights<'a>>,
    pub feed_forward: &'a FeedForwardWeights<'a>,
    /// The norm of each part of the layer, in their order.
    pub norms: &'a [NormWeights<'a>],
}

/// A layer. Its parts are self-attention, attention to a memory if it has one, and the feed-forward
/// part.
#[derive(Clone, Debug)]
struct Layer {
    attention: MultiHeadAttention,
    cross: Option<MultiHeadAttention>,
    feed_forward: FeedForward,
    /// The norm of each part, in their order.
    norms: Vec<OwnedNorm>,
}

impl Layer {
    /// The numbers of keys that self-attention and attention to a memory append.
    fn appended(&self) -> [usize; 2] {
        [self.attention.appended_keys(), self.cross.as_ref().map_or(0, MultiHeadAttention::appended_keys)]
    }
}

/// The layers of an encoder or a decoder on one device.
#[derive(Clone, Debug)]
pub(crate) struct Stack {
    pub pipelines: Pipelines,
    config: TransformerLayerConfig,
    kernel_options: KernelOptions,
    layers: Vec<Layer>,
    shared: SharedKeys,
    final_norm: Option<OwnedNorm>,
}

impl Stack {
    /// Makes a stack. `configs` has the configuration of each layer.
    ///
    /// # Errors
    /// As [`TransformerEncoder::with_configs`](crate::TransformerEncoder::with_configs).
    pub fn new<'a, W>(
        pipelines: &Pipelines,
        configs: &[TransformerLayerConfig],
        layers: &'a [W],
        final_norm: Option<NormWeights>,
    ) -> Result<Self, Error>
    where
        LayerWeights<'a>: From<&'a W>,
    {
        let device = &pipelines.facts();
        let config = TransformerLayerConfig::of_layers(configs, layers.len())?;
        let weights: Vec<LayerWeights> = layers.iter().map(LayerWeights::from).collect();
        let shared = SharedKeys::new(configs, |n| weights[n].attention)?;
        let norm = |weights: &NormWeights| {
            OwnedNorm::new(["norm.weight", "norm.bias"], weights, config.features(), device)
        };
        let layer = |(weights, own): (&LayerWeights, &TransformerLayerConfig)| {
            let attention = |weights| MultiHeadAttention::with_pipelines(pipelines, own.attention, weights);
            Ok(Layer {
                attention: attention(weights.attention)?,
                cross: weights.cross.map(attention).transpose()?,
                feed_forward: FeedForward::new(weights.feed_forward, &config, device)?,
                norms: weights.norms.iter().map(norm).collect::<Result<_, _>>()?,
            })
        };
        let layers: Vec<Layer> = weights.iter().zip(configs).map(layer).collect::<Result<_, Error>>()?;
        if layers.iter().any(|layer| layer.appended() != layers[0].appended()) {
            let why = "all layers of a stack must append the same number of keys";
            return Err(Error::Unsupported { what: "`bias_kv` in some layers", why });
        }
        Ok(Stack {
            pipelines: pipelines.clone(),
            config,
            kernel_options: KernelOptions::default(),
            final_norm: final_norm.as_ref().map(norm).transpose()?,
            layers,
            shared,
        })
    }

    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        let tuned = |layer: Layer| Layer {
            attention: layer.attention.kernel_options(kernel_options),
            cross: layer.cross.map(|cross| cross.kernel_options(kernel_options)),
            ..layer
        };
        self.layers = self.layers.into_iter().map(tuned).collect();
        self
    }

    /// Checks rows that are read, `[batch, 1, length, features]`. It refuses rows whose tensors
    /// exceed the kernels' indices.
    fn check_rows(&self, name: &'static str, view: &TensorView, device: &DeviceFacts) -> Result<Rows, Error> {
        let config = &self.config;
        check_rows_of(name, view, &config.attention, Access::Read, device)?;
        let [batch, _, length, _] = view.shape();
        let rows = Rows { batch, length };
        expect_shape(name, view.shape(), rows.shape(config.features()))?;
        let elements = count(rows.shape(config.features().max(config.hidden_features))) as u64;
        if elements > u64::from(u32::MAX / 4) {
            let bytes = elements.saturating_mul(config.attention.dtype.bytes() as u64);
            return Err(Error::BindingLimit { tensor: "scratch", bytes, limit: device.max_binding_bytes });
        }
        Ok(rows)
    }
}
