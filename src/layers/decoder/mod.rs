//! A stack of decoder layers: attention to what came before and to a memory, feed-forward, norms before or after.

mod backward;
mod memory;
pub(crate) mod reference;

pub use backward::{DecoderBackward, DecoderLayerGradients};
pub use memory::DecoderMemory;

use super::block::config::{NormOrder, TransformerLayerConfig};
use super::block::{
    FeedForward, FeedForwardWeights, Hidden, LayerCall, LayerCalls, Rows, SelfAttention, SharedKeys,
    Workspace, check_advanced, check_cache, check_rows, check_rows_of, forward_size,
};
use super::multi_head::{MultiHeadAttention, MultiHeadForward, MultiHeadWeights, Plan as AttentionPlan};
use crate::attention::dispatch;
use crate::cache::Cache;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, KernelOptions, Pipelines, Prepared, Recorder, Scratch, ScratchSize, Slot};
use crate::mask::DeviceMask;
use crate::position::{Rotary, Rotation, RowPositions};
use crate::rows::norm::{NormWeights, OwnedNorm};
use crate::tensor::{Access, Error, TensorView, check_aliasing, check_apart, check_sizes, expect_shape};

/// The weights of one layer of a decoder, on the device.
#[derive(Clone, Copy, Debug)]
pub struct DecoderLayerWeights<'a> {
    /// Of its self-attention: `self_attn` of PyTorch.
    pub self_attention: MultiHeadWeights<'a>,
    /// Of its attention to the memory: `multihead_attn` of PyTorch.
    pub cross_attention: MultiHeadWeights<'a>,
    /// Of its feed-forward layer.
    pub feed_forward: FeedForwardWeights<'a>,
    /// Of the norms of self-attention, of cross-attention and of the feed-forward layer: `norm1`, `norm2`, `norm3` of PyTorch.
    pub norms: [NormWeights<'a>; 3],
}

/// One forward call of a decoder: `[batch, 1, length, features]` in and out, see [`TensorView::sequence`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct DecoderForward<'a> {
    x: TensorView<'a>,
    memory: DecoderMemory<'a>,
    out: TensorView<'a>,
    layers: LayerCalls<'a>,
    memory_mask: DeviceMask<'a>,
    cache: Option<&'a Cache>,
    hidden: Option<TensorView<'a>>,
}

impl<'a> DecoderForward<'a> {
    /// `x` and `out` are `[batch, 1, length, features]`, of the layers' dtype; `memory` is what
    /// [`TransformerDecoder::project_memory`] has written.
    pub fn new(x: TensorView<'a>, memory: DecoderMemory<'a>, out: TensorView<'a>) -> Self {
        let (layers, memory_mask) = (LayerCalls::default(), DeviceMask::none());
        DecoderForward { x, memory, out, layers, memory_mask, cache: None, hidden: None }
    }

    /// Which rows a row attends to, in every layer: `tgt_mask` and `tgt_key_padding_mask` of PyTorch. No row is hidden from another
    /// unless this says so: give [`Mask::causal`](crate::Mask::causal).
    #[doc(alias = "tgt_mask")]
    #[doc(alias = "tgt_key_padding_mask")]
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.layers.mask = Some(mask);
        self
    }

    /// Which rows of the memory a row attends to, in every layer: `memory_mask` and `memory_key_padding_mask` of PyTorch.
    #[doc(alias = "memory_key_padding_mask")]
    pub fn memory_mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.memory_mask = mask;
        self
    }

    /// Rows are the tokens of the cache's last [`advance`](Cache::advance), as many of each sequence as the most that one advanced by:
    /// their keys and values are appended to it, in layer n of the cache by layer n of the stack, and they attend to all that it
    /// has. With a causal mask, rows given in steps of any lengths come out as they do all at once.
    ///
    /// Several rows need a mask that orders them, the call is made again for each step, and prompts may differ in length: see
    /// [`EncoderForward::cache`](crate::layers::EncoderForward::cache).
    pub fn cache(mut self, cache: impl Into<Option<&'a Cache>>) -> Self {
        self.cache = cache.into();
        self
    }

    /// Rotates queries and keys of self-attention by their positions in every layer: see [`MultiHeadForward::rotary`]. With a cache the rows
    /// stand at [`RowPositions::Tensor`]`(`[`cache.starts()`](Cache::starts)`)`, or wherever another tensor says, and it keeps rotated keys.
    #[doc(alias = "rope")]
    #[doc(alias = "position_ids")]
    pub fn rotary(mut self, rotation: impl Into<Rotation<'a>>, at: RowPositions<TensorView<'a>>) -> Self {
        self.layers.rotary = Some(Rotary { rotation: rotation.into(), at });
        self
    }

    /// The mask and the rotation of self-attention of each layer, one entry for each, in place of [`mask`](Self::mask) and
    /// [`rotary`](Self::rotary): see [`EncoderForward::layer_calls`](crate::layers::EncoderForward::layer_calls). The memory's mask holds in every
    /// layer.
    pub fn layer_calls(mut self, calls: impl Into<Option<&'a [LayerCall<'a>]>>) -> Self {
        self.layers.each = calls.into();
        self
    }

    /// Writes what the layers give there, one after the other, before the final norm: `[layers · batch, 1, length, features]`, layer
    /// n from batch entry `n · batch` on. Without a final norm the last layer's is `out` and has no place here, so it is `layers − 1`
    /// of them. A [backward call](DecoderBackward) that finds them does not compute them again.
    pub fn hidden(mut self, hidden: impl Into<Option<TensorView<'a>>>) -> Self {
        self.hidden = hidden.into();
        self
    }
}

impl<'a> DecoderForward<'a> {
    /// The attention of `x` to itself in layer `n`, into `out`.
    fn own(&self, n: usize, x: TensorView<'a>, out: TensorView<'a>) -> MultiHeadForward<'a> {
        self.layers.attention(n, x, out)
    }

    /// The attention of `x` to the memory in layer `n`, into `out`; `rows` are the memory's own.
    fn cross(
        &self,
        [x, out]: [TensorView<'a>; 2],
        rows: TensorView<'a>,
        n: usize,
        batch: usize,
    ) -> MultiHeadForward<'a> {
        let keys = self.memory.of_layer(n, batch);
        MultiHeadForward::new(x, rows, rows, out).mask(self.memory_mask).projected_keys(keys)
    }
}

#[derive(Clone, Debug)]
struct DecoderLayer {
    self_attention: MultiHeadAttention,
    cross_attention: MultiHeadAttention,
    feed_forward: FeedForward,
    norms: [OwnedNorm; 3],
}

/// A stack of decoder layers on one device: everything `nn.TransformerDecoder` has in evaluation, its gradients
/// ([`backward`](Self::backward)), and a cache for generation. Vaswani et al. 2017, section 3.1; with norms before each part, Xiong et al.
/// 2020.
///
/// All stages of all layers are recorded in one pass, with one scratch whose size does not grow with the number of layers. The keys and
/// values of the memory are projected once, and read by every step. It keeps its weights' buffers alive, and reads them where they
/// are. What has no memory to attend to is a [`TransformerEncoder`](crate::TransformerEncoder) with a causal mask, and with a cache.
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
    pipelines: Pipelines,
    config: TransformerLayerConfig,
    kernel_options: KernelOptions,
    layers: Vec<DecoderLayer>,
    shared: SharedKeys,
    final_norm: Option<OwnedNorm>,
}

/// A checked call.
struct Plan<'a> {
    rows: Rows,
    own: SelfAttention<'a>,
    cross: Vec<AttentionPlan>,
    size: ScratchSize,
}

impl TransformerDecoder {
    /// A stack with pipelines of its own. `final_norm` is what stands after the last layer, as stacks with norms before each part have it.
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
        config.check()?;
        check_sizes("decoder", &[("layers", layers.len())])?;
        Self::with_configs(pipelines, &vec![config; layers.len()], layers, final_norm)
    }

    /// A stack whose layers differ: `configs` has the configuration of each layer. They may differ in
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
        let device = &pipelines.facts();
        let config = TransformerLayerConfig::of_layers(configs, layers.len())?;
        let shared = SharedKeys::new(configs, |n| &layers[n].self_attention)?;
        let norm = |weights: &NormWeights| {
            OwnedNorm::new(["norm.weight", "norm.bias"], weights, config.features(), device)
        };
        let layer = |(weights, own): (&DecoderLayerWeights, &TransformerLayerConfig)| {
            let [first, second, third] = &weights.norms;
            let attention = |weights| MultiHeadAttention::with_pipelines(pipelines, own.attention, weights);
            Ok(DecoderLayer {
                self_attention: attention(&weights.self_attention)?,
                cross_attention: attention(&weights.cross_attention)?,
                feed_forward: FeedForward::new(&weights.feed_forward, &config, device)?,
                norms: [norm(first)?, norm(second)?, norm(third)?],
            })
        };
        let layers: Vec<DecoderLayer> =
            layers.iter().zip(configs).map(layer).collect::<Result<_, Error>>()?;
        let appended = |layer: &DecoderLayer| {
            [&layer.self_attention, &layer.cross_attention].map(MultiHeadAttention::appended_keys)
        };
        if layers.iter().any(|layer| appended(layer) != appended(&layers[0])) {
            let why = "all layers of a stack append as many keys, or none";
            return Err(Error::Unsupported { what: "`bias_kv` in some layers", why });
        }
        Ok(TransformerDecoder {
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
        let tuned = |layer: DecoderLayer| DecoderLayer {
            self_attention: layer.self_attention.kernel_options(kernel_options),
            cross_attention: layer.cross_attention.kernel_options(kernel_options),
            ..layer
        };
        self.layers = self.layers.into_iter().map(tuned).collect();
        self
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// The temporary memory that `call` needs: that of one layer's attention
    /// ([`MultiHeadAttention::scratch_size`]), five tensors as `x`, and one or, gated, three of `hidden_features`; without a cache the
    /// keys and values of each layer whose keys others read, too. With a cache it may be asked for before the first advance.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &DecoderForward) -> Result<ScratchSize, Error> {
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
        call: &DecoderForward,
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
    pub fn prepare(&self, call: &DecoderForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let plan = dispatch::within(device, |device| {
            let plan = self.check(call, device)?;
            scratch.check(plan.size).map(|()| plan)
        })?;
        let scratch: &Scratch = scratch;
        let (config, rows, kernel_options) = (&self.config, plan.rows, &self.kernel_options);
        let work = Workspace { config, rows, scratch, kernel_options, device, accumulates: false };
        let dispatches = self.dispatches(call, &work, &plan)?;
        self.pipelines.bind("transformer decoder", &dispatches, scratch.bindings())
    }

    fn dispatches<'a>(
        &'a self,
        call: &DecoderForward<'a>,
        work: &Workspace<'a>,
        plan: &Plan<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        match self.config.order {
            NormOrder::Post => self.post(call, work, plan),
            NormOrder::Pre => self.pre(call, work, plan),
        }
    }

    /// `x = norm(x + f(x))` of each part f.
    fn post<'a>(
        &'a self,
        call: &DecoderForward<'a>,
        work: &Workspace<'a>,
        plan: &Plan<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let [middle, branch] = [work.features(Slot::Middle)?, work.features(Slot::Branch)?];
        let attended = work.features(Slot::Normed)?;
        let mut dispatches = Dispatches::new();
        let mut x = call.x;
        for (n, layer) in self.layers.iter().enumerate() {
            let last = n + 1 == self.layers.len() && self.final_norm.is_none();
            let to = match call.hidden {
                _ if last => call.out,
                Some(hidden) => work.given(hidden, n),
                None => work.features(Slot::Stream)?,
            };
            let [first, second, third] = &layer.norms;
            dispatches.extend(self.attend([x, branch], n, call, plan, work)?);
            dispatches.push(work.norm(first, x, Some(branch), middle, None));
            dispatches.extend(layer.cross([middle, branch], n, call, plan, work)?);
            dispatches.push(work.norm(second, middle, Some(branch), attended, None));
            dispatches.extend(work.feed_forward(&layer.feed_forward, attended, branch, false)?);
            dispatches.push(work.norm(third, attended, Some(branch), to, None));
            x = to;
        }
        dispatches.extend(self.final_norm.iter().map(|norm| work.norm(norm, x, None, call.out, None)));
        Ok(dispatches)
    }

    /// `x = x + f(norm(x))` of each part f: each sum is made where it is normalised next.
    fn pre<'a>(
        &'a self,
        call: &DecoderForward<'a>,
        work: &Workspace<'a>,
        plan: &Plan<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let [branch, normed] = [work.features(Slot::Branch)?, work.features(Slot::Normed)?];
        // The sum, and where the next goes.
        let mut next = [work.features(Slot::Middle)?, work.features(Slot::Stream)?];
        let mut dispatches = Dispatches::new();
        let mut x = call.x;
        let mut sum = |dispatches: &mut Dispatches<'a>,
                       norm: &'a OwnedNorm,
                       x: &mut TensorView<'a>,
                       to: Option<TensorView<'a>>| {
            let to = to.unwrap_or_else(|| {
                next.swap(0, 1);
                next[1]
            });
            dispatches.push(work.norm(norm, *x, Some(branch), normed, Some(to)));
            *x = to;
        };
        for (n, layer) in self.layers.iter().enumerate() {
            let [first, second, third] = &layer.norms;
            if n == 0 {
                dispatches.push(work.norm(first, x, None, normed, None));
            } else {
                let given = call.hidden.map(|hidden| work.given(hidden, n - 1));
                sum(&mut dispatches, first, &mut x, given);
            }
            dispatches.extend(self.attend([normed, branch], n, call, plan, work)?);
            sum(&mut dispatches, second, &mut x, None);
            dispatches.extend(layer.cross([normed, branch], n, call, plan, work)?);
            sum(&mut dispatches, third, &mut x, None);
            dispatches.extend(work.feed_forward(&layer.feed_forward, normed, branch, false)?);
        }
        dispatches.push(match &self.final_norm {
            Some(norm) => {
                let last = call.hidden.map(|hidden| work.given(hidden, self.layers.len() - 1));
                work.norm(norm, x, Some(branch), call.out, last)
            }
            None => work.sum(x, branch, call.out),
        });
        Ok(dispatches)
    }

    fn check<'a>(&self, call: &DecoderForward<'a>, device: &DeviceFacts) -> Result<Plan<'a>, Error> {
        let mut plan = self.check_inputs(call, device)?;
        check_rows_of("out", &call.out, &self.config.attention, Access::Write, device)?;
        expect_shape("out", call.out.shape(), call.x.shape())?;
        let mut written = vec![("out", call.out)];
        let mut streams = vec![Slot::Middle, Slot::Branch, Slot::Normed, Slot::Stream];
        if let Some(hidden) = call.hidden {
            self.hidden(&plan.rows).check(&hidden, &self.config, Access::Write, device)?;
            // The next layer reads what one has written, and one dispatch writes both.
            if hidden.buffer == call.out.buffer {
                return Err(Error::Alias { tensor: "out", other: "hidden" });
            }
            written.push(("hidden", hidden));
            if self.config.order == NormOrder::Post {
                streams.pop();
            }
        }
        check_aliasing(&written, &self.inputs(call))?;
        check_apart(&written, device)?;
        plan.size = plan.size.max(forward_size(&self.config, &plan.rows, false, &streams));
        Ok(plan)
    }

    /// Checks what is read; the size is that of attention.
    fn check_inputs<'a>(&self, call: &DecoderForward<'a>, device: &DeviceFacts) -> Result<Plan<'a>, Error> {
        let DecoderForward { x, memory, cache, .. } = *call;
        let rows = self.check_rows("x", &x, device)?;
        let Rows { batch, length } = rows;
        let memory_len = self.memory_len(&memory)?;
        self.check_memory(&memory, batch, memory_len, Access::Read, device)?;
        let attention: Vec<_> = self.layers.iter().map(|layer| &layer.self_attention).collect();
        call.layers.check(self.layers.len())?;
        if let Some(cache) = cache {
            check_cache(cache, (&attention, &self.shared), &self.config.attention, rows, &call.layers)?;
        }
        let of = (&attention[..], &self.shared);
        let own = SelfAttention::of(of, &call.layers, |n| call.own(n, x, x), cache, rows, device)?;
        let cross = |(n, layer): (usize, &DecoderLayer)| {
            let dims = [batch, length, memory_len];
            layer.cross_attention.plan_of(&call.cross([x; 2], x, n, batch), dims, device)
        };
        let cross: Vec<AttentionPlan> =
            self.layers.iter().enumerate().map(cross).collect::<Result<_, Error>>()?;
        let mut size = own.size();
        cross.iter().for_each(|plan| size = size.max(plan.size));
        Ok(Plan { rows, own, cross, size })
    }

    /// What layers give, where a call keeps it.
    fn hidden(&self, rows: &Rows) -> Hidden {
        Hidden::of(self.layers.len(), self.final_norm.as_ref(), &self.config, rows)
    }

    /// All that a call reads.
    fn inputs<'a>(&'a self, call: &DecoderForward<'a>) -> Vec<(&'static str, TensorView<'a>)> {
        let mut read = vec![("x", call.x)];
        read.extend(call.memory.tensors());
        read.extend(call.layers.tensors().into_iter().chain(call.memory_mask.tensors()));
        for layer in &self.layers {
            read.extend(layer.self_attention.weights().into_iter().chain(layer.cross_attention.weights()));
            read.extend(layer.feed_forward.tensors());
            read.extend(layer.norms.iter().flat_map(OwnedNorm::tensors));
        }
        read.extend(self.final_norm.iter().flat_map(OwnedNorm::tensors));
        read
    }

    /// Checks rows that are read, `[batch, 1, length, features]`.
    fn check_rows(&self, name: &'static str, view: &TensorView, device: &DeviceFacts) -> Result<Rows, Error> {
        check_rows_of(name, view, &self.config.attention, Access::Read, device)?;
        let [batch, _, length, _] = view.shape();
        let rows = Rows { batch, length };
        expect_shape(name, view.shape(), rows.shape(self.config.features()))?;
        check_rows(&self.config, &rows, device)?;
        Ok(rows)
    }

    /// The attention of `x` to itself and what a cache has, into `out`, in layer `n`.
    fn attend<'a>(
        &'a self,
        [x, out]: [TensorView<'a>; 2],
        n: usize,
        call: &DecoderForward<'a>,
        plan: &Plan<'a>,
        work: &Workspace<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        plan.own.dispatches(n, (&self.layers[n].self_attention, &self.shared), call.own(n, x, out), work)
    }
}

impl DecoderLayer {
    /// The attention of `x` to the memory, into `out`.
    fn cross<'a>(
        &'a self,
        [x, out]: [TensorView<'a>; 2],
        n: usize,
        call: &DecoderForward<'a>,
        plan: &Plan<'a>,
        work: &Workspace<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        // The memory's rows are not read where keys and values are there.
        let call = call.cross([x, out], x, n, work.rows.batch);
        self.cross_attention.dispatches(&call, &plan.cross[n], work.scratch, work.device)
    }
}
