//! The gradients of an encoder.

use super::{EncoderForward, TransformerEncoder};
use crate::kernel::{Prepared, Recorder, Scratch, ScratchSize};
use crate::layers::multi_head::MultiHeadGradients;
use crate::layers::stack::{FeedForwardGradients, LayersGradients, StackBackward};
use crate::rows::norm::NormGradients;
use crate::tensor::{Error, TensorView};

/// Where the gradients of [`EncoderLayerWeights`](crate::layers::EncoderLayerWeights) go: nowhere
/// by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct EncoderLayerGradients<'a> {
    /// Of its self-attention.
    pub attention: MultiHeadGradients<'a>,
    /// Of its feed-forward layer.
    pub feed_forward: FeedForwardGradients<'a>,
    /// Of the norms of its attention and of its feed-forward layer.
    pub norms: [NormGradients<'a>; 2],
}

/// One backward call of an encoder: the forward call as it was made, the gradient of its output,
/// and where gradients go.
///
/// # What is kept
///
/// Of the forward call its input, and [`EncoderForward::hidden`] if it was given; else what each
/// layer gives is computed once more, and takes as much scratch. The rest of a layer is computed
/// again when its turn comes, whose scratch does not grow with the number of layers (Chen et al.
/// 2016, "Training deep nets with sublinear memory cost").
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct EncoderBackward<'a> {
    call: StackBackward<'a>,
}

impl<'a> EncoderBackward<'a> {
    /// `forward` as it was made, whose `out` and weights are not read, and the gradient of that,
    /// shaped as it, of the stack's dtype.
    pub fn new(forward: EncoderForward<'a>, d_out: TensorView<'a>) -> Self {
        EncoderBackward { call: StackBackward::new(forward.call, d_out, LayersGradients::Encoder(&[])) }
    }

    /// Writes the gradient of `x` there, shaped as that, F32, F16 or BF16.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call.d_x = d_x.into();
        self
    }

    /// Writes the gradients of the layers' weights there: one entry for each layer, or none.
    pub fn d_layers(mut self, d_layers: &'a [EncoderLayerGradients<'a>]) -> Self {
        self.call.d_layers = LayersGradients::Encoder(d_layers);
        self
    }

    /// Writes the gradients of the final norm's weights there.
    pub fn d_final_norm(mut self, d_final_norm: NormGradients<'a>) -> Self {
        self.call.d_final_norm = d_final_norm;
        self
    }

    /// Adds the gradients to what is there instead of writing over it, each rounded to its type:
    /// choose F32 for many.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.call.accumulate = accumulate;
        self
    }
}

impl TransformerEncoder {
    /// The temporary memory that `call` needs. It grows with the number of layers only by what they
    /// give, and only where the forward call has not kept that ([`EncoderForward::hidden`]).
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &EncoderBackward) -> Result<ScratchSize, Error> {
        self.stack.backward_scratch_size(&call.call)
    }

    /// Records the gradients of a forward call into an encoder or a pass: of its input and of all
    /// weights, in any order of norms, gated or not, under every mask. Gradients of the mask's own
    /// tensors are
    /// [`MultiHeadAttention::backward`](crate::MultiHeadAttention::backward)'s.
    ///
    /// Sums are f32, and so are gradients between the parts of layers. No atomics: the same bits
    /// every time.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors, masks, options and scratch; gradients that share a buffer with an input or overlap;
    /// [`Error::Unsupported`] if none is asked for, or that of a tensor which the stack has not. Then nothing has been recorded.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &EncoderBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &EncoderBackward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        self.stack.prepare_backward("transformer encoder backward", &call.call, scratch)
    }
}
