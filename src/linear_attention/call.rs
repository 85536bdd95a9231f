//! One call of linear attention.

use crate::tensor::TensorView;

/// The state of sequences: the sums over their keys and values so far. F32, with any strides.
#[derive(Clone, Copy, Debug)]
pub struct LinearState<'a> {
    /// `Σ φ(k)ᵀ v`, `[sequences, kv_heads, features, value_dim]`.
    pub state: TensorView<'a>,
    /// `Σ φ(k)`, `[sequences, kv_heads, features, 1]`.
    pub norm: TensorView<'a>,
    /// The logarithm of the scale of `state` and `norm`, `[sequences, kv_heads, 1, 1]`. Only
    /// exponential random features have one.
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
/// `batch · heads` has no limit. The operator computes heads in groups whose temporary memory is
/// bounded, see [`scratch_size`](super::LinearAttention::scratch_size).
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

/// The keys that a call sees, and the directions of its random features.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LinearKeys<'a> {
    pub key_mask: Option<TensorView<'a>>,
    pub lengths: Option<TensorView<'a>>,
    pub packed: Option<TensorView<'a>>,
    pub directions: Option<TensorView<'a>>,
}

impl<'a> LinearForward<'a> {
    /// Reads queries, keys and values and writes `out`, which may not overlap an input of the call.
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

    /// The mask of the keys, `[batch or 1, kv_heads or 1, 1, kv_len]`: true for keys that queries
    /// see. Hidden rows of k and v may hold any values.
    #[doc(alias = "key_padding_mask")]
    pub fn key_mask(mut self, key_mask: impl Into<Option<TensorView<'a>>>) -> Self {
        self.keys.key_mask = key_mask.into();
        self
    }

    /// The number of keys of each sequence: queries see only the first `lengths[b, h]` keys.
    pub fn lengths(mut self, lengths: impl Into<Option<TensorView<'a>>>) -> Self {
        self.keys.lengths = lengths.into();
        self
    }

    /// Packs sequences one after the other in a batch of one. Sequence s has rows `starts[s]` to
    /// `starts[s + 1]` of q, k and v. Rows outside all sequences give 0. Each start is clamped to
    /// the range from the previous start to the number of rows.
    #[doc(alias = "cu_seqlens")]
    pub fn packed(mut self, starts: impl Into<Option<TensorView<'a>>>) -> Self {
        self.keys.packed = starts.into();
        self
    }

    /// The directions of random features, `[1, 1 or kv_heads, directions, head_dim]`, F32.
    /// [`random_features`](crate::linear_attention::random_features) generates them.
    pub fn directions(mut self, directions: impl Into<Option<TensorView<'a>>>) -> Self {
        self.keys.directions = directions.into();
        self
    }

    /// The decay of the [`UpdateRule`](crate::linear_attention::UpdateRule),
    /// `[batch, kv_heads, kv_len, 1]`, or with one channel for each feature. F32, F16 or BF16.
    pub fn decay(mut self, decay: impl Into<Option<TensorView<'a>>>) -> Self {
        self.decay = decay.into();
        self
    }

    /// The rate of a delta rule, `[batch, kv_heads, kv_len, 1]`, F32, F16 or BF16.
    pub fn beta(mut self, beta: impl Into<Option<TensorView<'a>>>) -> Self {
        self.beta = beta.into();
        self
    }

    /// Continues from the state of the sequences so far, and updates it with the keys of this call.
    /// Use one call for a prompt, then calls for one or a few tokens. Together they give the same
    /// results as one call for all tokens.
    pub fn state(mut self, state: impl Into<Option<LinearState<'a>>>) -> Self {
        self.state = state.into();
        self
    }

    /// True if sequences begin with this call: the call then writes [`state`](Self::state) and does
    /// not read it.
    pub fn begins(mut self, begins: bool) -> Self {
        self.begins = begins;
        self
    }
}

/// One backward call. It reads the inputs and `out` of a [`LinearForward`], and the gradient of its
/// result. It writes the gradients of the inputs. Each gradient has the shape of its tensor, and
/// its type or F32.
///
/// Sequences begin with the call: it does not compute the gradient of a
/// [`state`](LinearForward::state).
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
    /// Takes `forward`, unchanged, and the gradient of its `out`. The call writes only the
    /// gradients that you request.
    pub fn new(forward: LinearForward<'a>, d_out: TensorView<'a>) -> Self {
        LinearBackward { forward, d_out, d_q: None, d_k: None, d_v: None, accumulates: false }
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

    /// Adds the gradients to the contents of their tensors, and rounds each sum once to its type.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }
}
