//! A call of attention as its plan sees it: sizes, types and layouts as far as they decide, no
//! tensors.

use super::decode::KeySource;
use crate::cache::storage::{LayoutKind, StorageKind};
use crate::device::tuned::Class;
use crate::kernel::KernelOptions;
use crate::mask::{Alignment, Id, Mask, Pattern};
use crate::tensor::{DType, Layout, Shape};

/// Where keys and values lie.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KeyLayout {
    Tensors {
        dtype: DType,
        k: Layout,
        v: Layout,
    },
    Cache {
        storage: StorageKind,
        kind: LayoutKind,
        /// Most tokens of a sequence that are left.
        kept: usize,
    },
}

impl KeyLayout {
    /// How they are stored.
    pub fn storage(&self) -> StorageKind {
        match self {
            KeyLayout::Tensors { dtype, .. } => StorageKind::of(*dtype),
            KeyLayout::Cache { storage, .. } => *storage,
        }
    }

    /// Whether kernels can load them as vectors of words that hold several channels each.
    pub fn in_words(&self) -> bool {
        match self {
            KeyLayout::Tensors { dtype, k, v } => {
                dtype.bytes() == 2 && [k, v].iter().all(|layout| layout.in_groups(3, 8))
            }
            KeyLayout::Cache { .. } => true,
        }
    }

    pub fn is_cache(&self) -> bool {
        matches!(self, KeyLayout::Cache { .. })
    }
}

/// How many keys queries may see, as far as it is known without lengths and tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reach {
    /// Most of all queries together.
    pub most: usize,
    /// Where a window bounds them: most keys of one query besides its own position. Each neighbour
    /// sees one further.
    pub window: Option<usize>,
}

impl Reach {
    /// Of the intervals that kernels go through for `mask`, whose masked keys are `kv_len` at most.
    pub fn of<L, K, B, M>(mask: &Mask<L, K, B, M>, q_len: usize, kv_len: usize, ring: bool) -> Self {
        let lifted = ring || mask.rules().any(|rule| rule.lifts);
        // Neighbours in different sequences stand far apart. A block map (BigBird's too) and global
        // columns show keys anywhere; which, is on the device.
        if lifted || mask.has(Id::Packed) {
            return Reach { most: kv_len, window: None };
        }
        let settings = mask.settings();
        // Of a pattern with far keys, kernels go through all that the other rules leave.
        let near = settings.pattern.and_then(Pattern::reach).unwrap_or(usize::MAX);
        let alignment = (!mask.has(Id::QueryOffsets)).then_some(settings.alignment);
        let last = match alignment {
            // The first query has the others' own keys after it.
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

    /// Most keys that `queries` beside each other see.
    pub fn of_queries(&self, queries: usize) -> usize {
        self.window.map_or(self.most, |window| self.most.min(window.saturating_add(queries)))
    }
}

/// A tensor for the attention weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightsOutput {
    /// Can be the score matrix itself.
    Matrix,
    /// Of another type, or the mean over heads.
    Other,
}

impl WeightsOutput {
    pub fn of(dtype: DType, got: [usize; 4], shape: &Shape) -> Self {
        let matrix = dtype == DType::F32 && got == shape.weights();
        if matrix { WeightsOutput::Matrix } else { WeightsOutput::Other }
    }
}

/// All that a plan must know of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outline {
    pub shape: Shape,
    /// Of the queries.
    pub dtype: DType,
    pub keys: KeyLayout,
    pub reach: Reach,
    /// Whether a mask hides keys, biases scores or replaces them.
    pub masked: bool,
    /// Whether the kernels for few rows can take the call: they neither skip tiles by a block map
    /// nor drop weights.
    pub simple: bool,
    pub weights: Option<WeightsOutput>,
    /// Whether scores are wanted.
    pub scores: bool,
    /// Whether they are additive.
    pub additive: bool,
    /// Storage buffers that the fused kernel binds.
    pub bindings: usize,
    pub kernel_options: KernelOptions,
}

impl Outline {
    /// What tiles depend on.
    pub fn source(&self) -> KeySource {
        let storage = self.keys.storage();
        let halves = self.dtype == DType::F16 && storage == StorageKind::F16;
        KeySource {
            storage,
            words: self.keys.in_words(),
            simple: self.simple,
            operands: match self.dtype {
                DType::BF16 => DType::BF16,
                _ if halves => DType::F16,
                _ => DType::F32,
            },
        }
    }

    /// Calls that a measurement of this one stands for, if any is followed.
    pub fn class(&self) -> Option<Class> {
        let Outline { shape, dtype, keys, masked, simple, weights, scores, kernel_options, .. } = *self;
        if !simple || scores || self.additive || weights.is_some() || !kernel_options.is_open() {
            return None;
        }
        let flags = [keys.is_cache(), keys.in_words(), kernel_options.f16_operands, masked];
        let flags = flags.into_iter().enumerate().fold(0, |bits, (n, flag)| bits | u32::from(flag) << n);
        let exact = [
            (dtype as u32) << 8 | keys.storage() as u32,
            flags,
            shape.head_dim as u32,
            shape.value_dim as u32,
        ];
        let rows = shape.q_len.saturating_mul(shape.group());
        Some(Class::new(0, exact, [rows, shape.batch.saturating_mul(shape.kv_heads), shape.kv_len, 1]))
    }

    /// Most keys of a sequence.
    pub fn most_keys(&self) -> usize {
        match self.keys {
            KeyLayout::Tensors { .. } => self.shape.kv_len,
            KeyLayout::Cache { kept, .. } => kept,
        }
    }
}
