//! A stack of encoder layers: attention and feed-forward, with norms before or after.

mod backward;
pub(crate) mod reference;

pub use backward::{EncoderBackward, EncoderLayerGradients};

use super::multi_head::MultiHeadWeights;
use super::stack::config::TransformerLayerConfig;
use super::stack::{FeedForwardWeights, LayerCall, LayerWeights, Stack, StackForward};
use crate::cache::Cache;
use crate::kernel::{KernelOptions, Pipelines, Prepared, Recorder, Scratch, ScratchSize};
use crate::mask::DeviceMask;
use crate::position::{Rotary, Rotation, RowPositions};
use crate::rows::norm::NormWeights;
use crate::tensor::{Error, TensorView};

/// The weights of one layer of an encoder, on the device.
#[derive(Clone, Copy, Debug)]
pub struct EncoderLayerWeights<'a> {
    /// Of its self-attention.
    pub attention: MultiHeadWeights<'a>,
    /// Of its feed-forward layer.
    pub feed_forward: FeedForwardWeights<'a>,
    /// Of the norms of its attention and of its feed-forward layer: `norm1` and `norm2` of PyTorch.
    pub norms: [NormWeights<'a>; 2],
}

impl<'a> From<&'a EncoderLayerWeights<'a>> for LayerWeights<'a> {
    fn from(layer: &'a EncoderLayerWeights<'a>) -> Self {
        let EncoderLayerWeights { attention, feed_forward, norms } = layer;
        LayerWeights { attention, cross: None, feed_forward, norms }
    }
}

/// One forward call of an encoder: `[batch, 1, length, features]` in and out, see
/// [`TensorView::sequence`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct EncoderForward<'a> {
    call: StackForward<'a>,
}

impl<'a> EncoderForward<'a> {
    /// `x` and `out` are `[batch, 1, length, features]`, of the layers' dtype.
    pub fn new(x: TensorView<'a>, out: TensorView<'a>) -> Self {
        EncoderForward { call: StackForward::new(x, out, None) }
    }

    /// Which rows a row attends to, in every layer: `mask` and `src_key_padding_mask` of PyTorch,
    /// packed sequences, and all else that
    /// [`Mask`](crate::Mask) says.
    #[doc(alias = "src_mask")]
    #[doc(alias = "src_key_padding_mask")]
    #[doc(alias = "is_causal")]
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.call.layers.mask = Some(mask);
        self
    }

    /// Rows are the tokens of the cache's last [`advance`](Cache::advance), as many of each
    /// sequence as the most that one advanced by: their keys and values are appended to it, in
    /// layer n of the cache by layer n of the stack, and they attend to all that it has. With a
    /// causal mask, as the stacks of GPT-2 and Llama have it, rows given in steps of any lengths
    /// come out as they do all at once.
    ///
    /// Several rows need a mask that orders them. Without one each row would see the later rows of
    /// its own call, and none of a later call, so that the result would depend on the steps:
    /// [`forward`](TransformerEncoder::forward) returns
    /// [`Error::Unsupported`]. The causal rule, a window, a pattern, a tree, a bias and functions of your own are orders, and so are a
    /// boolean mask and lengths that differ from row to row. Where all rows of a call are to see each other, as in the prompt of a
    /// prefix-LM or in block diffusion, give `Mask::none().window(usize::MAX, usize::MAX)`.
    ///
    /// A call borrows the cache, which the next [`advance`](Cache::advance) changes: make the call
    /// again for each step. Calls with the same tensors create nothing on the device.
    ///
    /// # Prompts of different lengths
    ///
    /// Without padding on the left, rows begin at row 0 and
    /// [`Tokens::Each`](crate::cache::Tokens::Each) gives the length of each prompt: the cache
    /// keeps nothing of the rows past it. The causal mask is enough, and rows stand at
    /// [`starts`](Cache::starts). The last row of a prompt is at another index in each sequence.
    ///
    /// Left-padded prompts end at the same row. [`Tokens::All`](crate::cache::Tokens::All) appends
    /// the padding too, so the mask of every step hides it:
    /// `Mask::causal().key_padding_mask(seen)`, where `seen` is `[batch, 1, 1, capacity]` and false
    /// for the padding of each sequence. Positions count from the first token: position `i −
    /// padding` for row `i` of the sequence, as a tensor `[batch, 1, length, 1]`
    /// ([`RowPositions::Tensor`]) for [`rotary`](Self::rotary), or as ids of a learned table.
    /// Distances, as for ALiBi and windows, need no change. Rows of padding see no key; ignore
    /// their output. `examples/gpt.rs` is such a model.
    #[doc(alias = "past_key_values")]
    #[doc(alias = "use_cache")]
    pub fn cache(mut self, cache: impl Into<Option<&'a Cache>>) -> Self {
        self.call.cache = cache.into();
        self
    }

    /// Rotates queries and keys by their positions in every layer, as Llama and its kin do: see
    /// [`MultiHeadForward::rotary`](super::MultiHeadForward::rotary). With a cache the rows stand
    /// at [`RowPositions::Tensor`]`(`[`cache.starts()`](Cache::starts)`)`, or wherever another
    /// tensor says, and it keeps rotated keys.
    #[doc(alias = "rope")]
    #[doc(alias = "position_ids")]
    pub fn rotary(mut self, rotation: impl Into<Rotation<'a>>, at: RowPositions<TensorView<'a>>) -> Self {
        self.call.layers.rotary = Some(Rotary { rotation: rotation.into(), at });
        self
    }

    /// The mask and the rotation of each layer, one entry for each, in place of
    /// [`mask`](Self::mask) and [`rotary`](Self::rotary). Use it for models whose layers differ,
    /// such as Gemma, gpt-oss and ModernBERT: a sliding window and all tokens in turn, another
    /// rotary base in each kind, sinks by layer.
    ///
    /// All layers share one cache and one scratch. With a cache each mask must order the rows. The
    /// cache keeps the tokens of all layers, those outside of a window too. An error of one entry
    /// is [`Error::Layer`], which has its index. The scale and the softcap of a layer are part of
    /// the stack: [`TransformerEncoder::with_configs`].
    ///
    /// ```
    /// use wgpu_attention::{Mask, TensorView};
    /// use wgpu_attention::layers::{EncoderForward, LayerCall};
    /// use wgpu_attention::mask::DeviceMask;
    /// use wgpu_attention::position::{Rope, RowPositions};
    ///
    /// /// Every sixth layer of Gemma 3 sees all earlier tokens, the others the last 512.
    /// fn calls<'a>(layers: usize, [near, far]: [&'a Rope; 2], starts: TensorView<'a>) -> Vec<LayerCall<'a>> {
    ///     let at = RowPositions::Tensor(starts);
    ///     let local = LayerCall::new(Mask::causal().window(511, 0)).rotary(near, at);
    ///     let global = LayerCall::new(Mask::causal()).rotary(far, at);
    ///     (1..=layers).map(|n| if n % 6 == 0 { global } else { local }).collect()
    /// }
    /// ```
    pub fn layer_calls(mut self, calls: impl Into<Option<&'a [LayerCall<'a>]>>) -> Self {
        self.call.layers.each = calls.into();
        self
    }

    /// Writes what the layers give there, one after the other, before the final norm: `[layers ·
    /// batch, 1, length, features]`, layer n from batch entry `n · batch` on. Without a final norm
    /// the last layer's is `out` and has no place here, so it is `layers − 1` of them. A [backward
    /// call](EncoderBackward) that finds them does not compute them again.
    pub fn hidden(mut self, hidden: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call.hidden = hidden.into();
        self
    }

    /// Writes every layer's attention weights there, one after the other: `[layers · batch, heads
    /// or 1, length, length + appended]`, F32, F16 or BF16, layer n from batch entry `n · batch`
    /// on; of every head, or their mean if the tensor has one. A score matrix for each layer, which
    /// attention does not make otherwise.
    pub fn weights(mut self, weights: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call.weights = weights.into();
        self
    }
}

/// A stack of encoder layers on one device: everything `nn.TransformerEncoder` has in evaluation,
/// and its gradients ([`backward`](Self::backward)). Vaswani et al. 2017, section 3.1; with norms
/// before each part, Xiong et al. 2020, "On layer normalization in the transformer architecture".
///
/// All stages of all layers are recorded in one pass, with one scratch whose size does not grow
/// with the number of layers. It keeps its weights' buffers alive, and reads them where they are.
/// With a causal mask it is a decoder without a memory, as GPT-2 and Llama are, and generates by a
/// [`Cache`].
///
/// ```no_run
/// # use wgpu_attention::{Error, TensorView, wgpu};
/// # use wgpu_attention::layers::{FeedForwardWeights, MultiHeadWeights};
/// # use wgpu_attention::rows::NormWeights;
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, attention: MultiHeadWeights,
/// #      feed_forward: FeedForwardWeights, norms: [NormWeights; 2], x: TensorView, y: TensorView) -> Result<(), Error> {
/// use wgpu_attention::Scratch;
/// use wgpu_attention::layers::{TransformerLayerConfig, MultiHeadConfig};
/// use wgpu_attention::matmul::Activation;
/// use wgpu_attention::rows::NormConfig;
/// use wgpu_attention::TransformerEncoder;
/// use wgpu_attention::layers::{EncoderForward, EncoderLayerWeights};
///
/// // A layer as BERT has them.
/// let config = TransformerLayerConfig::new(MultiHeadConfig::new(768, 12), 3072)
///     .activation(Activation::Gelu)
///     .norm(NormConfig::layer().eps(1e-12));
/// let layers = [EncoderLayerWeights { attention, feed_forward, norms }];
/// let stack = TransformerEncoder::new(device, config, &layers, None)?;
/// let call = EncoderForward::new(x, y);
/// let mut scratch = Scratch::new(device, stack.scratch_size(&call)?)?;
/// stack.forward(encoder, &call, &mut scratch)
/// # }
/// ```
#[doc(alias = "TransformerEncoderLayer")]
#[doc(alias = "BERT")]
#[derive(Clone, Debug)]
pub struct TransformerEncoder {
    stack: Stack,
}

impl TransformerEncoder {
    /// A stack with pipelines of its own. `final_norm` is what stands after the last layer, as
    /// stacks with norms before each part have it.
    ///
    /// # Errors
    /// No layers, weights that do not have the shapes of `config`, and everything [`Error`] lists for tensors.
    pub fn new(
        device: &wgpu::Device,
        config: TransformerLayerConfig,
        layers: &[EncoderLayerWeights],
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
        layers: &[EncoderLayerWeights],
        final_norm: Option<NormWeights>,
    ) -> Result<Self, Error> {
        Self::with_configs(pipelines, &config.repeated("encoder", layers.len())?, layers, final_norm)
    }

    /// A stack whose layers differ: `configs` has the configuration of each layer. They may differ
    /// in
    /// [`MultiHeadConfig::scale`](crate::layers::MultiHeadConfig::scale), in [`MultiHeadConfig::softcap`](crate::layers::MultiHeadConfig::softcap), and in whose keys
    /// they read, [`TransformerLayerConfig::keys_of`].
    /// Masks and rotations by layer are part of a call: [`EncoderForward::layer_calls`].
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::Length`] of `configs`; [`Error::Unsupported`] if they differ in other options.
    pub fn with_configs(
        pipelines: &Pipelines,
        configs: &[TransformerLayerConfig],
        layers: &[EncoderLayerWeights],
        final_norm: Option<NormWeights>,
    ) -> Result<Self, Error> {
        Ok(TransformerEncoder { stack: Stack::new(pipelines, configs, layers, final_norm)? })
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
    /// ([`MultiHeadAttention::scratch_size`](super::MultiHeadAttention::scratch_size)), four
    /// tensors as `x`, and one or, gated, three of `hidden_features`; without a cache the keys and
    /// values of each layer whose keys others read, too. With a cache it may be asked for before
    /// the first advance.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &EncoderForward) -> Result<ScratchSize, Error> {
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
        call: &EncoderForward,
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
    pub fn prepare(&self, call: &EncoderForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        self.stack.prepare("transformer encoder", &call.call, scratch)
    }
}
