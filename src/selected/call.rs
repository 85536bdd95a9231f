//! The calls of selected attention.

use crate::attention::{Backward, Forward};
use crate::tensor::TensorView;

/// One forward call: an attention call, and the indices of the keys of each query.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `indices` | `[batch, list heads, q_len, count]`, list heads 1, kv_heads or heads | U32 |
/// | `weights` | `[batch, heads, q_len, count]`, or one head for their mean | F32, F16 or BF16 |
///
/// A mask may only hide keys. It may have [sink logits](crate::Mask::sink_logits). If heads share
/// a list, no rule may differ by head.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct SelectedForward<'a> {
    pub(crate) forward: Forward<'a>,
    pub(crate) indices: TensorView<'a>,
    pub(crate) weights: Option<TensorView<'a>>,
}

impl<'a> SelectedForward<'a> {
    /// Computes `forward` with the keys that `indices` names and the mask permits. It reads keys
    /// and values from tensors or from a cache.
    ///
    /// Indices may repeat and may be in any order: the keys of a query are a set. An index past the
    /// last key names nothing, and so does −1 (`u32::MAX`).
    pub fn new(forward: Forward<'a>, indices: TensorView<'a>) -> Self {
        SelectedForward { forward, indices, weights: None }
    }

    /// Writes the probability of each index's key to `weights`, or the sum of a block's keys. An
    /// index without a permitted key gives 0. A tensor of one head receives the mean over heads,
    /// the target of an indexer's training. The call needs [`lse`](Forward::lse).
    pub fn weights(mut self, weights: impl Into<Option<TensorView<'a>>>) -> Self {
        self.weights = weights.into();
        self
    }
}

/// One backward call: the gradients of a [`SelectedForward`].
///
/// The indices are the forward call's. With [`latent`](super::SelectedConfig::latent) values, `d_k`
/// receives the gradient of keys and values, and `d_v` is absent. A key in no list has the gradient
/// zero.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct SelectedBackward<'a> {
    pub(crate) backward: Backward<'a>,
    pub(crate) indices: TensorView<'a>,
}

impl<'a> SelectedBackward<'a> {
    /// Computes the gradients that `backward` requests.
    pub fn new(backward: Backward<'a>, indices: TensorView<'a>) -> Self {
        SelectedBackward { backward, indices }
    }
}
