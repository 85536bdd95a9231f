//! A stack of decoder layers: attention to what came before and to a memory, feed-forward, norms
//! before or after.

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
    /// Of its self-attention: `self_attn` of PyTorch.
    pub self_attention: MultiHeadWeights<'a>,
    /// Of its attention to the memory: `multihead_attn` of PyTorch.
    pub cross_attention: MultiHeadWeights<'a>,
    /// Of its feed-forward layer.
    pub feed_forward: FeedForwardWeights<'a>,
    /// Of the norms of self-attention, of cross-attention and of the feed-forward layer: `norm1`,
    /// `norm2`, `norm3` of PyTorch.
    pub norms: [NormWeights<'a>; 3],
}

impl<'a> From<&'a DecoderLayerWeights<'a>> for LayerWeights<'a> {
    fn from(layer: &'a DecoderLayerWeights<'a>) -> Self {
        let DecoderLayerWeights { self_attention: attention, cross_attention, feed_forward, norms } = layer;
        LayerWeights { attention, cross: Some(cross_attention), feed_forward, norms }
    }
}

/// One forward call of a decoder: `[batch, 1, length, features]` in and out, see
/// [`TensorView::sequence`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct DecoderForward<'a> {
    call: StackForward<'a>,
}

impl<'a> DecoderForward<'a> {
    /// `x` and `out` are `[batch, 1, length, features]`, of the layers' dtype; `memory` is what
    /// [`TransformerDecoder::project_memory`] has written.
    pub fn new(x: TensorView<'a>, memory: DecoderMemory<'a>, out: TensorView<'a>) -> Self {
        let memory = MemoryCall { projected: memory, mask: DeviceMask::none(), rows: None };
        DecoderForward { call: StackForward::new(x, out, Some(memory)) }
    }

    /// Which rows a row attends to, in every layer: `tgt_mask` and `tgt_key_padding_mask` of
    /// PyTorch. No row is hidden from another unless this says so: give
    /// [`Mask::causal`](crate::Mask::causal).
    #[doc(alias = "tgt_mask")]
    #[doc(alias = "tgt_key_padding_mask")]
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.call.layers.mask = Some(mask);
        self
    }

    /// Which rows of the memory a row attends to, in every layer: `memory_mask` and
    /// `memory_key_padding_mask` of PyTorch.
    #[doc(alias = "memory_key_padding_mask")]
    pub fn memory_mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.call.memory = self.call.memory.map(|memory| MemoryCall { mask, ..memory });
        self
    }

    /// Rows are the tokens of the cache's last [`advance`](Cache::advance), as many of each
    /// sequence as the most that one advanced by: their keys and values are appended to it, in
    /// layer n of the cache by layer n of the stack, and they attend to all that it has. With a
    /// causal mask, rows given in steps of any lengths come out as they do all at once.
    ///
    /// Several rows need a mask that orders them, the call is made again for each step, and prompts
    /// may differ in length: see
    /// [`EncoderForward::cache`](crate::layers::EncoderForward::cache).
    pub fn cache(mut self, cache: impl Into<Option<&'a Cache>>) -> Self {
        self.call.cache = cache.into();
        self
    }

    /// Rotates queries and keys of self-attention by their positions in every layer: see
    /// [`MultiHeadForward::rotary`](super::MultiHeadForward::rotary). With a cache the rows stand
    /// at [`RowPositions::Tensor`]`(`[`cache.starts()`](Cache::starts)`)`, or wherever another
    /// tensor says, and it keeps rotated keys.
    #[doc(alias = "rope")]
    #[doc(alias = "position_ids")]
    pub fn rotary(mut self, rotation: impl Into<Rotation<'a>>, at: RowPositions<TensorView<'a>>) -> Self {
        self.call.layers.rotary = Some(Rotary { rotation: rotation.into(), at });
        self
    }

    /// The mask and the rotation of self-attention of each layer, one entry for each, in place of
    /// [`mask`](Self::mask) and
    /// [`rotary`](Self::rotary): see [`EncoderForward::layer_calls`](crate::layers::EncoderForward::layer_calls). The memory's mask holds in every
    /// layer.
    pub fn layer_calls(mut self, calls: impl Into<Option<&'a [LayerCall<'a>]>>) -> Self {
        self.call.layers.each = calls.into();
        self
    }

    /// Writes what the layers give there, one after the other, before the final norm: `[layers ·
    /// batch, 1, length, features]`, layer n from batch entry `n · batch` on. Without a final norm
    /// the last layer's is `out` and has no place here, so it is `layers − 1` of them. A [backward
    /// call](DecoderBackward) that finds them does not compute them again.
    pub fn hidden(mut self, hidden: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call.hidden = hidden.into();
        self
    }
}

/// A stack of decoder layers on one device: everything `nn.TransformerDecoder` has in evaluation,
/// its gradients ([`backward`](Self::backward)), and a cache for generation. Vaswani et al. 2017,
/// section 3.1; with norms before each part, Xiong et al. 2020.
///
/// All stages of all layers are recorded in one pass, with one scratch whose size does not grow
/// with the number of layers. The keys and values of the memory are projected once, and read by
/// every step. It keeps its weights' buffers alive, and reads them where they are. What has no
/// memory to attend to is a [`TransformerEncoder`](crate::TransformerEncoder) with a causal mask,
/// and with a cache.
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
    /// A stack with pipelines of its own. `final_norm` is what stands after the last layer, as
    /// stacks with norms before each part have it.
    ///
    /// # Errors
    /// No layers, weights that do not have the shapes of `config`, `bias_kv` in some layers only, and everything [`Error`] lists for
    /// tensors.
    pub fn new(
        device: &wgpu::Device,
        config: TransformerLayerConfig,
        layers: &[DecoderLayerWeights],
        final_norm: Option<NormWeights>,
    ) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config, layers, final_norm)
    }

    /// A stack that shares pipelines with other operators on the device.
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

    /// A stack whose layers differ: `configs` has the configuration of each layer. They may differ
    /// in
    /// [`MultiHeadConfig::scale`](crate::layers::MultiHeadConfig::scale), in [`MultiHeadConfig::softcap`](crate::layers::MultiHeadConfig::softcap), and in whose keys
    /// their self-attention reads, [`TransformerLayerConfig::keys_of`].
    /// Masks and rotations by layer are part of a call: [`DecoderForward::layer_calls`].
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::Length`] of `configs`; [`Error::Unsupported`] if they differ in other options.
    pub fn with_configs(
        pipelines: &Pipelines,
        configs: &[TransformerLayerConfig],
        layers: &[DecoderLayerWeights],
        final_norm: Option<NormWeights>,
    ) -> Result<Self, Error> {
        Ok(TransformerDecoder { stack: Stack::new(pipelines, configs, layers, final_norm)? })
    }

    /// How the layers are computed, not what; see [`KernelOptions`].
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.stack = self.stack.kernel_options(kernel_options);
        self
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.stack.pipelines
    }

    /// The temporary memory that `call` needs: that of one layer's attention
    /// ([`MultiHeadAttention::scratch_size`](super::MultiHeadAttention::scratch_size)), five
    /// tensors as `x`, and one or, gated, three of `hidden_features`; without a cache the keys and
    /// values of each layer whose keys others read, too. With a cache it may be asked for before
    /// the first advance.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &DecoderForward) -> Result<ScratchSize, Error> {
        self.stack.scratch_size(&call.call)
    }

    /// Records `call` into an encoder or a pass. Nothing is submitted or copied.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors, masks, options and scratch; a cache of other dimensions, fewer layers or another
    /// device, with changes that are not recorded yet, or that was not advanced by as many rows. Then nothing has been recorded.
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

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &DecoderForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        self.stack.prepare("transformer decoder", &call.call, scratch)
    }

    /// Records the keys and values that all layers have of `memory`, `[batch, 1, memory_len,
    /// features]`, into `projected`. `scratch` keeps what it binds; it may be of any size.
    ///
    /// # Errors
    /// Shapes that differ, tensors that are written and share a buffer with others, and everything else that [`Error`] lists for
    /// tensors; then nothing has been recorded.
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

    /// Checks the projections of a memory, compiles and binds what they need. [`Prepared::record`]
    /// then records them as often as you like.
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
