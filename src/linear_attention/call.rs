//! One call of linear attention.

use crate::tensor::TensorView;

/// The state of sequences: what linear attention keeps of the keys and values so far. F32, in any
/// strides.
#[derive(Clone, Copy, Debug)]
pub struct LinearState<'a> {
    /// `Σ φ(k)ᵀ v`, `[sequences, kv_heads, features, value_dim]`.
    pub state: TensorView<'a>,
    /// `Σ φ(k)`, `[sequences, kv_heads, features, 1]`.
    pub norm: TensorView<'a>,
    /// The logarithm of what both are to be multiplied by, `[sequences, kv_heads, 1, 1]`: of
    /// exponential random features, and only of those.
    pub log_scale: Option<TensorView<'a>>,
}

/// One forward call of [`LinearAttention`](super::LinearAttention). Tensors are `[batch, heads,
/// length, dim]` in any strides.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q` | `[batch, heads, q_len, head_dim]` | the configured |
/// | `k` | `[batch, kv_heads, kv_len, head_dim]` | the configured |
/// | `v` | `[batch, kv_heads, kv_len, value_dim]` | the configured |
/// | `out` | `[batch, heads, q_len, value_dim]` | the configured |
/// | `key_mask` | `[batch or 1, kv_heads or 1, 1, kv_len]` | Bool |
/// | `lengths` | `[batch or 1, kv_heads or 1, 1, 1]` | U32 |
/// | `packed` | `[1, 1, 1, sequences + 1]` | U32 |
/// | `directions` | `[1, 1 or kv_heads, directions, head_dim]` | F32 |
/// | `decay` | `[batch, kv_heads, kv_len, 1 or features]` | F32, F16 or BF16 |
/// | `beta` | `[batch, kv_heads, kv_len, 1]` | F32, F16 or BF16 |
///
/// `batch · heads` has no limit: heads are computed in groups whose temporary memory is bounded,
/// see
/// [`scratch_size`](super::LinearAttention::scratch_size).
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LinearForward<'a> {
    pub(crate) q: TensorView<'a>,
    pub(crate) k: TensorView<'a>,
    pub(crate) v: TensorView<'a>,
    pub(crate) out: TensorView<'a>,
    pub(crate) keys: LinearKeys<'a>,
    pub(crate) state: Option<LinearState<'a>>,
    pub(crate) begins: bool,
    pub(crate) decay: Option<TensorView<'a>>,
    pub(crate) beta: Option<TensorView<'a>>,
}

/// Which keys there are, and what their features are made with.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LinearKeys<'a> {
    pub key_mask: Option<TensorView<'a>>,
    pub lengths: Option<TensorView<'a>>,
    pub packed: Option<TensorView<'a>>,
    pub directions: Option<TensorView<'a>>,
}

impl<'a> LinearForward<'a> {
    /// Queries, keys and values to `out`, whose buffer may hold no input of the call.
    pub fn new(q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>, out: TensorView<'a>) -> Self {
        LinearForward {
            q,
            k,
            v,
            out,
            keys: LinearKeys::default(),
            state: None,
            begins: false,
            decay: None,
            beta: None,
        }
    }

    /// Keys to be seen, true, or not, false, `[batch or 1, kv_heads or 1, 1, kv_len]`: what k and v
    /// hold there does not matter.
    #[doc(alias = "key_padding_mask")]
    pub fn key_mask(mut self, key_mask: impl Into<Option<TensorView<'a>>>) -> Self {
        self.keys.key_mask = key_mask.into();
        self
    }

    /// Only the first `lengths[b, h]` keys are seen.
    pub fn lengths(mut self, lengths: impl Into<Option<TensorView<'a>>>) -> Self {
        self.keys.lengths = lengths.into();
        self
    }

    /// Sequences one after the other in a batch of one: sequence s has rows `starts[s]` to
    /// `starts[s + 1]` of q, k and v. Rows that are of none give 0. A start that is below the one
    /// before it counts as that, one past the end as the end.
    #[doc(alias = "cu_seqlens")]
    pub fn packed(mut self, starts: impl Into<Option<TensorView<'a>>>) -> Self {
        self.keys.packed = starts.into();
        self
    }

    /// The directions of random features, `[1, 1 or kv_heads, directions, head_dim]`, F32: see
    /// [`random_features`](crate::linear_attention::random_features).
    pub fn directions(mut self, directions: impl Into<Option<TensorView<'a>>>) -> Self {
        self.keys.directions = directions.into();
        self
    }

    /// What the [`UpdateRule`](crate::linear_attention::UpdateRule) decays by, `[batch, kv_heads,
    /// kv_len, 1]`, or with as many channels as there are features; F32, F16 or BF16.
    pub fn decay(mut self, decay: impl Into<Option<TensorView<'a>>>) -> Self {
        self.decay = decay.into();
        self
    }

    /// The rate of a delta rule, `[batch, kv_heads, kv_len, 1]`, F32, F16 or BF16.
    pub fn beta(mut self, beta: impl Into<Option<TensorView<'a>>>) -> Self {
        self.beta = beta.into();
        self
    }

    /// Goes on from the state of the sequences so far, and leaves there what it is after this
    /// call's keys: a call for a prompt, then one for each token, or for a few, give what one call
    /// for all of them would.
    pub fn state(mut self, state: impl Into<Option<LinearState<'a>>>) -> Self {
        self.state = state.into();
        self
    }

    /// Sequences begin with this call: what [`state`](Self::state) holds is not read, only written.
    pub fn begins(mut self, begins: bool) -> Self {
        self.begins = begins;
        self
    }
}

/// One backward call: a [`LinearForward`], whose inputs and `out` are read, the gradient of its
/// result, and where the gradients go, each shaped as what it is of, in its type or F32.
///
/// Sequences begin with the call: the gradient of a [`state`](LinearForward::state) is not
/// computed.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LinearBackward<'a> {
    pub(crate) forward: LinearForward<'a>,
    pub(crate) d_out: TensorView<'a>,
    pub(crate) d_q: Option<TensorView<'a>>,
    pub(crate) d_k: Option<TensorView<'a>>,
    pub(crate) d_v: Option<TensorView<'a>>,
    pub(crate) accumulates: bool,
}

impl<'a> LinearBackward<'a> {
    /// `forward` as it was made, and the gradient of its `out`. No gradient is written until it is
    /// asked for.
    pub fn new(forward: LinearForward<'a>, d_out: TensorView<'a>) -> Self {
        LinearBackward { forward, d_out, d_q: None, d_k: None, d_v: None, accumulates: false }
    }

    /// Writes the gradient of the queries there.
    pub fn d_q(mut self, d_q: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_q = d_q.into();
        self
    }

    /// Writes the gradient of the keys there: summed over the query heads that share them.
    pub fn d_k(mut self, d_k: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_k = d_k.into();
        self
    }

    /// Writes the gradient of the values there: summed over the query heads that share them.
    pub fn d_v(mut self, d_v: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_v = d_v.into();
        self
    }

    /// Adds the gradients to what is there instead, rounding once to their type.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }
}
