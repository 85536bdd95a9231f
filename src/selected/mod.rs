//! Attention to keys that are chosen for each query.

mod call;
mod config;
pub(crate) mod dispatch;
pub(crate) mod indexer;
pub(crate) mod kernels;
pub(crate) mod native;
pub(crate) mod plan;
pub(crate) mod reference;
mod span;

pub use call::{SelectedBackward, SelectedForward};
pub use config::SelectedConfig;
pub use indexer::{Indexer, IndexerBackward, IndexerForward};
pub use native::{
    NativeSparseAttention, NativeSparseBackward, NativeSparseBranches, NativeSparseConfig,
    NativeSparseForward,
};

use dispatch::{SelectedBackwardProblem, SelectedProblem, Selection};
use plan::SelectedPlan;

use crate::attention::dispatch::{Keys, Problem};
use crate::attention::{Attention, KeyInput};
use crate::cache::dispatch::CacheLayer;
use crate::cache::storage::LayoutKind;
use crate::kernel::{Algorithm, Pipelines, Prepared, Recorder, Scratch, ScratchSize};
use crate::mask::{BY_SLOT, DeviceMask, Id, PatternPart, slot};
use crate::tensor::{CallTensors, DType, Element, Error, Shape, TensorView, check_aliasing};

/// Attention of each query to a list of keys, forward and backward. An indexer or a coarse
/// attention chooses the keys. This is the attention of DeepSeek V3.2 and GLM-5, and the selected
/// branch of NSA and MoBA.
///
/// The keys of a query are the keys that its indices name and the last
/// [`window`](SelectedConfig::window) keys. The mask hides some of them. They are a set: a key
/// counts once, also if it is named twice. The softmax covers the set, and the mask's sink logits.
/// A query without keys has output 0, lse −∞ and no gradient.
///
/// A first kernel sorts the keys of each query. The kernels of [`Attention`] then read the keys
/// through these lists. The heads that share a list are the rows of a tile. Indices of the same set
/// give the same bits.
///
/// ```no_run
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, [q, kv, indices, out]:
/// #      [wgpu_attention::TensorView; 4]) -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::selected::{SelectedAttention, SelectedConfig, SelectedForward};
/// use wgpu_attention::{Config, Forward, Mask, Scratch};
///
/// // Multi-head latent attention: 128 heads share rows of 576 channels.
/// let config = Config::new(128, 576).kv_heads(1).value_dim(512);
/// let attention = SelectedAttention::new(device, SelectedConfig::new(config).latent(true))?;
/// let forward = Forward::new(q, kv, kv.slice(3, 0, 512), out).mask(Mask::causal());
/// let call = SelectedForward::new(forward, indices);
/// let mut scratch = Scratch::new(device, attention.scratch_size(&call)?)?;
/// attention.forward(encoder, &call, &mut scratch)?;
/// # Ok(()) }
/// ```
///
/// Sources: DeepSeek-AI 2025, "DeepSeek-V3.2-Exp"; Yuan et al. 2025, "Native Sparse Attention"; Lu
/// et al. 2025, "MoBA".
#[doc(alias = "sparse attention")]
#[doc(alias = "DSA")]
#[doc(alias = "MoBA")]
#[derive(Clone, Debug)]
pub struct SelectedAttention {
    attention: Attention,
    config: SelectedConfig,
}

impl SelectedAttention {
    /// Creates the operator with new pipelines.
    ///
    /// # Errors
    /// A configuration that no call could satisfy, or a missing feature.
    pub fn new(device: &wgpu::Device, config: SelectedConfig) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// Creates the operator with pipelines that other operators on the device share.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, mut config: SelectedConfig) -> Result<Self, Error> {
        config.check()?;
        // Only the fused kernels read lists.
        let kernel_options = &mut config.attention.kernel_options;
        if kernel_options.algorithm == Algorithm::Staged {
            let why = "only the fused path reads lists of keys; set `Algorithm::Auto`";
            return Err(Error::Unsupported { what: "selected attention on the staged path", why });
        }
        kernel_options.algorithm = Algorithm::Fused;
        Ok(SelectedAttention { attention: Attention::with_pipelines(pipelines, config.attention)?, config })
    }

    /// Returns the pipelines, for other operators to share.
    pub fn pipelines(&self) -> &Pipelines {
        self.attention.pipelines()
    }

    /// Returns the temporary memory that `call` needs. The lists take at most 64 MiB: a call with
    /// longer lists goes over the queries in parts. If few queries have long lists, partial sums
    /// come in addition.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &SelectedForward) -> Result<ScratchSize, Error> {
        self.check(call)?.scratch_size(&self.pipelines().facts())
    }

    /// Records `call` into an encoder or a pass. It submits, copies and reads back nothing.
    ///
    /// # Errors
    /// Any error that [`Error`] lists for tensors, masks, options and scratch.
    /// [`Error::Unsupported`] means a mask that changes scores, dropout, or a ring cache. It also
    /// means a rule that differs by head if heads share a list. After an error, nothing has been
    /// recorded.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &SelectedForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        if let KeyInput::Cache(cache) = call.forward.keys {
            cache.check_recorded()?;
        }
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its kernels and binds its tensors. [`Prepared::record`] then records
    /// it any number of times.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &SelectedForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let (problem, scratch) = (self.check(call)?, &*scratch);
        self.pipelines().with_fallbacks(|| {
            let dispatches = problem.dispatches(scratch, &self.pipelines().facts())?;
            self.pipelines().bind("selected attention", &dispatches, scratch.bindings())
        })
    }

    /// Returns the temporary memory that the gradients of `call` need. Lists, and the terms of the
    /// gradients of keys, take at most 64 MiB, unless one query needs more. A call in parts also
    /// needs the gradients of keys and values in f32.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &SelectedBackward) -> Result<ScratchSize, Error> {
        self.check_backward(call)?.scratch_size(&self.pipelines().facts())
    }

    /// Records the gradients of a forward call into an encoder or a pass. For each query, a kernel
    /// writes a term of the gradient of each key of its list. Another kernel adds the terms of a
    /// key in the order of the queries. Every run gives the same bits.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and as [`Attention::backward`].
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &SelectedBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its kernels and binds its tensors. [`Prepared::record`] then records
    /// it any number of times.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(
        &self,
        call: &SelectedBackward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let (problem, scratch) = (self.check_backward(call)?, &*scratch);
        self.pipelines().with_fallbacks(|| {
            let dispatches = problem.dispatches(scratch, &self.pipelines().facts())?;
            self.pipelines().bind("selected attention backward", &dispatches, scratch.bindings())
        })
    }

    /// Checks indices and mask, and returns the parts that forward and backward calls share.
    fn selection<'a>(
        &self,
        shape: Shape,
        indices: TensorView<'a>,
        mask: DeviceMask<'a>,
        layer: Option<CacheLayer<'a>>,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<Selection<'a>, Error> {
        let [_, list_heads, _, count] = indices.shape();
        let Shape { batch, heads, kv_heads, q_len, .. } = shape;
        tensors.read("indices", indices, DType::U32, [batch, list_heads, q_len, count])?;
        if ![1, kv_heads, heads].contains(&list_heads) {
            let expected = "1, kv_heads or heads";
            return Err(Error::Option { option: "list heads", value: list_heads as f64, expected });
        }
        check_mask(&mask, heads / list_heads)?;
        if layer.is_some_and(|layer| layer.cached.layout_kind == LayoutKind::Ring) {
            let why = "a ring drops keys that indices may name; use pages";
            return Err(Error::Unsupported { what: "selected attention to a ring cache", why });
        }
        if layer.is_some_and(|layer| layer.cached.compacts) {
            let why =
                "indices name positions, and the cache can remove them; leave `CacheConfig::compacts` out";
            return Err(Error::Unsupported {
                what: "selected attention to a cache that can remove tokens",
                why,
            });
        }
        let device = tensors.device;
        let sinks = usize::from(mask.has(Id::SinkLogits));
        // For attention q, k, v, out, lse and lists. For lists the indices, lists, and a bitmap.
        let needed = (6 + sinks).max(3 + mask.buffers() - sinks) + usize::from(layer.is_some());
        if needed > device.max_storage_buffers as usize {
            let (what, name) = ("storage buffers for this call", "max_storage_buffers_per_shader_stage");
            let limit = u64::from(device.max_storage_buffers);
            return Err(Error::Limit { what, needed: needed as u64, limit, name });
        }
        let SelectedConfig { block, window, attention, .. } = self.config;
        let plan = SelectedPlan::new(shape, [list_heads, count], [block, window], device);
        let cpu = attention.kernel_options.target.is_cpu(device);
        Ok(Selection { indices, mask, layer, plan, cpu })
    }

    fn check<'a>(&self, call: &SelectedForward<'a>) -> Result<SelectedProblem<'a>, Error> {
        let SelectedForward { forward, indices, weights } = *call;
        let refused = [
            (forward.weights.is_some(), "weights of all keys", "set the weights of the selected call"),
            (forward.scores.is_some(), "scores", "the fused path does not store them"),
            (forward.dropout.is_some(), "dropout", "lists have no dropout; omit it"),
        ];
        if let Some((_, what, why)) = refused.into_iter().find(|(used, ..)| *used) {
            return Err(Error::Unsupported { what, why });
        }
        let problem = self.attention.check(&forward)?;
        let device = &self.pipelines().facts();
        let mut tensors = CallTensors::new(device);
        let layer = match problem.keys {
            Keys::Cache(layer) => Some(layer),
            Keys::Tensors { k, v } => {
                self.check_latent(k, v)?;
                None
            }
        };
        let selection = self.selection(problem.shape, indices, forward.mask, layer, &mut tensors)?;
        let written = [Some(("out", forward.out)), forward.lse.map(|lse| ("lse", lse))];
        tensors.write_checked(written.into_iter().flatten());
        if let Some(weights) = weights {
            self.check_weights(&problem, &selection)?;
            let Shape { batch, heads, q_len, .. } = problem.shape;
            let heads = if weights.shape()[1] == 1 { 1 } else { heads };
            let shape = [batch, heads, q_len, selection.plan.count];
            tensors.write("weights", weights, Element::Float, shape)?;
            let mut inputs = vec![("q", forward.q)];
            if let Keys::Tensors { k, v } = problem.keys {
                inputs.extend([("k", k), ("v", v)]);
            }
            inputs.extend(forward.mask.tensors());
            check_aliasing(&[("weights", weights)], &inputs, device)?;
        }
        tensors.finish()?;
        Ok(SelectedProblem { selection, problem, weights })
    }

    /// Refuses calls whose weights no kernel computes.
    fn check_weights(&self, problem: &Problem, selection: &Selection) -> Result<(), Error> {
        let unsupported = |what, why| Err(Error::Unsupported { what, why });
        if selection.layer.is_some() {
            return unsupported("weights with a cache", "pass keys and values as tensors");
        }
        if problem.softcap.is_some() {
            return unsupported("weights with a softcap", "omit one of them");
        }
        if problem.extras.lse.is_none() {
            return unsupported("weights without `lse`", "they are relative to it; call `Forward::lse`");
        }
        let bindings = 5 + selection.mask.buffers();
        let device = &self.pipelines().facts();
        if bindings > device.max_storage_buffers as usize {
            let (what, name) =
                ("storage buffers for the weights with this mask", "max_storage_buffers_per_shader_stage");
            let limit = u64::from(device.max_storage_buffers);
            return Err(Error::Limit { what, needed: bindings as u64, limit, name });
        }
        Ok(())
    }

    /// Refuses latent values that are not the first channels of the keys.
    fn check_latent(&self, k: TensorView, v: TensorView) -> Result<(), Error> {
        let same = k.buffer() == v.buffer() && k.offset() == v.offset() && k.strides() == v.strides();
        if self.config.latent && !same {
            let why = "pass `k.slice(3, 0, value_dim)` as values, or omit `latent`";
            return Err(Error::Unsupported { what: "latent values apart from the keys", why });
        }
        Ok(())
    }

    fn check_backward<'a>(&self, call: &SelectedBackward<'a>) -> Result<SelectedBackwardProblem<'a>, Error> {
        let problem = self.attention.check_backward(&call.backward)?;
        self.check_latent(problem.k, problem.v)?;
        let latent = self.config.latent;
        if latent && problem.d_v.is_some() {
            let why = "the gradient of the keys has both parts; omit `d_v`";
            return Err(Error::Unsupported { what: "`d_v` of latent values", why });
        }
        if problem.dropout.is_some() {
            let why = "lists have no dropout; omit it";
            return Err(Error::Unsupported { what: "dropout", why });
        }
        let device = &self.pipelines().facts();
        let mut tensors = CallTensors::new(device);
        let selection = self.selection(problem.shape, call.indices, problem.mask, None, &mut tensors)?;
        let gradients = [("d_q", problem.d_q), ("d_k", problem.d_k), ("d_v", problem.d_v)];
        let written = gradients.into_iter().filter_map(|(name, view)| Some((name, view?)));
        tensors.write_checked(written.chain(problem.d_added.wanted().map(|(of, view)| (of.name(), view))));
        tensors.check_aliasing()?;
        Ok(SelectedBackwardProblem::new(selection, problem, latent))
    }
}

/// Refuses rules that lists cannot have. `shared` query heads share a list.
fn check_mask(mask: &DeviceMask, shared: usize) -> Result<(), Error> {
    let unsupported = |what, why| Err(Error::Unsupported { what, why });
    let why = "lists of keys have no positions; a mask may only hide keys";
    if mask.mods().score.is_some() || mask.rules().any(|rule| rule.adds.is_some()) {
        return unsupported("a mask that changes scores", why);
    }
    if mask.has(Id::Blocks) {
        return unsupported("a block map", "list the blocks as indices");
    }
    if shared == 1 {
        return Ok(());
    }
    let why = "pass a list for each head, or a mask that is the same for all heads";
    let of_sinks = slot(Id::SinkLogits, 0);
    let by_head = |n: usize| n != of_sinks && mask.tensor(n).is_some_and(|t| t.shape()[1] > 1);
    let by_pattern =
        mask.settings().pattern.is_some_and(|pattern| pattern.params().part == PatternPart::ByHead);
    if (0..BY_SLOT.len()).any(by_head) || by_pattern || mask.mods().pairs.is_some() {
        return unsupported("a mask that may differ by head", why);
    }
    Ok(())
}
