//! The facts of an attention call that its plan depends on: sizes, types and layouts, but no
//! tensors.

use super::decode::KeySource;
use crate::cache::storage::{LayoutKind, StorageKind};
use crate::device::tuned::Class;
use crate::kernel::KernelOptions;
use crate::mask::{Alignment, Id, Mask, Pattern};
use crate::tensor::{DType, Layout, Shape};

/// The layout of keys and values.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KeyLayout {
    Tensors {
        dtype: DType,
        k: Layout,
        v: Layout,
    },
    Cache {
        /// The storage of keys, and of values.
        storages: [StorageKind; 2],
        kind: LayoutKind,
        /// The largest number of tokens that a sequence retains.
        kept: usize,
        /// True if tokens can be removed.
        compacts: bool,
        /// True if queries and outputs are f32 in scratch, times a Walsh–Hadamard matrix.
        hadamard: bool,
    },
}

impl KeyLayout {
    /// Returns the storage of the keys and values.
    pub fn storages(&self) -> [StorageKind; 2] {
        match self {
            KeyLayout::Tensors { dtype, .. } => [StorageKind::of(*dtype); 2],
            KeyLayout::Cache { storages, .. } => *storages,
        }
    }

    /// True if kernels can load them as vectors of four words.
    pub fn in_words(&self) -> bool {
        match self {
            KeyLayout::Tensors { dtype, k, v } => {
                [k, v].iter().all(|layout| layout.in_groups(3, 16 / dtype.bytes()))
            }
            KeyLayout::Cache { .. } => true,
        }
    }

    /// The type in which kernels read queries of type `dtype`.
    pub fn queries(&self, dtype: DType) -> DType {
        if self.is_hadamard() { DType::F32 } else { dtype }
    }

    /// True if queries and outputs are in scratch, times a Walsh–Hadamard matrix.
    pub fn is_hadamard(&self) -> bool {
        matches!(self, KeyLayout::Cache { hadamard: true, .. })
    }

    pub fn is_cache(&self) -> bool {
        matches!(self, KeyLayout::Cache { .. })
    }
}

/// An upper bound for the number of visible keys, without lengths and tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reach {
    /// The largest number of keys that all queries see together.
    pub most: usize,
    /// With a window: the largest number of keys that one query sees, not counting its own
    /// position. The window of the next query starts one key later.
    pub window: Option<usize>,
}

impl Reach {
    /// Returns the reach of the key intervals that kernels visit for `mask`. `kv_len` is the
    /// largest number of masked keys. `skips` is true if stored keys may skip positions.
    pub fn of<L, K, B, M>(mask: &Mask<L, K, B, M>, q_len: usize, kv_len: usize, skips: bool) -> Self {
        let lifted = skips || mask.rules().any(|rule| rule.lifts);
        // Neighbouring queries in different sequences have distant positions. Block maps (BigBird's
        // too) and global columns can show any key, and only the device knows which keys.
        if lifted || mask.has(Id::Packed) {
            return Reach { most: kv_len, window: None };
        }
        let settings = mask.settings();
        // With far keys in a pattern, kernels visit all keys that the other rules permit.
        let near = settings.pattern.and_then(Pattern::reach).unwrap_or(usize::MAX);
        let alignment = (!mask.has(Id::QueryOffsets)).then_some(settings.alignment);
        let last = match alignment {
            // The keys of all later queries follow the first query.
            Some(Alignment::BottomRight) => q_len.saturating_sub(1),
            _ => usize::MAX,
        };
        let right =
            if mask.has(Id::Causal) { 0 } else { settings.right.unwrap_or(usize::MAX).min(last).min(near) };
        let left = settings.left.unwrap_or(usize::MAX).min(near);
        let most = match alignment {
            Some(Alignment::TopLeft) => kv_len.min(q_len.saturating_add(right)),
            _ => kv_len,
        };
        Reach { most, window: (left < usize::MAX).then(|| left.saturating_add(right)) }
    }

    /// Returns the largest number of keys that `queries` neighbouring queries see.
    pub fn of_queries(&self, queries: usize) -> usize {
        self.window.map_or(self.most, |window| self.most.min(window.saturating_add(queries)))
    }
}

/// The kind of tensor for the attention weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightsOutput {
    /// The tensor can be the score matrix.
    Matrix,
    /// The tensor has another type, or is the mean over heads.
    Other,
}

impl WeightsOutput {
    pub fn of(dtype: DType, got: [usize; 4], shape: &Shape) -> Self {
        let matrix = dtype == DType::F32 && got == shape.weights();
        if matrix { WeightsOutput::Matrix } else { WeightsOutput::Other }
    }
}

/// The facts of a call that a plan needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outline {
    pub shape: Shape,
    /// The type of the queries.
    pub dtype: DType,
    pub keys: KeyLayout,
    pub reach: Reach,
    /// True if a mask hides keys, adds to scores or replaces them.
    pub masked: bool,
    /// True if the decode kernels can compute the call. They do not support block maps or dropout.
    pub simple: bool,
    pub weights: Option<WeightsOutput>,
    /// True if the caller requests scores.
    pub scores: bool,
    /// True if the mask has sink logits.
    pub sinks: bool,
    /// True if the scores are additive.
    pub additive: bool,
    /// True if each query has a list of keys.
    pub listed: bool,
    /// The number of storage buffers that the fused kernel binds.
    pub bindings: usize,
    pub kernel_options: KernelOptions,
}

impl Outline {
    /// Returns the facts that tiles depend on.
    pub fn source(&self) -> KeySource {
        let storages = self.keys.storages();
        let halves = self.dtype == DType::F16 && storages == [StorageKind::F16; 2];
        KeySource {
            storages,
            words: self.keys.in_words(),
            simple: self.simple,
            operands: match self.dtype {
                DType::BF16 => DType::BF16,
                _ if halves => DType::F16,
                _ => DType::F32,
            },
        }
    }

    /// Returns the class of calls that share a measurement with this call. Returns `None` if the
    /// call ignores measurements.
    pub fn class(&self) -> Option<Class> {
        let Outline { shape, dtype, keys, masked, simple, weights, scores, kernel_options, .. } = *self;
        if !simple || scores || self.additive || self.listed || weights.is_some() || !kernel_options.is_open()
        {
            return None;
        }
        let flags = [keys.is_cache(), keys.in_words(), kernel_options.f16_operands, masked];
        let flags = flags.into_iter().enumerate().fold(0, |bits, (n, flag)| bits | u32::from(flag) << n);
        let [k, v] = keys.storages();
        let exact = [
            (dtype as u32) << 16 | (v as u32) << 8 | k as u32,
            flags,
            shape.head_dim as u32,
            shape.value_dim as u32,
        ];
        let rows = shape.q_len.saturating_mul(shape.group());
        Some(Class::new(0, exact, [rows, shape.batch.saturating_mul(shape.kv_heads), shape.kv_len, 1]))
    }

    /// Returns the largest number of keys of a sequence.
    pub fn most_keys(&self) -> usize {
        match self.keys {
            KeyLayout::Tensors { .. } => self.shape.kv_len,
            KeyLayout::Cache { kept, .. } => kept,
        }
    }
}
