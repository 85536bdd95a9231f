//! One call: what goes in, what comes out, and the mask.

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
/// Weights and scores are computed with a score matrix in memory
/// ([`Algorithm::Staged`](crate::tuning::Algorithm::Staged)); without them there is none.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct AdditiveForward<'a> {
    pub(super) call: Forward<'a>,
    pub(super) k: TensorView<'a>,
    pub(super) v: TensorView<'a>,
    pub(super) score_vector: TensorView<'a>,
}

impl<'a> AdditiveForward<'a> {
    /// Projected queries and keys `q` and `k`, values `v`, and the vector that weighs the hidden
    /// units, to `out`, whose buffer may hold no input of the call. Without mask, dropout or
    /// further outputs.
    pub fn new(
        q: TensorView<'a>,
        k: TensorView<'a>,
        v: TensorView<'a>,
        score_vector: TensorView<'a>,
        out: TensorView<'a>,
    ) -> Self {
        AdditiveForward { call: Forward::new(q, k, v, out), k, v, score_vector }
    }

    /// Which keys a query may see, and what is added to scores.
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.call = self.call.mask(mask);
        self
    }

    /// Writes `ln Σ exp(score)` over every query's permitted keys there, before dropout.
    pub fn lse(mut self, lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call = self.call.lse(lse);
        self
    }

    /// Writes the attention weights there, after dropout: of every head, or their mean if the
    /// tensor has one.
    pub fn weights(mut self, weights: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call = self.call.weights(weights);
        self
    }

    /// Writes the scores there, as they are at a stage on their way to the softmax; at first they
    /// are `v · tanh(q + k)`.
    pub fn scores(mut self, scores: TensorView<'a>, stage: ScoreStage) -> Self {
        self.call = self.call.scores(scores, stage);
        self
    }

    /// With dropout on the weights.
    pub fn dropout(mut self, dropout: impl Into<Option<Dropout<TensorView<'a>>>>) -> Self {
        self.call = self.call.dropout(dropout);
        self
    }
}
