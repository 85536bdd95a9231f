//! What is to be computed, with its tensors.

use crate::attention::ScoreStage;
use crate::attention::plan::{KeyLayout, Outline, Reach, WeightsOutput};
use crate::cache::dispatch::CacheLayer;
use crate::cache::storage::LayoutKind;
use crate::kernel::KernelOptions;
use crate::mask::{DeviceMask, Dropout, Id};
use crate::tensor::{DType, Shape, TensorView};

/// Where keys and values are.
// One lives for as long as a call is recorded: a box would be an allocation for nothing.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy)]
pub(crate) enum Keys<'a> {
    Tensors { k: TensorView<'a>, v: TensorView<'a> },
    Cache(CacheLayer<'a>),
}

impl Keys<'_> {
    /// How they lie.
    pub fn layout(&self) -> KeyLayout {
        match self {
            Keys::Tensors { k, v } => KeyLayout::Tensors { dtype: k.dtype, k: k.layout, v: v.layout },
            Keys::Cache(CacheLayer { cached, kept, .. }) => {
                KeyLayout::Cache { storage: cached.storage, kind: cached.layout_kind, kept: *kept }
            }
        }
    }
}

/// What a call has besides queries, keys and values.
#[derive(Clone, Copy)]
pub(crate) struct Extras<'a> {
    pub out: TensorView<'a>,
    pub mask: DeviceMask<'a>,
    /// How many of the last keys stand outside of the mask.
    pub appended: usize,
    pub lse: Option<TensorView<'a>>,
    pub weights: Option<TensorView<'a>>,
    pub scores: Option<(TensorView<'a>, ScoreStage)>,
    pub dropout: Option<Dropout<TensorView<'a>>>,
}

impl Extras<'_> {
    /// What a plan must know of the call, whose queries are of `dtype`.
    pub fn outline(
        &self,
        shape: Shape,
        dtype: DType,
        keys: KeyLayout,
        kernel_options: KernelOptions,
    ) -> Outline {
        let given = self.dropout.as_ref().and_then(Dropout::given);
        let (most, ring) = match keys {
            KeyLayout::Tensors { .. } => (shape.kv_len, false),
            KeyLayout::Cache { kind, kept, .. } => (kept, kind == LayoutKind::Ring),
        };
        let reach = if self.appended > 0 {
            // Which lie past all others.
            Reach { most, window: None }
        } else {
            Reach::of(&self.mask, shape.q_len, most, ring)
        };
        Outline {
            shape,
            dtype,
            keys,
            reach,
            masked: !self.mask.is_none(),
            simple: !self.mask.has(Id::Blocks) && self.dropout.is_none(),
            weights: self.weights.map(|w| WeightsOutput::of(w.dtype, w.shape(), &shape)),
            scores: self.scores.is_some(),
            additive: false,
            // q, k, v and out. With splits there are no more.
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
    /// Of additive scores, `[1, heads or 1, 1, hidden]`; others are scaled products.
    pub score_vector: Option<TensorView<'a>>,
    pub kernel_options: KernelOptions,
}

impl Problem<'_> {
    /// What a plan must know of it.
    pub fn outline(&self) -> Outline {
        let outline = self.extras.outline(self.shape, self.q.dtype, self.keys.layout(), self.kernel_options);
        let additive = self.score_vector.is_some();
        Outline { additive, bindings: outline.bindings + usize::from(additive), ..outline }
    }
}
