//! One forward call: its inputs, outputs and mask.

use crate::attention::{Forward, ScoreStage};
use crate::mask::{DeviceMask, Dropout};
use crate::tensor::TensorView;

/// One forward call of additive attention. Tensors are `[batch, heads, length, dim]` in any
/// strides.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q` | `[batch, heads, q_len, hidden]`, projected | the configured |
/// | `k` | `[batch, kv_heads, kv_len, hidden]`, projected | the configured |
/// | `v` | `[batch, kv_heads, kv_len, value_dim]` | the configured |
/// | `score_vector` | `[1, heads, 1, hidden]`, or one head for all | F32, F16 or BF16 |
/// | `out` | `[batch, heads, q_len, value_dim]` | the configured |
/// | `lse` | `[batch, heads, q_len, 1]` | F32 |
/// | `weights` | `[batch, heads, q_len, kv_len]`, or one head for their mean | F32, F16 or BF16 |
/// | `scores` | `[batch, heads, q_len, kv_len]` | F32, F16 or BF16 |
///
/// Weights and scores need a score matrix in memory
/// ([`Algorithm::Staged`](crate::tuning::Algorithm::Staged)). Without these outputs no score matrix
/// is stored.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct AdditiveForward<'a> {
    pub(super) call: Forward<'a>,
    pub(super) k: TensorView<'a>,
    pub(super) v: TensorView<'a>,
    pub(super) score_vector: TensorView<'a>,
}

impl<'a> AdditiveForward<'a> {
    /// Reads projected queries and keys `q` and `k`, values `v` and the vector that weighs the
    /// hidden units. Writes `out`, which may not overlap an input of the call. The call begins
    /// without mask, dropout and further outputs.
    pub fn new(
        q: TensorView<'a>,
        k: TensorView<'a>,
        v: TensorView<'a>,
        score_vector: TensorView<'a>,
        out: TensorView<'a>,
    ) -> Self {
        AdditiveForward { call: Forward::new(q, k, v, out), k, v, score_vector }
    }

    /// The mask: the keys that each query sees, and the terms added to scores.
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.call = self.call.mask(mask);
        self
    }

    /// Writes `ln Σ exp(score)` over the visible keys of every query, before dropout, to `lse`.
    pub fn lse(mut self, lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call = self.call.lse(lse);
        self
    }

    /// Writes the attention weights, after dropout, to `weights`: of every head, or their mean if
    /// the tensor has one head.
    pub fn weights(mut self, weights: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call = self.call.weights(weights);
        self
    }

    /// Writes the scores at a stage before the softmax to `scores`. At the first stage they are
    /// `v · tanh(q + k)`.
    pub fn scores(mut self, scores: TensorView<'a>, stage: ScoreStage) -> Self {
        self.call = self.call.scores(scores, stage);
        self
    }

    /// Applies dropout to the weights.
    pub fn dropout(mut self, dropout: impl Into<Option<Dropout<TensorView<'a>>>>) -> Self {
        self.call = self.call.dropout(dropout);
        self
    }
}
