//! The parts of a call: weights, inputs, outputs, the mask.

use crate::attention::dispatch::Extras;
use crate::mask::{DeviceMask, Dropout};
use crate::matmul::Linear;
use crate::position::{Rotary, Rotation, RowPositions};
use crate::rows::norm::NormWeights;
use crate::tensor::TensorView;

/// The weights of a layer, on the device.
#[doc(alias = "in_proj_weight")]
#[doc(alias = "out_proj")]
#[derive(Clone, Copy, Debug)]
pub struct MultiHeadWeights<'a> {
    /// `[heads · head_dim, query_features]`.
    pub query: Linear<'a>,
    /// `[kv_heads · head_dim, key_features]`.
    pub key: Linear<'a>,
    /// `[kv_heads · value_dim, value_features]`.
    pub value: Linear<'a>,
    /// `[out_features, heads · value_dim]`.
    pub out: Linear<'a>,
    /// One more key `[kv_heads · head_dim]` and value `[kv_heads · value_dim]` (`bias_k`,
    /// `bias_v`). The layer appends them after projection, and every query sees them.
    #[doc(alias = "bias_k")]
    #[doc(alias = "bias_v")]
    #[doc(alias = "add_bias_kv")]
    pub bias_kv: Option<[TensorView<'a>; 2]>,
    /// Weights and biases of the norms of queries and of keys, `[head_dim]` each, shared by all
    /// heads. They belong to [`MultiHeadConfig::qk_norm`](crate::layers::MultiHeadConfig::qk_norm).
    /// Without them a norm has a weight of 1 and no bias.
    #[doc(alias = "q_norm")]
    #[doc(alias = "k_norm")]
    pub qk_norm: Option<[NormWeights<'a>; 2]>,
    /// Projection of the queries' input to the logits of the gate. It is set if and only if the
    /// layer has a [`MultiHeadConfig::output_gate`](crate::layers::MultiHeadConfig::output_gate).
    /// The shape of its weight is:
    ///
    /// - `[heads · value_dim, query_features]` for
    ///   [`OutputGate::Elementwise`](crate::layers::OutputGate::Elementwise),
    /// - `[heads, query_features]` for
    ///   [`OutputGate::Headwise`](crate::layers::OutputGate::Headwise),
    /// - `[1, heads or 1, value_dim or 1, query_features / heads]` in a narrow layer.
    #[doc(alias = "gate_proj")]
    pub gate: Option<Linear<'a>>,
}

/// One forward call of a layer. Inputs and output are `[batch, 1, length, features]`, see
/// [`TensorView::sequence`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct MultiHeadForward<'a> {
    pub(crate) query: TensorView<'a>,
    pub(crate) key: TensorView<'a>,
    pub(crate) value: TensorView<'a>,
    pub(crate) out: TensorView<'a>,
    pub(crate) mask: DeviceMask<'a>,
    pub(crate) context: Option<TensorView<'a>>,
    pub(crate) lse: Option<TensorView<'a>>,
    pub(crate) weights: Option<TensorView<'a>>,
    pub(crate) dropout: Option<Dropout<TensorView<'a>>>,
    pub(crate) rotary: Option<Rotary<'a>>,
    pub(super) keys: KeyPlace<'a>,
}

/// The place of projected keys and values.
#[derive(Clone, Copy, Debug)]
pub(super) enum KeyPlace<'a> {
    /// In the scratch of the layer.
    Own,
    /// The call writes them here, for later layers too.
    Kept([TensorView<'a>; 2]),
    /// An earlier call or layer has written them here.
    Given([TensorView<'a>; 2]),
}

impl<'a> KeyPlace<'a> {
    /// Returns the place, if it is not in the scratch of the layer.
    pub fn outside(&self) -> Option<[TensorView<'a>; 2]> {
        match *self {
            KeyPlace::Own => None,
            KeyPlace::Kept(keys) | KeyPlace::Given(keys) => Some(keys),
        }
    }

    /// True if keys and values are already projected.
    pub fn are_given(&self) -> bool {
        matches!(self, KeyPlace::Given(_))
    }
}

impl<'a> MultiHeadForward<'a> {
    /// Makes a call with queries, keys and values from one input.
    pub fn self_attention(x: TensorView<'a>, out: TensorView<'a>) -> Self {
        Self::new(x, x, x, out)
    }

    /// Makes a call with separate inputs for queries, keys and values, as `forward(query, key,
    /// value)` of `nn.MultiheadAttention`. The shapes are:
    ///
    /// - `query`: `[batch, 1, q_len, query_features]`,
    /// - `key`: `[batch, 1, kv_len, key_features]`,
    /// - `value`: `[batch, 1, kv_len, value_features]`,
    /// - `out`: `[batch, 1, q_len, out_features]`.
    pub fn new(
        query: TensorView<'a>,
        key: TensorView<'a>,
        value: TensorView<'a>,
        out: TensorView<'a>,
    ) -> Self {
        MultiHeadForward {
            query,
            key,
            value,
            out,
            mask: DeviceMask::none(),
            context: None,
            lse: None,
            weights: None,
            dropout: None,
            rotary: None,
            keys: KeyPlace::Own,
        }
    }

    /// Uses keys and values that
    /// [`MultiHeadAttention::key_products`](super::MultiHeadAttention::key_products) has computed
    /// from `key` and `value`.
    pub(crate) fn projected_keys(mut self, keys: [TensorView<'a>; 2]) -> Self {
        self.keys = KeyPlace::Given(keys);
        self
    }

    /// Writes projected keys and values to `keys`, `[batch, kv_heads, kv_len + appended, dim]` in
    /// one buffer.
    pub(crate) fn keeps_keys(mut self, keys: [TensorView<'a>; 2]) -> Self {
        self.keys = KeyPlace::Kept(keys);
        self
    }

    /// Takes keys and values from `x`.
    pub(crate) fn keys_from(mut self, x: TensorView<'a>) -> Self {
        (self.key, self.value) = (x, x);
        self
    }

    /// True for queries, keys and values if the call projects them into the layer's scratch.
    pub(super) fn projects(&self) -> [bool; 3] {
        let keys = self.keys.outside().is_none();
        [true, keys, keys]
    }

    /// The options and outputs of the attention inside the layer. It writes its result to `out`.
    pub(super) fn extras(&self, out: TensorView<'a>, appended: usize) -> Extras<'a> {
        let MultiHeadForward { mask, lse, weights, dropout, .. } = *self;
        Extras { out, mask, appended, lse, weights, scores: None, dropout }
    }

    /// Sets the mask and the bias. They have the shape for the keys of the input, without appended
    /// keys.
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.mask = mask;
        self
    }

    /// Writes the heads' outputs before their gate to `context`, `[batch, 1, q_len, heads ·
    /// value_dim]`, in the layer's dtype. The heads lie one after the other in a row. Without a
    /// gate the output projection reads the same values. With `context` and [`lse`](Self::lse) a
    /// [backward call](super::MultiHeadBackward) does not compute attention again.
    pub fn context(mut self, context: impl Into<Option<TensorView<'a>>>) -> Self {
        self.context = context.into();
        self
    }

    /// Writes the log-sum-exp of every query's masked scores to `lse`, `[batch, heads, q_len, 1]`,
    /// F32.
    pub fn lse(mut self, lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lse = lse.into();
        self
    }

    /// Writes the attention weights to `weights`, `[batch, heads or 1, q_len, kv_len + appended]`.
    /// A tensor with one head receives the mean over all heads. PyTorch calls this `need_weights`
    /// and `average_attn_weights`; in `nn.MultiheadAttention` the mean is the default. By default
    /// no weights are written.
    #[doc(alias = "need_weights")]
    #[doc(alias = "average_attn_weights")]
    pub fn weights(mut self, weights: impl Into<Option<TensorView<'a>>>) -> Self {
        self.weights = weights.into();
        self
    }

    /// Rotates projected queries and keys by their positions before attention. It needs as many
    /// keys as queries, at the same positions, as in self-attention. `rotation` may be a
    /// [`&Rope`](crate::position::Rope), with positions on three axes if it has
    /// [sections](crate::position::RopeConfig::sections). Appended keys are not rotated.
    #[doc(alias = "rope")]
    #[doc(alias = "position_ids")]
    pub fn rotary(mut self, rotation: impl Into<Rotation<'a>>, at: RowPositions<TensorView<'a>>) -> Self {
        self.rotary = Some(Rotary { rotation: rotation.into(), at });
        self
    }

    /// Sets the rotation of another call, if any.
    pub(crate) fn rotary_of(mut self, rotary: Option<Rotary<'a>>) -> Self {
        self.rotary = rotary;
        self
    }

    /// Applies dropout to the weights. `nn.MultiheadAttention` does that in training only.
    #[doc(alias = "dropout_p")]
    pub fn dropout(mut self, dropout: impl Into<Option<Dropout<TensorView<'a>>>>) -> Self {
        self.dropout = dropout.into();
        self
    }
}
