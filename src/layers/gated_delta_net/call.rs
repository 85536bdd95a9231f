//! The calls of a gated DeltaNet layer.

use super::GatedDeltaNetWeights;
use crate::tensor::TensorView;

/// The states of sequences between calls, for generation.
#[derive(Clone, Copy, Debug)]
pub struct GatedDeltaNetState<'a> {
    /// The last inputs of the convolution,
    /// [`conv_state_shape`](super::GatedDeltaNetConfig::conv_state_shape); F32, F16 or BF16.
    pub conv: TensorView<'a>,
    /// The states of the delta rule,
    /// [`recurrent_state_shape`](super::GatedDeltaNetConfig::recurrent_state_shape), F32.
    pub recurrent: TensorView<'a>,
}

/// One forward call of a [`GatedDeltaNet`](super::GatedDeltaNet).
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct GatedDeltaNetForward<'a> {
    pub(super) x: TensorView<'a>,
    pub(super) out: TensorView<'a>,
    pub(super) lengths: Option<TensorView<'a>>,
    pub(super) state: Option<GatedDeltaNetState<'a>>,
    /// True if sequences begin with zeros, not with `state`.
    pub(super) begins: bool,
}

impl<'a> GatedDeltaNetForward<'a> {
    /// Computes `out` from `x`. Both are `[batch, 1, length, features]`, see
    /// [`TensorView::sequence`], in the type of the configuration.
    pub fn new(x: TensorView<'a>, out: TensorView<'a>) -> Self {
        GatedDeltaNetForward { x, out, lengths: None, state: None, begins: false }
    }

    /// The number of tokens of each batch entry, `[batch, 1, 1, 1]`, U32. Later tokens do not
    /// change the states, and their outputs are 0.
    pub fn lengths(mut self, lengths: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lengths = lengths.into();
        self
    }

    /// Begins with zeros, and writes the states after the last token: for a prompt.
    pub fn begin(mut self, state: GatedDeltaNetState<'a>) -> Self {
        (self.state, self.begins) = (Some(state), true);
        self
    }

    /// Continues with these states, and replaces them: for generation. A call may have any number
    /// of tokens.
    #[doc(alias = "conv_state")]
    pub fn state(mut self, state: GatedDeltaNetState<'a>) -> Self {
        (self.state, self.begins) = (Some(state), false);
        self
    }
}

/// One backward call of a [`GatedDeltaNet`](super::GatedDeltaNet). It computes the forward pass
/// again, and writes only the gradients that you request.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct GatedDeltaNetBackward<'a> {
    pub(super) forward: GatedDeltaNetForward<'a>,
    pub(super) d_out: TensorView<'a>,
    pub(super) d_x: Option<TensorView<'a>>,
    pub(super) d_weights: GatedDeltaNetWeights<Option<TensorView<'a>>>,
    pub(super) accumulates: bool,
}

impl<'a> GatedDeltaNetBackward<'a> {
    /// Takes `forward` and the gradient of its `out`, with the same shape; F32, F16 or BF16. The
    /// call does not read or write `out`.
    pub fn new(forward: GatedDeltaNetForward<'a>, d_out: TensorView<'a>) -> Self {
        let d_weights = GatedDeltaNetWeights::default();
        GatedDeltaNetBackward { forward, d_out, d_x: None, d_weights, accumulates: false }
    }

    /// Writes the gradient of `x`, with its shape; F32, F16 or BF16.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_x = d_x.into();
        self
    }

    /// Writes the gradients of weights, in the shapes and in the order of the layer's weights; F32,
    /// F16 or BF16.
    pub fn d_weights(mut self, d_weights: GatedDeltaNetWeights<Option<TensorView<'a>>>) -> Self {
        self.d_weights = d_weights;
        self
    }

    /// Adds the gradients to the contents of their tensors.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }
}
