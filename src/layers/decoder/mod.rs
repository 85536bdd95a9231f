//! A stack of decoder layers. A layer has self-attention, attention to a memory and a feed-forward
//! part, with norms before or after.

mod backward;
pub(crate) mod reference;

pub use backward::{DecoderBackward, DecoderLayerGradients};

use super::multi_head::MultiHeadWeights;
use super::stack::config::TransformerLayerConfig;
use super::stack::{
    DecoderMemory, FeedForwardWeights, LayerCall, LayerWeights, MemoryCall, Stack, StackForward,
};
use crate::cache::Cache;
use crate::kernel::{KernelOptions, Pipelines, Prepared, Recorder, Scratch, ScratchSize};
use crate::mask::DeviceMask;
use crate::position::{Rotary, Rotation, RowPositions};
use crate::rows::norm::NormWeights;
use crate::tensor::{Error, TensorView};

/// The weights of one layer of a decoder, on the device.
#[derive(Clone, Copy, Debug)]
pub struct DecoderLayerWeights<'a> {
    /// The weights of its self-attention: `self_attn` of PyTorch.
    pub self_attention: MultiHeadWeights<'a>,
    /// The weights of its attention to the memory: `multihead_attn` of PyTorch.
    pub cross_attention: MultiHeadWeights<'a>,
    /// The weights of its feed-forward layer.
    pub feed_forward: FeedForwardWeights<'a>,
    /// The weights of the norms of self-attention, of cross-attention and of the feed-forward
    /// layer: `norm1`, `norm2`, `norm3` of PyTorch.
    pub norms: [NormWeights<'a>; 3],
}

impl<'a> From<&'a DecoderLayerWeights<'a>> for LayerWeights<'a> {
    fn from(layer: &'a DecoderLayerWeights<'a>) -> Self {
        let DecoderLayerWeights { self_attention: attention, cross_attention, feed_forward, norms } = layer;
        LayerWeights { attention, cross: Some(cross_attention), feed_forward, norms }
    }
}

/// One forward call of a decoder. Input and output are `[batch, 1, length, features]`, see
/// [`TensorView::sequence`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct DecoderForward<'a> {
    call: StackForward<'a>,
}

impl<'a> DecoderForward<'a> {
    /// `x` and `out` are `[batch, 1, length, features]`, in the layers' dtype. `memory` is the
    /// output of [`TransformerDecoder::project_memory`].
    pub fn new(x: TensorView<'a>, memory: DecoderMemory<'a>, out: TensorView<'a>) -> Self {
        let memory = MemoryCall { projected: memory, mask: DeviceMask::none(), rows: None };
        DecoderForward { call: StackForward::new(x, out, Some(memory)) }
    }

    /// Sets the mask of self-attention, for every layer: `tgt_mask` and `tgt_key_padding_mask` of
    /// PyTorch. By default every row sees every row: set [`Mask::causal`](crate::Mask::causal) for
    /// a causal decoder.
    #[doc(alias = "tgt_mask")]
    #[doc(alias = "tgt_key_padding_mask")]
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.call.layers.mask = Some(mask);
        self
    }

    /// Sets the mask of attention to the memory, for every layer: `memory_mask` and
    /// `memory_key_padding_mask` of PyTorch.
    #[doc(alias = "memory_key_padding_mask")]
    pub fn memory_mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.call.memory = self.call.memory.map(|memory| MemoryCall { mask, ..memory });
        self
    }

    /// Appends the keys and values of `x` to a cache, and attends to all tokens in it.
    ///
    /// The rows of `x` are the tokens of the cache's last [`advance`](Cache::advance). Each
    /// sequence has as many rows as the longest advance of a sequence. Layer n of the stack appends
    /// to layer n of the cache. With a causal mask, steps of any lengths give the same output as
    /// one call for all rows.
    ///
    /// Several rows need a mask that orders them. Make the call again for each step. Prompts may
    /// differ in length: see [`EncoderForward::cache`](crate::layers::EncoderForward::cache).
    pub fn cache(mut self, cache: impl Into<Option<&'a Cache>>) -> Self {
        self.call.cache = cache.into();
        self
    }

    /// Rotates queries and keys of self-attention by their positions in every layer: see
    /// [`MultiHeadForward::rotary`](super::MultiHeadForward::rotary). With a cache, positions come
    /// from a tensor, usually [`RowPositions::Tensor`]`(`[`cache.starts()`](Cache::starts)`)`. The
    /// cache stores rotated keys.
    #[doc(alias = "rope")]
    #[doc(alias = "position_ids")]
    pub fn rotary(mut self, rotation: impl Into<Rotation<'a>>, at: RowPositions<TensorView<'a>>) -> Self {
        self.call.layers.rotary = Some(Rotary { rotation: rotation.into(), at });
        self
    }

    /// Sets the mask and the rotation of each layer's self-attention, in place of
    /// [`mask`](Self::mask) and [`rotary`](Self::rotary). There is one entry per layer: see
    /// [`EncoderForward::layer_calls`](crate::layers::EncoderForward::layer_calls). The memory's
    /// mask holds in every layer.
    pub fn layer_calls(mut self, calls: impl Into<Option<&'a [LayerCall<'a>]>>) -> Self {
        self.call.layers.each = calls.into();
        self
    }

    /// Writes the outputs of the layers before the final norm to `hidden`: `[layers · batch, 1,
    /// length, features]`. Layer n begins at batch entry `n · batch`. Without a final norm the last
    /// layer's output is `out`, so `hidden` has `layers − 1` entries. A [backward
    /// call](DecoderBackward) that has `hidden` does not compute these outputs again.
    pub fn hidden(mut self, hidden: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call.hidden = hidden.into();
        self
    }
}

/// A stack of decoder layers on one device. It covers all of `nn.TransformerDecoder` in evaluation
/// mode, its gradients ([`backward`](Self::backward)), and a cache for generation. Sources: Vaswani
/// et al. 2017, section 3.1. For norms before each part: Xiong et al. 2020.
///
/// Models without a memory use [`TransformerEncoder`](crate::TransformerEncoder) with a causal mask
/// and a cache. One pass records all stages of all layers. The size of the scratch does not grow
/// with the number of layers. The keys and values of the memory are projected once, and every step
/// reads them. The stack keeps its weights' buffers alive, and reads the weights without a copy.
///
/// ```no_run
/// # use wgpu_attention::{Error, TensorView, wgpu};
/// # use wgpu_attention::layers::{TransformerLayerConfig, DecoderLayerWeights, DecoderMemory};
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, config: TransformerLayerConfig, layers: &[DecoderLayerWeights],
/// #      encoded: TensorView, memory: DecoderMemory, x: TensorView, y: TensorView) -> Result<(), Error> {
/// use wgpu_attention::{Cache, CacheConfig, Mask, Scratch, TransformerDecoder};
/// use wgpu_attention::cache::Tokens;
/// use wgpu_attention::layers::DecoderForward;
///
/// let decoder = TransformerDecoder::new(device, config, layers, None)?;
/// let cached = CacheConfig::new(8, 64, 512).layers(layers.len());
/// let mut cache = Cache::with_pipelines(decoder.pipelines(), cached)?;
/// let call = DecoderForward::new(x, memory, y).cache(&cache).mask(Mask::causal());
/// let mut scratch = Scratch::new(device, decoder.scratch_size(&call)?)?;
/// // Once for each sentence, then for each token x.
/// decoder.project_memory(encoder, encoded, &memory, &mut scratch)?;
/// cache.advance(encoder, Tokens::All(1))?;
/// let call = DecoderForward::new(x, memory, y).cache(&cache).mask(Mask::causal());
/// decoder.forward(encoder, &call, &mut scratch)
/// # }
/// ```
#[doc(alias = "TransformerDecoderLayer")]
#[derive(Clone, Debug)]
pub struct TransformerDecoder {
    stack: Stack,
}

impl TransformerDecoder {
    /// Makes a stack with its own pipelines. `final_norm` is the norm after the last layer, which
    /// stacks with norms before each part have.
    ///
    /// # Errors
    /// - No layers, or weights that do not have the shapes of `config`.
    /// - `bias_kv` in some layers only.
    /// - Everything that [`Error`] lists for tensors.
    pub fn new(
        device: &wgpu::Device,
        config: TransformerLayerConfig,
        layers: &[DecoderLayerWeights],
        final_norm: Option<NormWeights>,
    ) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config, layers, final_norm)
    }

    /// Makes a stack that shares pipelines with other operators on the device.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(
        pipelines: &Pipelines,
        config: TransformerLayerConfig,
        layers: &[DecoderLayerWeights],
        final_norm: Option<NormWeights>,
    ) -> Result<Self, Error> {
        Self::with_configs(pipelines, &config.repeated("decoder", layers.len())?, layers, final_norm)
    }

    /// Makes a stack whose layers differ: `configs` has the configuration of each layer.
    /// Configurations may differ in three options:
    ///
    /// - [`MultiHeadConfig::scale`](crate::layers::MultiHeadConfig::scale),
    /// - [`MultiHeadConfig::softcap`](crate::layers::MultiHeadConfig::softcap),
    /// - [`TransformerLayerConfig::keys_of`], the layer whose keys its self-attention reads.
    ///
    /// Masks and rotations by layer are part of a call: [`DecoderForward::layer_calls`].
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), [`Error::Length`] of `configs`, and [`Error::Unsupported`]
    /// if configurations differ in other options.
    pub fn with_configs(
        pipelines: &Pipelines,
        configs: &[TransformerLayerConfig],
        layers: &[DecoderLayerWeights],
        final_norm: Option<NormWeights>,
    ) -> Result<Self, Error> {
        Ok(TransformerDecoder { stack: Stack::new(pipelines, configs, layers, final_norm)? })
    }

    /// Sets the options that select kernels. They may change the rounding of the result; see
    /// [`KernelOptions`].
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.stack = self.stack.kernel_options(kernel_options);
        self
    }

    /// Returns the pipelines, to share them.
    pub fn pipelines(&self) -> &Pipelines {
        &self.stack.pipelines
    }

    /// Returns the size of the temporary memory that `call` needs. It holds:
    ///
    /// - the memory of one layer's attention
    ///   ([`MultiHeadAttention::scratch_size`](super::MultiHeadAttention::scratch_size)),
    /// - five tensors of the size of `x`,
    /// - one tensor of `hidden_features`, or three if the layer is gated,
    /// - without a cache, the keys and values of each layer that other layers read.
    ///
    /// With a cache you can call this before the first advance.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &DecoderForward) -> Result<ScratchSize, Error> {
        self.stack.scratch_size(&call.call)
    }

    /// Records `call` into an encoder or a pass. It submits and copies nothing.
    ///
    /// # Errors
    /// - Everything that [`Error`] lists for tensors, masks, options and scratch.
    /// - A cache of other dimensions, with fewer layers or on another device.
    /// - A cache with changes that are not recorded yet, or that was advanced by another number of
    ///   rows.
    ///
    /// On an error the call records nothing.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &DecoderForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        call.call.check_advanced()?;
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its pipelines and binds its tensors. [`Prepared::record`] can then
    /// record it many times.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &DecoderForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        self.stack.prepare("transformer decoder", &call.call, scratch)
    }

    /// Records the projections of `memory`, `[batch, 1, memory_len, features]`, to the keys and
    /// values of all layers, `projected`. `scratch` may have any size: it only stores the bindings.
    ///
    /// # Errors
    /// - Shapes that differ.
    /// - Written tensors that overlap other tensors.
    /// - Everything else that [`Error`] lists for tensors.
    ///
    /// On an error the call records nothing.
    pub fn project_memory(
        &self,
        into: &mut impl Recorder,
        memory: TensorView,
        projected: &DecoderMemory,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_memory(memory, projected, scratch)?.record(into);
        Ok(())
    }

    /// Checks the projections of a memory, compiles their pipelines and binds their tensors.
    /// [`Prepared::record`] can then record them many times.
    ///
    /// # Errors
    /// As [`project_memory`](Self::project_memory).
    pub fn prepare_memory(
        &self,
        memory: TensorView,
        projected: &DecoderMemory,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        self.stack.prepare_memory(memory, projected, scratch)
    }
}
