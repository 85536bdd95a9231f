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
    /// The weights of its self-attention.
    pub attention: MultiHeadWeights<'a>,
    /// The weights of its feed-forward layer.
    pub feed_forward: FeedForwardWeights<'a>,
    /// The weights of the norms of its attention and of its feed-forward layer: `norm1` and `norm2`
    /// of PyTorch.
    pub norms: [NormWeights<'a>; 2],
}

impl<'a> From<&'a EncoderLayerWeights<'a>> for LayerWeights<'a> {
    fn from(layer: &'a EncoderLayerWeights<'a>) -> Self {
        let EncoderLayerWeights { attention, feed_forward, norms } = layer;
        LayerWeights { attention, cross: None, feed_forward, norms }
    }
}

/// One forward call of an encoder. Input and output are `[batch, 1, length, features]`, see
/// [`TensorView::sequence`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct EncoderForward<'a> {
    call: StackForward<'a>,
}

impl<'a> EncoderForward<'a> {
    /// `x` and `out` are `[batch, 1, length, features]`, in the layers' dtype.
    pub fn new(x: TensorView<'a>, out: TensorView<'a>) -> Self {
        EncoderForward { call: StackForward::new(x, out, None) }
    }

    /// Sets the mask of self-attention, for every layer: which rows a row attends to. It covers
    /// `mask` and `src_key_padding_mask` of PyTorch, packed sequences, and every other rule of a
    /// [`Mask`](crate::Mask).
    #[doc(alias = "src_mask")]
    #[doc(alias = "src_key_padding_mask")]
    #[doc(alias = "is_causal")]
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.call.layers.mask = Some(mask);
        self
    }

    /// Appends the keys and values of `x` to a cache, and attends to all tokens in it.
    ///
    /// The rows of `x` are the tokens of the cache's last [`advance`](Cache::advance). Each
    /// sequence has as many rows as the longest advance of a sequence. Layer n of the stack appends
    /// to layer n of the cache. GPT-2 and Llama have a causal mask: then steps of any lengths give
    /// the same output as one call.
    ///
    /// Several rows need a mask that orders them. Without an order each row would see the later
    /// rows of its call, but no rows of a later call. The result would depend on the steps, so
    /// [`forward`](TransformerEncoder::forward) returns [`Error::Unsupported`]. These masks are
    /// orders: the causal rule, a window, a pattern, a tree, a bias and user functions. Boolean
    /// masks and lengths that differ from row to row are orders too. If all rows of a call shall
    /// see each other, set `Mask::none().window(usize::MAX, usize::MAX)`. Examples are the prompt
    /// of a prefix-LM and block diffusion.
    ///
    /// A call borrows the cache, and the next [`advance`](Cache::advance) changes the cache, so
    /// make the call again for each step. Calls with the same tensors create nothing on the device.
    ///
    /// # Prompts of different lengths
    ///
    /// Without padding on the left, rows begin at row 0, and
    /// [`Tokens::Each`](crate::cache::Tokens::Each) contains the length of each prompt. The cache
    /// stores no rows past that length. The causal mask is enough, and the positions of the rows
    /// begin at [`starts`](Cache::starts). The last row of a prompt has another index in each
    /// sequence.
    ///
    /// Left-padded prompts end at the same row. [`Tokens::All`](crate::cache::Tokens::All) appends
    /// the padding too, so the mask of every step must hide it. Use
    /// `Mask::causal().key_padding_mask(seen)`, where `seen` is `[batch, 1, 1, capacity]` and false
    /// for the padding of each sequence.
    ///
    /// Positions count from the first token: row `i` of a sequence has position `i − padding`. Pass
    /// them to [`rotary`](Self::rotary) as a tensor `[batch, 1, length, 1]`
    /// ([`RowPositions::Tensor`]), or to a learned table as ids. Distances, as for ALiBi and
    /// windows, need no change. Rows of padding see no key: ignore their output. `examples/gpt.rs`
    /// is such a model.
    #[doc(alias = "past_key_values")]
    #[doc(alias = "use_cache")]
    pub fn cache(mut self, cache: impl Into<Option<&'a Cache>>) -> Self {
        self.call.cache = cache.into();
        self
    }

    /// Rotates queries and keys by their positions in every layer, as Llama does: see
    /// [`MultiHeadForward::rotary`](super::MultiHeadForward::rotary). With a cache, positions come
    /// from a tensor, usually [`RowPositions::Tensor`]`(`[`cache.starts()`](Cache::starts)`)`. The
    /// cache stores rotated keys.
    #[doc(alias = "rope")]
    #[doc(alias = "position_ids")]
    pub fn rotary(mut self, rotation: impl Into<Rotation<'a>>, at: RowPositions<TensorView<'a>>) -> Self {
        self.call.layers.rotary = Some(Rotary { rotation: rotation.into(), at });
        self
    }

    /// Sets the mask and the rotation of each layer, one entry per layer, in place of
    /// [`mask`](Self::mask) and [`rotary`](Self::rotary). Use it for models whose layers differ,
    /// such as Gemma, gpt-oss and ModernBERT. Their layers alternate between a sliding window and
    /// all tokens, with another rotary base or other sinks.
    ///
    /// All layers share one cache and one scratch. With a cache each mask must order the rows. The
    /// cache stores the tokens for all layers, also the tokens outside a layer's window. An error
    /// of one entry is [`Error::Layer`], which contains the index. The scale and the softcap of a
    /// layer are part of the stack: [`TransformerEncoder::with_configs`].
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

    /// Writes the outputs of the layers before the final norm to `hidden`: `[layers · batch, 1,
    /// length, features]`. Layer n begins at batch entry `n · batch`. Without a final norm the last
    /// layer's output is `out`, so `hidden` has `layers − 1` entries. A [backward
    /// call](EncoderBackward) that has `hidden` does not compute these outputs again.
    pub fn hidden(mut self, hidden: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call.hidden = hidden.into();
        self
    }

    /// Writes every layer's attention weights to `weights`: `[layers · batch, heads or 1, length,
    /// length + appended]`, F32, F16 or BF16. Layer n begins at batch entry `n · batch`. If the
    /// tensor has one head, it receives the mean over all heads. The score matrix of each layer
    /// costs memory that attention does not need otherwise.
    pub fn weights(mut self, weights: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call.weights = weights.into();
        self
    }
}

/// A stack of encoder layers on one device. It covers all of `nn.TransformerEncoder` in evaluation
/// mode, and its gradients ([`backward`](Self::backward)). Sources: Vaswani et al. 2017, section
/// 3.1. For norms before each part: Xiong et al. 2020, "On layer normalization in the transformer
/// architecture".
///
/// With a causal mask it is a decoder without a memory, as in GPT-2 and Llama. It then generates
/// with a [`Cache`]. One pass records all stages of all layers. The size of the scratch does not
/// grow with the number of layers. The stack keeps its weights' buffers alive, and reads the
/// weights without a copy.
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
#[doc(alias = "GPT-2")]
#[doc(alias = "Llama")]
#[doc(alias = "decoder-only")]
#[doc(alias = "TransformerEncoderLayer")]
#[doc(alias = "BERT")]
#[derive(Clone, Debug)]
pub struct TransformerEncoder {
    stack: Stack,
}

impl TransformerEncoder {
    /// Makes a stack with its own pipelines. `final_norm` is the norm after the last layer, which
    /// stacks with norms before each part have.
    ///
    /// # Errors
    /// No layers, weights that do not have the shapes of `config`, and everything that [`Error`]
    /// lists for tensors.
    pub fn new(
        device: &wgpu::Device,
        config: TransformerLayerConfig,
        layers: &[EncoderLayerWeights],
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
        layers: &[EncoderLayerWeights],
        final_norm: Option<NormWeights>,
    ) -> Result<Self, Error> {
        Self::with_configs(pipelines, &config.repeated("encoder", layers.len())?, layers, final_norm)
    }

    /// Makes a stack whose layers differ: `configs` has the configuration of each layer.
    /// Configurations may differ in three options:
    ///
    /// - [`MultiHeadConfig::scale`](crate::layers::MultiHeadConfig::scale),
    /// - [`MultiHeadConfig::softcap`](crate::layers::MultiHeadConfig::softcap),
    /// - [`TransformerLayerConfig::keys_of`], the layer whose keys it reads.
    ///
    /// Masks and rotations by layer are part of a call: [`EncoderForward::layer_calls`].
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), [`Error::Length`] of `configs`, and [`Error::Unsupported`]
    /// if configurations differ in other options.
    pub fn with_configs(
        pipelines: &Pipelines,
        configs: &[TransformerLayerConfig],
        layers: &[EncoderLayerWeights],
        final_norm: Option<NormWeights>,
    ) -> Result<Self, Error> {
        Ok(TransformerEncoder { stack: Stack::new(pipelines, configs, layers, final_norm)? })
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
    /// - four tensors of the size of `x`,
    /// - one tensor of `hidden_features`, or three if the layer is gated,
    /// - without a cache, the keys and values of each layer that other layers read.
    ///
    /// With a cache you can call this before the first advance.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &EncoderForward) -> Result<ScratchSize, Error> {
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
        call: &EncoderForward,
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
    pub fn prepare(&self, call: &EncoderForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        self.stack.prepare("transformer encoder", &call.call, scratch)
    }
}
