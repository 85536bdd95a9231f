//! The gradients of an encoder.

use super::{EncoderForward, TransformerEncoder};
use crate::kernel::{Prepared, Recorder, Scratch, ScratchSize};
use crate::layers::multi_head::MultiHeadGradients;
use crate::layers::stack::{FeedForwardGradients, LayersGradients, StackBackward};
use crate::rows::norm::NormGradients;
use crate::tensor::{Error, TensorView};

/// Places for the gradients of [`EncoderLayerWeights`](crate::layers::EncoderLayerWeights). By
/// default no gradient is written.
#[derive(Clone, Copy, Debug, Default)]
pub struct EncoderLayerGradients<'a> {
    /// The gradients of its self-attention.
    pub attention: MultiHeadGradients<'a>,
    /// The gradients of its feed-forward layer.
    pub feed_forward: FeedForwardGradients<'a>,
    /// The gradients of the norms of its attention and of its feed-forward layer.
    pub norms: [NormGradients<'a>; 2],
}

/// One backward call of an encoder: the unchanged forward call, the gradient of its output, and
/// places for gradients.
///
/// # Memory
///
/// The backward call reads the input of the forward call, and [`EncoderForward::hidden`] if it was
/// set. Without `hidden` it computes the outputs of all layers again, which takes as much scratch.
/// It computes the rest of a layer again just before the gradients of that layer. The scratch for
/// that does not grow with the number of layers. Source: Chen et al. 2016, "Training deep nets with
/// sublinear memory cost".
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct EncoderBackward<'a> {
    call: StackBackward<'a>,
}

impl<'a> EncoderBackward<'a> {
    /// `forward` is the unchanged forward call, whose `out` and attention weights are not read.
    /// `d_out` is the gradient of `out`, with the shape of `out` and the stack's dtype.
    pub fn new(forward: EncoderForward<'a>, d_out: TensorView<'a>) -> Self {
        EncoderBackward { call: StackBackward::new(forward.call, d_out, LayersGradients::Encoder(&[])) }
    }

    /// Writes the gradient of `x` to `d_x`, which has the shape of `x` and is F32, F16 or BF16.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call.d_x = d_x.into();
        self
    }

    /// Writes the gradients of the layers' weights to `d_layers`: one entry for each layer, or
    /// none.
    pub fn d_layers(mut self, d_layers: &'a [EncoderLayerGradients<'a>]) -> Self {
        self.call.d_layers = LayersGradients::Encoder(d_layers);
        self
    }

    /// Writes the gradients of the final norm's weights to `d_final_norm`.
    pub fn d_final_norm(mut self, d_final_norm: NormGradients<'a>) -> Self {
        self.call.d_final_norm = d_final_norm;
        self
    }

    /// Adds the gradients to the values of their tensors instead of overwriting them. Each sum is
    /// rounded to the tensor's type: choose F32 for many sums.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.call.accumulate = accumulate;
        self
    }
}

impl TransformerEncoder {
    /// Returns the size of the temporary memory that `call` needs. It holds the layers' outputs if
    /// the forward call has no [`hidden`](EncoderForward::hidden). Nothing else in it grows with
    /// the number of layers.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &EncoderBackward) -> Result<ScratchSize, Error> {
        self.stack.backward_scratch_size(&call.call)
    }

    /// Records the gradients of a forward call into an encoder or a pass: of its input and of all
    /// weights. Every order of norms, gates and every mask are supported. For gradients of the
    /// mask's tensors use [`MultiHeadAttention::backward`](crate::MultiHeadAttention::backward).
    ///
    /// Sums are f32, and so are gradients between the parts of layers. The kernels use no atomics,
    /// so every run gives the same bits.
    ///
    /// # Errors
    /// - Everything that [`Error`] lists for tensors, masks, options and scratch.
    /// - Gradients that overlap each other or an input.
    /// - [`Error::Unsupported`] if the call sets no gradient, or the gradient of a tensor that the
    ///   stack does not have.
    ///
    /// On an error the call records nothing.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &EncoderBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its pipelines and binds its tensors. [`Prepared::record`] can then
    /// record it many times.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &EncoderBackward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        self.stack.prepare_backward("transformer encoder backward", &call.call, scratch)
    }
}
