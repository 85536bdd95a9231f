//! One forward call: its inputs, its outputs and the mask.

use super::ScoreStage;
use crate::cache::Cache;
use crate::mask::{DeviceMask, Dropout};
use crate::tensor::TensorView;

/// The keys and values: tensors or a cache.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant)]
pub(crate) enum KeyInput<'a> {
    Tensors { k: TensorView<'a>, v: TensorView<'a> },
    Cache(&'a Cache),
}

/// One forward call: queries, keys and values as tensors or in a cache, mask and optional outputs.
/// Tensors are `[batch, heads, length, dim]` with any strides.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q` | `[batch, heads, q_len, head_dim]` | the configured |
/// | `k` | `[batch, kv_heads, kv_len, head_dim]` | the configured |
/// | `v` | `[batch, kv_heads, kv_len, value_dim]` | the configured |
/// | `out` | `[batch, heads, q_len, value_dim]` | the configured |
/// | `lse` | `[batch, heads, q_len, 1]` | F32 |
/// | `weights` | `[batch, heads, q_len, kv_len]`, or one head for their mean | F32, F16 or BF16 |
/// | `scores` | `[batch, heads, q_len, kv_len]` | F32, F16 or BF16 |
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Forward<'a> {
    pub(crate) q: TensorView<'a>,
    pub(crate) keys: KeyInput<'a>,
    pub(crate) out: TensorView<'a>,
    pub(crate) mask: DeviceMask<'a>,
    pub(crate) lse: Option<TensorView<'a>>,
    pub(crate) weights: Option<TensorView<'a>>,
    pub(crate) scores: Option<(TensorView<'a>, ScoreStage)>,
    pub(crate) dropout: Option<Dropout<TensorView<'a>>>,
    pub(crate) layer: Option<usize>,
    pub(crate) at_end: bool,
}

impl<'a> Forward<'a> {
    /// Attention of `q` to `k` and `v`, written to `out`, which may not overlap an input of the
    /// call. The call has no mask, no dropout and no further outputs.
    pub fn new(q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>, out: TensorView<'a>) -> Self {
        Self::of(q, KeyInput::Tensors { k, v }, out)
    }

    /// Attention of `q` to the keys and values of a cache. The queries are the tokens of the last
    /// [`advance`](Cache::advance). A sequence that advanced by n tokens has n queries, from row 0
    /// on. If n is less than q_len, the kernel writes 0 to the remaining rows. If the cached keys
    /// are rotated, rotate the queries too:
    /// [`Positions::rotate`](crate::position::Positions::rotate) at [`Cache::starts`].
    ///
    /// A query has the position of its token. With n queries in a sequence of length L, query `i`
    /// is at position L − n + i. For the tensors of a mask, `kv_len` is the cache's capacity. With
    /// a ring, a mask's tensors can only repeat along `kv_len`. Such a call has no weights, scores,
    /// dropout, block maps or packed sequences.
    ///
    /// The call borrows the cache, and the next advance changes the cache. Make the call again for
    /// each step. It has the same tensors at every length, so it creates nothing on the device.
    pub fn with_cache(q: TensorView<'a>, cache: &'a Cache, out: TensorView<'a>) -> Self {
        Self::of(q, KeyInput::Cache(cache), out)
    }

    fn of(q: TensorView<'a>, keys: KeyInput<'a>, out: TensorView<'a>) -> Self {
        Forward {
            q,
            keys,
            out,
            mask: DeviceMask::none(),
            lse: None,
            weights: None,
            scores: None,
            dropout: None,
            layer: None,
            at_end: false,
        }
    }

    /// The layer of the cache, 0 unless set.
    pub fn layer(mut self, layer: usize) -> Self {
        self.layer = Some(layer);
        self
    }

    /// Every sequence has q_len queries, and its last query is at its last token. Use it if queries
    /// are not the tokens of the cache's last advance. Examples are cross-attention, whose keys
    /// belong to another sequence, and tokens repeated after a rewind or a reorder. Use it too for
    /// the scratch size before the first advance.
    pub fn at_end(mut self) -> Self {
        self.at_end = true;
        self
    }

    /// Sets the mask: the keys that each query may see, and the bias. With a cache, a query sees
    /// only keys of its sequence.
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.mask = mask;
        self
    }

    /// Writes `ln Σ exp(score)` over every query's permitted keys to `lse`. These are the scores
    /// after scale, softcap and bias, before dropout.
    #[doc(alias = "return_lse")]
    #[doc(alias = "softmax_lse")]
    pub fn lse(mut self, lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lse = lse.into();
        self
    }

    /// Writes the attention weights after dropout to `weights`, for every head. A tensor of one
    /// head receives the mean over heads (`need_weights` and `average_attn_weights` of
    /// `nn.MultiheadAttention`). The default writes no weights.
    #[doc(alias = "need_weights")]
    #[doc(alias = "average_attn_weights")]
    pub fn weights(mut self, weights: impl Into<Option<TensorView<'a>>>) -> Self {
        self.weights = weights.into();
        self
    }

    /// Writes the scores of the given stage to `scores`.
    /// [`Algorithm::Staged`](crate::tuning::Algorithm::Staged) then computes the call.
    #[doc(alias = "qk_matmul_output")]
    pub fn scores(mut self, scores: TensorView<'a>, stage: ScoreStage) -> Self {
        self.scores = Some((scores, stage));
        self
    }

    /// Applies dropout to the weights (`dropout_p`). The dropped pairs depend on seed and position
    /// only, so every kernel drops the same pairs.
    #[doc(alias = "dropout_p")]
    pub fn dropout(mut self, dropout: impl Into<Option<Dropout<TensorView<'a>>>>) -> Self {
        self.dropout = dropout.into();
        self
    }
}
