//! Temporary memory, owned by the caller.

use super::BindingCache;
use super::guard::guarded;
use crate::tensor::{Error, TensorView};

/// The content of a part of the scratch. Parts are separate buffers, because WebGPU does not let a
/// dispatch bind one buffer both as read-only and as writable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// A layer's projected queries, keys and values.
    Projected,
    /// Scores, then attention weights.
    Scores,
    /// The outputs of a layer's heads.
    Context,
    /// Sums over parts of the keys.
    Partials,
    /// Statistics of each query for the backward pass.
    RowStats,
    /// The log-sum-exp of a layer's queries in the backward pass.
    Lse,
    /// The gradient of the outputs of a layer's heads.
    ContextGradient,
    /// The gradients of a layer's projected queries, keys and values.
    ProjectedGradients,
    /// A layer's projected queries and keys before their norm, and their gradients. For the
    /// backward pass.
    Unnormed,
    UnnormedGradients,
    /// Logits of a layer's output gate, and the gated outputs of the heads.
    Gate,
    Gated,
    /// The gradients of the logits and of the gated outputs, in a backward pass.
    GateGradient,
    GatedGradient,
    /// Queries, keys and values of a gated DeltaNet after the convolution, and their gradients.
    Convolved,
    ConvolvedGradient,
    /// The logits of the rates and decays of a gated DeltaNet, and the rates and decays.
    RateLogits,
    Rates,
    /// The gradients of rates and decays, then those of their logits with terms of the weights'.
    RatesGradient,
    RateTerms,
    /// Keys and values, with zeros in masked rows.
    Kept,
    /// Positions in sorted order, and the rank of each position. The result of the previous sorting
    /// pass. Counts of digits.
    Order,
    OrderBefore,
    DigitCounts,
    /// The codes of tokens: the position, and the bucket and chunk in each round of hashing.
    HashCodes,
    /// Queries, keys and values in the order of their buckets, and the gradients of keys and
    /// values.
    SortedQueries,
    SortedKeys,
    SortedValues,
    SortedKeyGradients,
    SortedValueGradients,
    /// The output of a block of a stack, which is the input of the next block.
    Stream,
    /// The residual stream between the parts of a block.
    Middle,
    /// The output of a part of a block, before it is added to the residual stream.
    Branch,
    /// The normalised input of a part of a block.
    Normed,
    /// The output of the first products of a feed-forward layer.
    Products,
    /// The input of the last product of a feed-forward layer.
    Hidden,
    /// The input of a decoder's feed-forward layer, in its backward pass.
    Fed,
    /// The outputs of the heads of a decoder's attention to a memory, and their log-sum-exp, in its
    /// backward pass.
    MemoryContext,
    MemoryLse,
    /// Keys and values of layers whose keys later layers of a stack read. In the backward pass, the
    /// input of their projection and the gradient of this input.
    SharedKeys,
    KeyInput,
    KeyInputGradient,
    /// The output of each block, in a backward pass whose forward pass did not store it.
    BlockOutputs,
    /// The gradients of `Stream`, `Middle`, `Branch`, `Products` and `Hidden`, in a backward pass.
    StreamGradient,
    MiddleGradient,
    BranchGradient,
    ProductsGradient,
    HiddenGradient,
    /// The gradient of a memory, summed over the layers processed so far.
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
    /// Terms whose sum is a gradient.
    GradientTerms,
    /// Lists of keys for each query, and the keys of each list as bits.
    KeyLists,
    KeyBitmap,
    /// Terms of the gradients of keys and values for each query, and their sums.
    KeyTerms,
    ValueTerms,
    KeySums,
    ValueSums,
    /// The largest elements of rows, before they are sorted: keys and columns.
    TopKPairs,
    /// The range of keys of each query of an indexer.
    KeyRanges,
    /// The outputs of the branches of native sparse attention, their log-sum-exp, and the gradients
    /// of the outputs.
    BranchOutputs,
    BranchLse,
    BranchGradients,
    /// Compressed keys and values, and their gradients.
    CompressedKeys,
    CompressedValues,
    CompressedKeyGradients,
    CompressedValueGradients,
    /// The weights of compressed keys, the scores of blocks, and the selected blocks.
    BlockWeights,
    BlockScores,
    BlockIndices,
    /// Queries and outputs of attention to a cache, times a Walsh–Hadamard matrix.
    HadamardQueries,
    HadamardOutputs,
    /// Sums of gradients over branches.
    QuerySums,
    BranchKeySums,
    BranchValueSums,
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
    "convolved",
    "d_convolved",
    "rate_logits",
    "rates",
    "d_rates",
    "rate_terms",
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
    "key_lists",
    "key_bitmap",
    "key_terms",
    "value_terms",
    "key_sums",
    "value_sums",
    "top_k_pairs",
    "key_ranges",
    "branch_outputs",
    "branch_lse",
    "d_branches",
    "compressed_keys",
    "compressed_values",
    "d_compressed_keys",
    "d_compressed_values",
    "block_weights",
    "block_scores",
    "block_indices",
    "hadamard_queries",
    "hadamard_outputs",
    "query_sums",
    "branch_key_sums",
    "branch_value_sums",
];
const SLOTS: usize = Slot::BranchValueSums as usize + 1;

/// The temporary memory that a call needs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ScratchSize {
    bytes: [u64; SLOTS],
}

impl std::fmt::Debug for ScratchSize {
    /// Prints the parts that are not empty, in bytes.
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

    /// Bytes of all parts.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// The size that is enough for both calls, one after the other.
    pub fn max(self, other: Self) -> Self {
        ScratchSize { bytes: std::array::from_fn(|n| self.bytes[n].max(other.bytes[n])) }
    }
}

/// Temporary memory for calls, owned by the caller. One recording at a time uses it.
///
/// A scratch that is large enough for the longest call is enough for shorter calls.
/// [`ScratchSize::max`] combines sizes, and [`ensure`](Self::ensure) enlarges a scratch. Calls that
/// are recorded one after the other may share it, in one encoder or several. They must be submitted
/// in the order in which they were recorded.
///
/// It also stores the bindings of recent calls. A call that is recorded again with the same tensors
/// and sizes therefore creates nothing. The bindings keep some buffers alive: see
/// [`forget`](Self::forget).
///
/// A call with the scratch of another device is an [`Error::Unsupported`]. If a buffer has been
/// destroyed (`wgpu::Buffer::destroy`), only the submission reports an error.
#[derive(Debug)]
pub struct Scratch {
    buffers: [Option<wgpu::Buffer>; SLOTS],
    size: ScratchSize,
    bindings: BindingCache,
}

impl Scratch {
    /// Creates memory of `size`. The operator's `scratch_size` returns the size that a call needs.
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
                        usage: TensorView::USAGES,
                        mapped_at_creation: false,
                    })
                })?);
            }
        }
        Ok(Scratch { buffers, size, bindings: BindingCache::of_scratch(device) })
    }

    /// Enlarges the parts that are smaller than in `size`. `device` must be the device of this
    /// scratch. Returns true if a part was enlarged. Calls that were recorded before keep their
    /// memory.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::Unsupported`] for another device. After an
    /// error the scratch is unchanged.
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
        // The bindings hold the smaller parts.
        self.bindings.clear();
        Ok(true)
    }

    /// The size of this scratch.
    pub fn size(&self) -> ScratchSize {
        self.size
    }

    /// Drops the bindings of past calls, and with them the references to their buffers.
    ///
    /// Without this call, unused bindings are dropped after a few calls, at most 64 calls. Until
    /// then, the buffers that only these bindings keep alive are limited. They have at most twice
    /// the bytes of the last call's buffers, or 8 MiB if that is more.
    pub fn forget(&mut self) {
        self.bindings.clear();
    }

    /// Refuses a call that needs a larger scratch.
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

    /// The bindings of the calls that use this scratch.
    pub(crate) fn bindings(&self) -> &BindingCache {
        &self.bindings
    }
}
