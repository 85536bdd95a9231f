//! A stack of encoder layers: attention and feed-forward, with norms before or after.

mod backward;
pub(crate) mod reference;

pub use backward::{EncoderBackward, EncoderLayerGradients};

use super::block::config::{NormOrder, TransformerLayerConfig};
use super::block::{
    FeedForward, FeedForwardWeights, Hidden, LayerCall, LayerCalls, Rows, SelfAttention, SharedKeys,
    Workspace, check_advanced, check_cache, check_rows, check_rows_of, forward_size,
};
use super::multi_head::{MultiHeadAttention, MultiHeadForward, MultiHeadWeights};
use crate::attention::dispatch;
use crate::cache::Cache;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, KernelOptions, Pipelines, Prepared, Recorder, Scratch, ScratchSize, Slot};
use crate::mask::DeviceMask;
use crate::position::{Rotary, Rotation, RowPositions};
use crate::rows::norm::{NormWeights, OwnedNorm};
use crate::tensor::{
    Access, Error, TensorView, check_aliasing, check_apart, check_sizes, expect, expect_shape,
};

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

/// One forward call of an encoder: `[batch, 1, length, features]` in and out, see [`TensorView::sequence`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct EncoderForward<'a> {
    pub(crate) x: TensorView<'a>,
    pub(crate) out: TensorView<'a>,
    layers: LayerCalls<'a>,
    pub(crate) hidden: Option<TensorView<'a>>,
    pub(crate) weights: Option<TensorView<'a>>,
    cache: Option<&'a Cache>,
}

impl<'a> EncoderForward<'a> {
    /// `x` and `out` are `[batch, 1, length, features]`, of the layers' dtype.
    pub fn new(x: TensorView<'a>, out: TensorView<'a>) -> Self {
        let layers = LayerCalls::default();
        EncoderForward { x, out, layers, hidden: None, weights: None, cache: None }
    }

    /// Which rows a row attends to, in every layer: `mask` and `src_key_padding_mask` of PyTorch, packed sequences, and all else that
    /// [`Mask`](crate::Mask) says.
    #[doc(alias = "src_mask")]
    #[doc(alias = "src_key_padding_mask")]
    #[doc(alias = "is_causal")]
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.layers.mask = Some(mask);
        self
    }

    /// Rows are the tokens of the cache's last [`advance`](Cache::advance), as many of each sequence as the most that one advanced by:
    /// their keys and values are appended to it, in layer n of the cache by layer n of the stack, and they attend to all that it
    /// has. With a causal mask, as the stacks of GPT-2 and Llama have it, rows given in steps of any lengths come out as they do all at
    /// once.
    ///
    /// Several rows need a mask that orders them. Without one each row would see the later rows of its own call, and none of a
    /// later call, so that the result would depend on the steps: [`forward`](TransformerEncoder::forward) returns
    /// [`Error::Unsupported`]. The causal rule, a window, a pattern, a tree, a bias and functions of your own are orders, and so are a
    /// boolean mask and lengths that differ from row to row. Where all rows of a call are to see each other, as in the prompt of a
    /// prefix-LM or in block diffusion, give `Mask::none().window(usize::MAX, usize::MAX)`.
    ///
    /// A call borrows the cache, which the next [`advance`](Cache::advance) changes: make the call again for each step. Calls with the
    /// same tensors create nothing on the device.
    ///
    /// # Prompts of different lengths
    ///
    /// Without padding on the left, rows begin at row 0 and [`Tokens::Each`](crate::cache::Tokens::Each) gives the length of each prompt: the
    /// cache keeps nothing of the rows past it. The causal mask is enough, and rows stand at [`starts`](Cache::starts). The last row of
    /// a prompt is at another index in each sequence.
    ///
    /// Left-padded prompts end at the same row. [`Tokens::All`](crate::cache::Tokens::All) appends the padding too, so the mask of every step
    /// hides it: `Mask::causal().key_padding_mask(seen)`, where `seen` is `[batch, 1, 1, capacity]` and false for the padding of each
    /// sequence. Positions count from the first token: position `i − padding` for row `i` of the sequence, as a tensor `[batch, 1, length, 1]`
    /// ([`RowPositions::Tensor`]) for [`rotary`](Self::rotary), or as ids of a learned table. Distances, as for ALiBi and windows, need no
    /// change. Rows of padding see no key; ignore their output. `examples/gpt.rs` is such a model.
    #[doc(alias = "past_key_values")]
    #[doc(alias = "use_cache")]
    pub fn cache(mut self, cache: impl Into<Option<&'a Cache>>) -> Self {
        self.cache = cache.into();
        self
    }

    /// Rotates queries and keys by their positions in every layer, as Llama and its kin do: see [`MultiHeadForward::rotary`]. With a cache the
    /// rows stand at [`RowPositions::Tensor`]`(`[`cache.starts()`](Cache::starts)`)`, or wherever another tensor says, and it keeps rotated
    /// keys.
    #[doc(alias = "rope")]
    #[doc(alias = "position_ids")]
    pub fn rotary(mut self, rotation: impl Into<Rotation<'a>>, at: RowPositions<TensorView<'a>>) -> Self {
        self.layers.rotary = Some(Rotary { rotation: rotation.into(), at });
        self
    }

    /// The mask and the rotation of each layer, one entry for each, in place of [`mask`](Self::mask) and [`rotary`](Self::rotary). Use
    /// it for models whose layers differ, such as Gemma, gpt-oss and ModernBERT: a sliding window and all tokens in turn, another rotary
    /// base in each kind, sinks by layer.
    ///
    /// All layers share one cache and one scratch. With a cache each mask must order the rows. The cache keeps the tokens of all layers,
    /// those outside of a window too. An error of one entry is [`Error::Layer`], which has its index. The scale and the softcap of a
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
        self.layers.each = calls.into();
        self
    }

    /// Writes what the layers give there, one after the other, before the final norm: `[layers · batch, 1, length, features]`, layer
    /// n from batch entry `n · batch` on. Without a final norm the last layer's is `out` and has no place here, so it is `layers − 1`
    /// of them. A [backward call](EncoderBackward) that finds them does not compute them again.
    pub fn hidden(mut self, hidden: impl Into<Option<TensorView<'a>>>) -> Self {
        self.hidden = hidden.into();
        self
    }

    /// Writes every layer's attention weights there, one after the other: `[layers · batch, heads or 1, length, length + appended]`, F32,
    /// F16 or BF16, layer n from batch entry `n · batch` on; of every head, or their mean if the tensor has one. A score matrix for each layer,
    /// which attention does not make otherwise.
    pub fn weights(mut self, weights: impl Into<Option<TensorView<'a>>>) -> Self {
        self.weights = weights.into();
        self
    }

    /// The attention of `x` to itself in layer `n`, into `out`.
    fn attention(&self, n: usize, x: TensorView<'a>, out: TensorView<'a>) -> MultiHeadForward<'a> {
        self.layers.attention(n, x, out)
    }

    /// The place for the weights of layer `n`.
    fn weights_of(&self, n: usize, batch: usize) -> Option<TensorView<'a>> {
        self.weights.map(|weights| weights.slice(0, n.saturating_mul(batch), batch))
    }
}

#[derive(Clone, Debug)]
struct EncoderLayer {
    attention: MultiHeadAttention,
    feed_forward: FeedForward,
    norms: [OwnedNorm; 2],
}

/// A stack of encoder layers on one device: everything `nn.TransformerEncoder` has in evaluation, and its gradients
/// ([`backward`](Self::backward)). Vaswani et al. 2017, section 3.1; with norms before each part, Xiong et al. 2020, "On layer
/// normalization in the transformer architecture".
///
/// All stages of all layers are recorded in one pass, with one scratch whose size does not grow with the number of layers.
/// It keeps its weights' buffers alive, and reads them where they are. With a causal mask it is a decoder without a
/// memory, as GPT-2 and Llama are, and generates by a [`Cache`].
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
    pipelines: Pipelines,
    config: TransformerLayerConfig,
    kernel_options: KernelOptions,
    layers: Vec<EncoderLayer>,
    shared: SharedKeys,
    final_norm: Option<OwnedNorm>,
}

/// A checked call.
struct Plan<'a> {
    rows: Rows,
    attention: SelfAttention<'a>,
    size: ScratchSize,
}

impl TransformerEncoder {
    /// A stack with pipelines of its own. `final_norm` is what stands after the last layer, as stacks with norms before each part have it.
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
        config.check()?;
        check_sizes("encoder", &[("layers", layers.len())])?;
        Self::with_configs(pipelines, &vec![config; layers.len()], layers, final_norm)
    }

    /// A stack whose layers differ: `configs` has the configuration of each layer. They may differ in
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
        let device = &pipelines.facts();
        let config = TransformerLayerConfig::of_layers(configs, layers.len())?;
        let shared = SharedKeys::new(configs, |n| &layers[n].attention)?;
        let norm = |weights: &NormWeights| {
            OwnedNorm::new(["norm.weight", "norm.bias"], weights, config.features(), device)
        };
        let layer = |(weights, own): (&EncoderLayerWeights, &TransformerLayerConfig)| {
            Ok(EncoderLayer {
                attention: MultiHeadAttention::with_pipelines(pipelines, own.attention, &weights.attention)?,
                feed_forward: FeedForward::new(&weights.feed_forward, &config, device)?,
                norms: [norm(&weights.norms[0])?, norm(&weights.norms[1])?],
            })
        };
        let layers: Vec<EncoderLayer> =
            layers.iter().zip(configs).map(layer).collect::<Result<_, Error>>()?;
        let appended = layers[0].attention.appended_keys();
        if layers.iter().any(|layer| layer.attention.appended_keys() != appended) {
            let why = "all layers of a stack append as many keys, or none";
            return Err(Error::Unsupported { what: "`bias_kv` in some layers", why });
        }
        Ok(TransformerEncoder {
            pipelines: pipelines.clone(),
            config,
            kernel_options: KernelOptions::default(),
            final_norm: final_norm.as_ref().map(norm).transpose()?,
            layers,
            shared,
        })
    }

    /// How the layers are computed, not what; see [`KernelOptions`].
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self.layers = self
            .layers
            .into_iter()
            .map(|layer| EncoderLayer { attention: layer.attention.kernel_options(kernel_options), ..layer })
            .collect();
        self
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// The temporary memory that `call` needs: that of one layer's attention
    /// ([`MultiHeadAttention::scratch_size`]), four tensors as `x`, and one or, gated, three of `hidden_features`; without a cache the
    /// keys and values of each layer whose keys others read, too. With a cache it may be asked for before the first advance.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &EncoderForward) -> Result<ScratchSize, Error> {
        Ok(self.check(call, &self.pipelines.facts())?.size)
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
        check_advanced(call.cache, &call.x)?;
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as often as you like.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &EncoderForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let Plan { rows, attention, .. } = dispatch::within(device, |device| {
            let plan = self.check(call, device)?;
            scratch.check(plan.size).map(|()| plan)
        })?;
        let scratch: &Scratch = scratch;
        let (config, kernel_options) = (&self.config, &self.kernel_options);
        let work = Workspace { config, rows, scratch, kernel_options, device, accumulates: false };
        let dispatches = self.dispatches(call, &work, &attention)?;
        self.pipelines.bind("transformer encoder", &dispatches, scratch.bindings())
    }

    /// Where what layer `n` gives is, but for the last layer's without a final norm.
    fn given<'a>(
        &self,
        n: usize,
        call: &EncoderForward<'a>,
        work: &Workspace<'a>,
    ) -> Result<TensorView<'a>, Error> {
        match call.hidden {
            Some(hidden) => Ok(work.given(hidden, n)),
            None => work.features(Slot::Stream),
        }
    }

    fn dispatches<'a>(
        &'a self,
        call: &EncoderForward<'a>,
        work: &Workspace<'a>,
        plan: &SelfAttention<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        match self.config.order {
            NormOrder::Post => self.post(call, work, plan),
            NormOrder::Pre => self.pre(call, work, plan),
        }
    }

    /// `x = norm(x + attention(x))`, `x = norm(x + feed_forward(x))`
    fn post<'a>(
        &'a self,
        call: &EncoderForward<'a>,
        work: &Workspace<'a>,
        plan: &SelfAttention<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let [middle, branch] = [work.features(Slot::Middle)?, work.features(Slot::Branch)?];
        let mut dispatches = Dispatches::new();
        let mut x = call.x;
        for (n, layer) in self.layers.iter().enumerate() {
            let last = n + 1 == self.layers.len() && self.final_norm.is_none();
            let to = if last { call.out } else { self.given(n, call, work)? };
            dispatches.extend(self.attend([x, branch], call, n, plan, work)?);
            dispatches.push(work.norm(&layer.norms[0], x, Some(branch), middle, None));
            dispatches.extend(work.feed_forward(&layer.feed_forward, middle, branch, false)?);
            dispatches.push(work.norm(&layer.norms[1], middle, Some(branch), to, None));
            x = to;
        }
        dispatches.extend(self.final_norm.iter().map(|norm| work.norm(norm, x, None, call.out, None)));
        Ok(dispatches)
    }

    /// `x = x + attention(norm(x))`, `x = x + feed_forward(norm(x))`: each sum is made where it is normalised next.
    fn pre<'a>(
        &'a self,
        call: &EncoderForward<'a>,
        work: &Workspace<'a>,
        plan: &SelfAttention<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let [middle, branch] = [work.features(Slot::Middle)?, work.features(Slot::Branch)?];
        let normed = work.features(Slot::Normed)?;
        let mut dispatches = Dispatches::new();
        let mut x = call.x;
        for (n, layer) in self.layers.iter().enumerate() {
            if n == 0 {
                dispatches.push(work.norm(&layer.norms[0], x, None, normed, None));
            } else {
                x = self.given(n - 1, call, work)?;
                dispatches.push(work.norm(&layer.norms[0], middle, Some(branch), normed, Some(x)));
            }
            dispatches.extend(self.attend([normed, branch], call, n, plan, work)?);
            dispatches.push(work.norm(&layer.norms[1], x, Some(branch), normed, Some(middle)));
            dispatches.extend(work.feed_forward(&layer.feed_forward, normed, branch, false)?);
        }
        dispatches.push(match &self.final_norm {
            Some(norm) => {
                let last = call.hidden.map(|_| self.given(self.layers.len() - 1, call, work)).transpose()?;
                work.norm(norm, middle, Some(branch), call.out, last)
            }
            None => work.sum(middle, branch, call.out),
        });
        Ok(dispatches)
    }

    fn check<'a>(&self, call: &EncoderForward<'a>, device: &DeviceFacts) -> Result<Plan<'a>, Error> {
        let mut plan = self.check_inputs(call, device)?;
        self.check_output("out", &call.out, call, Access::Write, device)?;
        let mut written = vec![("out", call.out)];
        if let Some(hidden) = call.hidden {
            self.hidden(&plan.rows).check(&hidden, &self.config, Access::Write, device)?;
            // The next layer reads what one has written, and one dispatch writes both.
            if hidden.buffer == call.out.buffer {
                return Err(Error::Alias { tensor: "out", other: "hidden" });
            }
            written.push(("hidden", hidden));
        }
        if let Some(weights) = call.weights {
            weights.check("weights", Access::Write, device)?;
            written.push(("weights", weights));
        }
        check_aliasing(&written, &self.inputs(call))?;
        check_apart(&written, device)?;
        let mut streams = vec![Slot::Middle, Slot::Branch];
        if self.config.order == NormOrder::Pre {
            streams.push(Slot::Normed);
        }
        if call.hidden.is_none() {
            streams.push(Slot::Stream);
        }
        plan.size = plan.size.max(forward_size(&self.config, &plan.rows, false, &streams));
        Ok(plan)
    }

    /// Checks what is read; the size is that of attention.
    fn check_inputs<'a>(&self, call: &EncoderForward<'a>, device: &DeviceFacts) -> Result<Plan<'a>, Error> {
        check_rows_of("x", &call.x, &self.config.attention, Access::Read, device)?;
        let [batch, _, length, _] = call.x.shape();
        let rows = Rows { batch, length };
        expect_shape("x", call.x.shape(), rows.shape(self.config.features()))?;
        check_rows(&self.config, &rows, device)?;
        if let Some(weights) = &call.weights {
            expect("weights", weights.shape(), 0, self.layers.len().saturating_mul(batch))?;
        }
        call.layers.check(self.layers.len())?;
        let inner = |n| call.attention(n, call.x, call.out).weights(call.weights_of(n, batch));
        let layers: Vec<_> = self.layers.iter().map(|layer| &layer.attention).collect();
        if let Some(cache) = call.cache {
            check_cache(cache, (&layers, &self.shared), &self.config.attention, rows, &call.layers)?;
            if call.weights.is_some() {
                let why = "a cache has no fixed number of keys; give all rows at once, without it";
                return Err(Error::Unsupported { what: "attention weights with a cache", why });
            }
        }
        let of = (&layers[..], &self.shared);
        let attention = SelfAttention::of(of, &call.layers, inner, call.cache, rows, device)?;
        Ok(Plan { rows, size: attention.size(), attention })
    }

    fn check_output(
        &self,
        name: &'static str,
        view: &TensorView,
        call: &EncoderForward,
        access: Access,
        device: &DeviceFacts,
    ) -> Result<(), Error> {
        check_rows_of(name, view, &self.config.attention, access, device)?;
        expect_shape(name, view.shape(), call.x.shape())
    }

    /// What layers give, where a call keeps it.
    fn hidden(&self, rows: &Rows) -> Hidden {
        Hidden::of(self.layers.len(), self.final_norm.as_ref(), &self.config, rows)
    }

    /// All that a call reads.
    fn inputs<'a>(&'a self, call: &EncoderForward<'a>) -> Vec<(&'static str, TensorView<'a>)> {
        let mut read = vec![("x", call.x)];
        read.extend(call.layers.tensors());
        for layer in &self.layers {
            read.extend(layer.attention.weights());
            read.extend(layer.feed_forward.tensors());
            read.extend(layer.norms.iter().flat_map(OwnedNorm::tensors));
        }
        read.extend(self.final_norm.iter().flat_map(OwnedNorm::tensors));
        read
    }

    /// The attention of `x` to itself, into `out`, in layer `n`.
    fn attend<'a>(
        &'a self,
        [x, out]: [TensorView<'a>; 2],
        call: &EncoderForward<'a>,
        n: usize,
        plan: &SelfAttention<'a>,
        work: &Workspace<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let weights = call.weights_of(n, work.rows.batch);
        let call = call.attention(n, x, out).weights(weights);
        plan.dispatches(n, (&self.layers[n].attention, &self.shared), call, work)
    }
}
