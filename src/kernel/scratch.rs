//! Temporary memory, owned by the caller.

use super::BindingCache;
use super::guard::guarded;
use crate::tensor::Error;

/// What a part of the scratch holds. Parts are separate buffers: WebGPU does not let a dispatch
/// read and write the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Projected queries, keys and values of a layer.
    Projected,
    /// Scores, then weights.
    Scores,
    /// The heads' outputs of a layer.
    Context,
    /// Sums over parts of the keys.
    Partials,
    /// What the backward pass keeps of each query.
    RowStats,
    /// The log-sum-exp of a layer's queries, in its backward pass.
    Lse,
    /// The gradient of a layer's heads' outputs.
    ContextGradient,
    /// The gradients of a layer's projected queries, keys and values.
    ProjectedGradients,
    /// Projected queries and keys of a layer before their norm, in its backward pass, and their
    /// gradients.
    Unnormed,
    UnnormedGradients,
    /// Logits of the gate of a layer's heads' outputs, and these outputs times their gate.
    Gate,
    Gated,
    /// The gradients of both, in a backward pass.
    GateGradient,
    GatedGradient,
    /// Keys and values without those that are not there.
    Kept,
    /// Positions in the order of a sort, and the place of each; those of the pass before; counts of
    /// digits.
    Order,
    OrderBefore,
    DigitCounts,
    /// Where tokens stand in the rounds of hashing.
    HashCodes,
    /// Queries, keys and values in the order of their buckets, and gradients of the last two.
    SortedQueries,
    SortedKeys,
    SortedValues,
    SortedKeyGradients,
    SortedValueGradients,
    /// What a block of a stack gives, which the next takes.
    Stream,
    /// The same between a block's parts.
    Middle,
    /// What a part of a block gives, before it is added.
    Branch,
    /// The normalised input of a part of a block.
    Normed,
    /// What the first products of a feed-forward layer give.
    Products,
    /// What its last product takes.
    Hidden,
    /// What a decoder's feed-forward layer takes, in its backward pass.
    Fed,
    /// The heads' outputs of its attention to a memory, and their log-sum-exp, there.
    MemoryContext,
    MemoryLse,
    /// Keys and values of layers whose keys later layers of a stack read; in its backward pass the
    /// input of their projection, and the gradients of these inputs.
    SharedKeys,
    KeyInput,
    KeyInputGradient,
    /// What each block gives, of a backward pass whose forward pass has not kept it.
    BlockOutputs,
    /// The gradients of these, in a backward pass.
    StreamGradient,
    MiddleGradient,
    BranchGradient,
    ProductsGradient,
    HiddenGradient,
    /// The gradient of a memory, of the layers that are done.
    MemoryGradient,
    /// Features of queries and keys.
    Features,
    /// The gradients of features.
    FeatureGradients,
    /// Logarithmic weights of keys.
    KeyLogs,
    /// A table of chunks of sequences.
    Chunks,
    /// States of chunks of sequences.
    States,
    /// States of sequences.
    SequenceStates,
    /// Gradients of scores.
    ScoreGradients,
    /// Terms of a gradient that is their sum.
    GradientTerms,
}

const NAMES: [&str; SLOTS] = [
    "projected",
    "scores",
    "context",
    "partials",
    "row_stats",
    "lse",
    "d_context",
    "d_projected",
    "unnormed",
    "d_unnormed",
    "gate",
    "gated",
    "d_gate",
    "d_gated",
    "kept",
    "order",
    "order_before",
    "digit_counts",
    "hash_codes",
    "sorted_queries",
    "sorted_keys",
    "sorted_values",
    "d_sorted_keys",
    "d_sorted_values",
    "stream",
    "middle",
    "branch",
    "normed",
    "products",
    "hidden",
    "fed",
    "memory_context",
    "memory_lse",
    "shared_keys",
    "key_input",
    "d_key_input",
    "block_outputs",
    "d_stream",
    "d_middle",
    "d_branch",
    "d_products",
    "d_hidden",
    "d_memory",
    "features",
    "d_features",
    "key_logs",
    "chunks",
    "states",
    "sequence_states",
    "d_scores",
    "d_terms",
];
const SLOTS: usize = Slot::GradientTerms as usize + 1;

/// How much temporary memory a call needs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ScratchSize {
    bytes: [u64; SLOTS],
}

impl std::fmt::Debug for ScratchSize {
    /// The parts that are not empty, in bytes.
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let parts = NAMES.iter().zip(self.bytes).filter(|(_, bytes)| *bytes > 0);
        f.write_str("ScratchSize ")?;
        f.debug_map().entries(parts).finish()
    }
}

impl Default for ScratchSize {
    /// No memory.
    fn default() -> Self {
        ScratchSize { bytes: [0; SLOTS] }
    }
}

impl ScratchSize {
    pub(crate) fn with(mut self, slot: Slot, bytes: u64) -> Self {
        self.bytes[slot as usize] = bytes;
        self
    }

    pub(crate) fn has(&self, slot: Slot) -> bool {
        self.bytes[slot as usize] > 0
    }

    /// Bytes of all parts together.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// What serves both calls, one after the other.
    pub fn max(self, other: Self) -> Self {
        ScratchSize { bytes: std::array::from_fn(|n| self.bytes[n].max(other.bytes[n])) }
    }
}

/// Temporary memory for calls, owned by the caller and used by one recording at a time.
///
/// One that is large enough for the longest call serves shorter ones, [`ScratchSize::max`] makes
/// one size of several, and [`ensure`](Self::ensure) makes it larger. Calls recorded after each
/// other may share it, in one encoder or several, as long as they are submitted in the order they
/// were recorded. It also keeps the bindings of recent calls, so that a call recorded again with
/// the same tensors and sizes creates nothing. They keep some buffers alive: see
/// [`forget`](Self::forget). A call with the scratch of another device is an
/// [`Error::Unsupported`].
/// A buffer destroyed meanwhile (`wgpu::Buffer::destroy`) is found out at the submission only.
#[derive(Debug)]
pub struct Scratch {
    buffers: [Option<wgpu::Buffer>; SLOTS],
    size: ScratchSize,
    bindings: BindingCache,
}

impl Scratch {
    /// Memory of `size`; see `scratch_size` of the operator.
    ///
    /// # Errors
    /// [`Error::BindingLimit`] if a part is larger than the device allows, [`Error::OutOfMemory`].
    pub fn new(device: &wgpu::Device, size: ScratchSize) -> Result<Self, Error> {
        let limits = device.limits();
        let limit = limits.max_buffer_size.min(limits.max_storage_buffer_binding_size);
        let mut buffers = [const { None }; SLOTS];
        for (slot, bytes) in size.bytes.into_iter().enumerate() {
            if bytes > limit {
                return Err(Error::BindingLimit { tensor: "scratch", bytes, limit });
            }
            if bytes > 0 {
                buffers[slot] = Some(guarded(device, "scratch", || {
                    device.create_buffer(&wgpu::BufferDescriptor {
                        label: Some("attention.scratch"),
                        size: bytes,
                        usage: wgpu::BufferUsages::STORAGE,
                        mapped_at_creation: false,
                    })
                })?);
            }
        }
        Ok(Scratch { buffers, size, bindings: BindingCache::of_scratch(device) })
    }

    /// Makes the parts that `size` needs larger, if they are smaller; `device` is the one that this
    /// was made on. True if there was one. Calls that were recorded before keep the memory that
    /// they were recorded with.
    ///
    /// # Errors
    /// Those of [`new`](Self::new), and [`Error::Unsupported`] for another device; nothing has changed then.
    ///
    /// ```no_run
    /// # use wgpu_attention::*;
    /// # fn f(gpu: &Gpu, attention: &Attention, call: &Forward, scratch: &mut Scratch) -> Result<(), Error> {
    /// scratch.ensure(gpu.device(), attention.scratch_size(call)?)?;
    /// gpu.submit(|encoder| attention.forward(encoder, call, scratch))
    /// # }
    /// ```
    pub fn ensure(&mut self, device: &wgpu::Device, size: ScratchSize) -> Result<bool, Error> {
        self.bindings.check_device(device)?;
        let grown = |n: usize| if size.bytes[n] > self.size.bytes[n] { size.bytes[n] } else { 0 };
        let more = ScratchSize { bytes: std::array::from_fn(grown) };
        if more.total() == 0 {
            return Ok(false);
        }
        let larger = Self::new(device, more)?;
        for (own, new) in self.buffers.iter_mut().zip(larger.buffers) {
            if new.is_some() {
                *own = new;
            }
        }
        self.size = self.size.max(size);
        // They hold the smaller parts.
        self.bindings.clear();
        Ok(true)
    }

    /// How much this holds.
    pub fn size(&self) -> ScratchSize {
        self.size
    }

    /// Drops the bindings of past calls, and with them the references to their buffers.
    ///
    /// Without this, bindings that are not used any more go after a few calls, at most 64. Until
    /// then, the buffers that only they keep alive have at most twice the bytes of the last call's,
    /// or 8 MiB if that is more.
    pub fn forget(&mut self) {
        self.bindings.clear();
    }

    /// Refuses a call that needs more.
    pub(crate) fn check(&self, needed: ScratchSize) -> Result<(), Error> {
        let mut slots = NAMES.into_iter().zip(needed.bytes.into_iter().zip(self.size.bytes));
        slots.try_for_each(|(slot, (needed, got))| {
            if needed > got { Err(Error::ScratchTooSmall { slot, needed, got }) } else { Ok(()) }
        })
    }

    pub(crate) fn buffer(&self, slot: Slot) -> Result<&wgpu::Buffer, Error> {
        let missing = Error::ScratchTooSmall { slot: NAMES[slot as usize], needed: 1, got: 0 };
        self.buffers[slot as usize].as_ref().ok_or(missing)
    }

    /// The bindings of the calls that use it.
    pub(crate) fn bindings(&self) -> &BindingCache {
        &self.bindings
    }
}
