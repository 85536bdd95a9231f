//! Attention problems: tensors and options that are checked.

use crate::attention::kernels::key_lists::KeyLists;
use crate::attention::plan::{KeyLayout, Outline, Reach, WeightsOutput};
use crate::attention::{Config, ScoreStage, scale_in_f32};
use crate::cache::dispatch::CacheLayer;
use crate::cache::storage::LayoutKind;
use crate::kernel::KernelOptions;
use crate::mask::{DeviceMask, Dropout, Id};
use crate::tensor::{DType, Shape, TensorView};

/// The keys and values: tensors or a layer of a cache.
// A value lives only while a call is recorded, so a box would be a useless allocation.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy)]
pub(crate) enum Keys<'a> {
    Tensors { k: TensorView<'a>, v: TensorView<'a> },
    Cache(CacheLayer<'a>),
}

impl Keys<'_> {
    /// The layout of the keys and values.
    pub fn layout(&self) -> KeyLayout {
        match self {
            Keys::Tensors { k, v } => KeyLayout::Tensors { dtype: k.dtype, k: k.layout, v: v.layout },
            Keys::Cache(CacheLayer { cached, kept, hadamard, .. }) => KeyLayout::Cache {
                storages: cached.storages,
                kind: cached.layout_kind,
                compacts: cached.compacts,
                kept: *kept,
                hadamard: hadamard.is_some(),
            },
        }
    }
}

/// The tensors and options of a call besides queries, keys and values.
#[derive(Clone, Copy)]
pub(crate) struct Extras<'a> {
    pub out: TensorView<'a>,
    pub mask: DeviceMask<'a>,
    /// The number of keys at the end that the mask does not cover.
    pub appended: usize,
    pub lse: Option<TensorView<'a>>,
    pub weights: Option<TensorView<'a>>,
    pub scores: Option<(TensorView<'a>, ScoreStage)>,
    pub dropout: Option<Dropout<TensorView<'a>>>,
}

impl Extras<'_> {
    /// The facts that a plan needs, for queries of type `dtype`.
    pub fn outline(
        &self,
        shape: Shape,
        dtype: DType,
        keys: KeyLayout,
        kernel_options: KernelOptions,
    ) -> Outline {
        let given = self.dropout.as_ref().and_then(Dropout::given);
        let (most, skips) = match keys {
            KeyLayout::Tensors { .. } => (shape.kv_len, false),
            KeyLayout::Cache { kind, kept, compacts, .. } => (kept, kind == LayoutKind::Ring || compacts),
        };
        let reach = if self.appended > 0 {
            // Appended keys follow all other keys.
            Reach { most, window: None }
        } else {
            Reach::of(&self.mask, shape.q_len, most, skips)
        };
        Outline {
            shape,
            dtype: keys.queries(dtype),
            keys,
            reach,
            masked: !self.mask.is_none(),
            simple: !self.mask.has(Id::Blocks) && self.dropout.is_none(),
            sinks: self.mask.has(Id::SinkLogits),
            weights: self.weights.map(|w| WeightsOutput::of(w.dtype, w.shape(), &shape)),
            scores: self.scores.is_some(),
            additive: false,
            listed: false,
            // q, k, v and out. Splits do not add bindings.
            bindings: 4 + self.lse.iter().count() + self.mask.buffers() + given.iter().count(),
            kernel_options,
        }
    }
}

/// A checked attention problem.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub shape: Shape,
    pub q: TensorView<'a>,
    pub keys: Keys<'a>,
    pub extras: Extras<'a>,
    pub scale: f32,
    pub softcap: Option<f32>,
    /// The vector of additive scores, `[1, heads or 1, 1, hidden]`. Without it, scores are scaled
    /// products.
    pub score_vector: Option<TensorView<'a>>,
    /// The list of each query's keys, in the tensor of the lengths rule. Each batch entry is a
    /// query.
    pub lists: Option<KeyLists>,
    pub kernel_options: KernelOptions,
}

impl Config {
    /// The problem of a call with this configuration. Its scores are scaled products.
    pub(crate) fn problem<'a>(
        &self,
        shape: Shape,
        q: TensorView<'a>,
        keys: Keys<'a>,
        extras: Extras<'a>,
    ) -> Problem<'a> {
        Problem {
            shape,
            q,
            keys,
            extras,
            scale: scale_in_f32(self.scale, shape.head_dim),
            softcap: self.softcap.map(|c| c as f32),
            score_vector: None,
            lists: None,
            kernel_options: self.kernel_options,
        }
    }
}

impl Problem<'_> {
    /// The facts that a plan needs.
    pub fn outline(&self) -> Outline {
        let outline = self.extras.outline(self.shape, self.q.dtype, self.keys.layout(), self.kernel_options);
        let additive = self.score_vector.is_some();
        let bindings = outline.bindings + usize::from(additive);
        Outline { additive, bindings, listed: self.lists.is_some(), ..outline }
    }
}
