//! One call of local attention, forward and backward.

use crate::tensor::TensorView;

/// One forward call of local attention. Tensors are `[batch, heads, length, dim]` in any strides.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q` | `[batch, heads, q_len, head_dim]` | the configured |
/// | `k` | `[batch, kv_heads, kv_len, head_dim]` | the configured |
/// | `v` | `[batch, kv_heads, kv_len, value_dim]` | the configured |
/// | `positions` | `[batch, heads or 1, q_len, 1]`, in keys; the first key is at 0 | F32 |
/// | `out` | `[batch, heads, q_len, value_dim]` | the configured |
/// | `lengths` | `[batch or 1, 1, 1, 1]` | U32 |
/// | `weights` | `[batch, heads, q_len, kv_len]` | F32 |
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LocalForward<'a> {
    pub(super) q: TensorView<'a>,
    pub(super) k: TensorView<'a>,
    pub(super) v: TensorView<'a>,
    pub(super) positions: TensorView<'a>,
    pub(super) out: TensorView<'a>,
    pub(super) lengths: Option<TensorView<'a>>,
    pub(super) weights: Option<TensorView<'a>>,
}

impl<'a> LocalForward<'a> {
    /// Reads `[q, k, v]` and the `positions` of the queries, and writes `out`. `out` may not
    /// overlap an input of the call. The output is 0 if a position is NaN or infinite, or if its
    /// window has no key.
    pub fn new([q, k, v]: [TensorView<'a>; 3], positions: TensorView<'a>, out: TensorView<'a>) -> Self {
        LocalForward { q, k, v, positions, out, lengths: None, weights: None }
    }

    /// The number of keys of each sequence: queries see only the first `lengths[b]` keys.
    pub fn lengths(mut self, lengths: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lengths = lengths.into();
        self
    }

    /// Writes the weights to `weights`: the softmax times the Gaussian, and 0 outside of windows.
    pub fn weights(mut self, weights: impl Into<Option<TensorView<'a>>>) -> Self {
        self.weights = weights.into();
        self
    }
}

/// One backward call. It reads the inputs of a [`LocalForward`] and the gradient of its result, and
/// writes the gradients of the inputs. Each gradient has the shape of its tensor, and its type or
/// F32.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LocalBackward<'a> {
    pub(super) forward: LocalForward<'a>,
    pub(super) d_out: TensorView<'a>,
    pub(super) d_q: Option<TensorView<'a>>,
    pub(super) d_k: Option<TensorView<'a>>,
    pub(super) d_v: Option<TensorView<'a>>,
    pub(super) d_positions: Option<TensorView<'a>>,
    pub(super) accumulates: bool,
}

impl<'a> LocalBackward<'a> {
    /// Takes `forward`, unchanged, and the gradient of its `out`. The call writes only the
    /// gradients that you request.
    pub fn new(forward: LocalForward<'a>, d_out: TensorView<'a>) -> Self {
        let [d_q, d_k, d_v, d_positions] = [None; 4];
        LocalBackward { forward, d_out, d_q, d_k, d_v, d_positions, accumulates: false }
    }

    /// Writes the gradient of the queries to `d_q`.
    pub fn d_q(mut self, d_q: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_q = d_q.into();
        self
    }

    /// Writes the gradient of the keys to `d_k`, summed over the query heads that share them.
    pub fn d_k(mut self, d_k: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_k = d_k.into();
        self
    }

    /// Writes the gradient of the values to `d_v`, summed over the query heads that share them.
    pub fn d_v(mut self, d_v: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_v = d_v.into();
        self
    }

    /// Writes the gradient of the positions to `d_positions`, summed over the heads that share
    /// them. It is the gradient of the Gaussian only. The set of keys in a window has no gradient.
    pub fn d_positions(mut self, d_positions: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_positions = d_positions.into();
        self
    }

    /// Adds the gradients to the contents of their tensors, and rounds each sum once to its type.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }
}
