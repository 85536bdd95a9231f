//! One call: what goes in, what comes out, and the mask.

use super::ScoreStage;
use crate::cache::Cache;
use crate::mask::{DeviceMask, Dropout};
use crate::tensor::TensorView;

/// Where keys and values are.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant)]
pub(crate) enum KeyInput<'a> {
    Tensors { k: TensorView<'a>, v: TensorView<'a> },
    Cache(&'a Cache),
}

/// One forward call: queries, keys and values as tensors or in a cache, mask, optional outputs.
/// Tensors are `[batch, heads, length, dim]` in any strides.
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
    /// Queries, keys and values to `out`, whose buffer may hold no input of the call. Without mask,
    /// dropout or further outputs.
    pub fn new(q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>, out: TensorView<'a>) -> Self {
        Self::of(q, KeyInput::Tensors { k, v }, out)
    }

    /// Queries to the keys and values of a cache. Queries are the tokens of the last
    /// [`advance`](Cache::advance): a sequence that advanced by fewer than q_len has as many queries, from row 0 on, and
    /// the rows after them give 0. Where keys are rotated, so must they be already:
    /// [`Positions::rotate`](crate::position::Positions::rotate) at [`Cache::starts`].
    ///
    /// A query stands at the position of its token: with n queries in a sequence of length L, query
    /// `i` at L − n + i. `kv_len`, for a mask's tensors, is the cache's capacity; of a ring they
    /// can only repeat along it. Such a call has no weights, scores, dropout, block maps or packed
    /// sequences.
    ///
    /// The call borrows the cache, which the next advance changes: make the call again for each
    /// step. It has the same tensors at every length, so it creates nothing on the device.
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

    /// Which layer of the cache; 0 unless set.
    pub fn layer(mut self, layer: usize) -> Self {
        self.layer = Some(layer);
        self
    }

    /// Queries are not the tokens of the cache's last advance: every sequence has q_len of them,
    /// the last at its last token. So are those of cross-attention, whose keys are another
    /// sequence's, and tokens asked again, as the last alone, after a rewind or after a reorder.
    /// The scratch size, too, is asked for in this way before the first advance.
    pub fn at_end(mut self) -> Self {
        self.at_end = true;
        self
    }

    /// Which keys a query may see, and the bias; of a cache's those that its sequence has.
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.mask = mask;
        self
    }

    /// Writes `ln Σ exp(score)` over every query's permitted keys there: after scale, softcap and
    /// bias, before dropout.
    #[doc(alias = "return_lse")]
    #[doc(alias = "softmax_lse")]
    pub fn lse(mut self, lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lse = lse.into();
        self
    }

    /// Writes the attention weights there, after dropout: of every head, or their mean if the
    /// tensor has one (`need_weights` and `average_attn_weights` of `nn.MultiheadAttention`). None
    /// are written unless they are asked for.
    #[doc(alias = "need_weights")]
    #[doc(alias = "average_attn_weights")]
    pub fn weights(mut self, weights: impl Into<Option<TensorView<'a>>>) -> Self {
        self.weights = weights.into();
        self
    }

    /// Writes the scores there, as they are at a stage on their way to the softmax.
    /// [`Algorithm::Staged`](crate::tuning::Algorithm::Staged) then computes the call.
    #[doc(alias = "qk_matmul_output")]
    pub fn scores(mut self, scores: TensorView<'a>, stage: ScoreStage) -> Self {
        self.scores = Some((scores, stage));
        self
    }

    /// With dropout on the weights (`dropout_p`); by position, so that a seed drops the same pairs
    /// in any kernel.
    #[doc(alias = "dropout_p")]
    pub fn dropout(mut self, dropout: impl Into<Option<Dropout<TensorView<'a>>>>) -> Self {
        self.dropout = dropout.into();
        self
    }
}
