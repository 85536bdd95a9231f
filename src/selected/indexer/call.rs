//! The calls of an indexer.

use crate::mask::DeviceMask;
use crate::tensor::TensorView;

/// One forward call. It scores every key for every query, and selects the best keys.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct IndexerForward<'a> {
    pub(super) q: TensorView<'a>,
    pub(super) k: TensorView<'a>,
    pub(super) w: TensorView<'a>,
    pub(super) k_scales: Option<TensorView<'a>>,
    pub(super) scale: f32,
    pub(super) mask: DeviceMask<'a>,
    pub(super) indices: Option<TensorView<'a>>,
    pub(super) values: Option<TensorView<'a>>,
    pub(super) scores: Option<TensorView<'a>>,
}

impl<'a> IndexerForward<'a> {
    /// Takes queries `[batch, heads, q_len, head_dim]`, keys `[batch, 1, kv_len, head_dim]` and the
    /// weights of heads `[batch, 1, q_len, heads]`. Each is F32, F16 or BF16. The keys may also be
    /// integers: see [`key_scales`](Self::key_scales). Request an output with
    /// [`indices`](Self::indices) or [`scores`](Self::scores).
    pub fn new(q: TensorView<'a>, k: TensorView<'a>, w: TensorView<'a>) -> Self {
        IndexerForward {
            q,
            k,
            w,
            k_scales: None,
            scale: 1.0,
            mask: DeviceMask::none(),
            indices: None,
            values: None,
            scores: None,
        }
    }

    /// Reads keys as integers of 8 bits with sign. `k` is then U32, `[batch, 1, kv_len, head_dim /
    /// 4]`. The lowest byte of a word is the first of four channels. `scales` is F32, F16 or BF16,
    /// `[batch, 1, kv_len, head_dim / group]`, for any `group` that is a multiple of 4. The key is
    /// the integer times the scale of its group of channels.
    #[doc(alias = "int8")]
    pub fn key_scales(mut self, scales: impl Into<Option<TensorView<'a>>>) -> Self {
        self.k_scales = scales.into();
        self
    }

    /// The factor of `q · k`; 1 otherwise.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    /// The keys that each query may select. The rules may be causal, a window, lengths, query
    /// offsets and packed sequences. Rules that depend on single pairs are errors, and so are rules
    /// that change scores.
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.mask = mask;
        self
    }

    /// Writes the indices of the `k` best permitted keys, the best first: U32, `[batch, 1, q_len,
    /// k]`, for any `k`. Among equal scores the lower index comes first, and −0 equals 0. If fewer
    /// keys are permitted, the rest is `u32::MAX`. NaN is larger than every number.
    pub fn indices(mut self, indices: impl Into<Option<TensorView<'a>>>) -> Self {
        self.indices = indices.into();
        self
    }

    /// Writes the scores of the selected keys, with the shape of `indices`; F32, F16 or BF16. The
    /// rest is −∞.
    pub fn values(mut self, values: impl Into<Option<TensorView<'a>>>) -> Self {
        self.values = values.into();
        self
    }

    /// Writes all scores: F32, `[batch, 1, q_len, kv_len]`. They are −∞ for keys that are not
    /// permitted.
    pub fn scores(mut self, scores: impl Into<Option<TensorView<'a>>>) -> Self {
        self.scores = scores.into();
        self
    }
}

/// One backward call. It reads the inputs of an [`IndexerForward`] and the gradients of its scores,
/// and writes the gradients of its inputs. It reads none of the forward call's outputs.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct IndexerBackward<'a> {
    pub(super) forward: IndexerForward<'a>,
    pub(super) d_scores: TensorView<'a>,
    pub(super) indices: Option<TensorView<'a>>,
    pub(super) d_q: Option<TensorView<'a>>,
    pub(super) d_k: Option<TensorView<'a>>,
    pub(super) d_w: Option<TensorView<'a>>,
}

impl<'a> IndexerBackward<'a> {
    /// Takes the forward call and the gradient of its scores, `[batch, 1, q_len, kv_len]`; F32, F16
    /// or BF16. Elements of keys that are not permitted are ignored.
    pub fn new(forward: IndexerForward<'a>, d_scores: TensorView<'a>) -> Self {
        IndexerBackward { forward, d_scores, indices: None, d_q: None, d_k: None, d_w: None }
    }

    /// Takes the gradient of the scores at listed keys: `d_scores` is then `[batch, 1, q_len, k]`.
    /// `indices` is U32 with the same shape, usually the output of the forward call. Indices past
    /// the last key are ignored. If a key is listed twice, its gradients add up.
    pub fn indices(mut self, indices: impl Into<Option<TensorView<'a>>>) -> Self {
        self.indices = indices.into();
        self
    }

    /// Writes the gradient of the queries, in F32 or in their type.
    pub fn d_q(mut self, d_q: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_q = d_q.into();
        self
    }

    /// Writes the gradient of the keys, in F32 or in their type.
    pub fn d_k(mut self, d_k: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_k = d_k.into();
        self
    }

    /// Writes the gradient of the weights, in F32 or in their type.
    pub fn d_w(mut self, d_w: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_w = d_w.into();
        self
    }
}
