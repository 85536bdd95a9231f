//! The gradients of a decoder.

use super::{DecoderForward, TransformerDecoder};
use crate::kernel::{Prepared, Recorder, Scratch, ScratchSize};
use crate::layers::multi_head::MultiHeadGradients;
use crate::layers::stack::{FeedForwardGradients, LayersGradients, MemoryCall, StackBackward, StackForward};
use crate::rows::norm::NormGradients;
use crate::tensor::{Error, TensorView};

/// Places for the gradients of [`DecoderLayerWeights`](crate::layers::DecoderLayerWeights). By
/// default no gradient is written.
#[derive(Clone, Copy, Debug, Default)]
pub struct DecoderLayerGradients<'a> {
    /// The gradients of its self-attention.
    pub self_attention: MultiHeadGradients<'a>,
    /// The gradients of its attention to the memory.
    pub cross_attention: MultiHeadGradients<'a>,
    /// The gradients of its feed-forward layer.
    pub feed_forward: FeedForwardGradients<'a>,
    /// The gradients of the norms of self-attention, of cross-attention and of the feed-forward
    /// layer.
    pub norms: [NormGradients<'a>; 3],
}

/// One backward call of a decoder. It has the unchanged forward call, the memory, the gradient of
/// the output, and places for gradients. The forward call has no cache.
///
/// # Memory
///
/// The backward call reads the input of the forward call, the memory, and its keys and values from
/// [`TransformerDecoder::project_memory`]. It also reads [`DecoderForward::hidden`] if it was set.
/// Without `hidden` it computes the outputs of all layers again, which takes as much scratch. It
/// computes the rest of a layer again just before the gradients of that layer. The scratch for that
/// does not grow with the number of layers. Source: Chen et al. 2016, "Training deep nets with
/// sublinear memory cost".
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct DecoderBackward<'a> {
    call: StackBackward<'a>,
}

impl<'a> DecoderBackward<'a> {
    /// `forward` is the unchanged forward call, whose `out` is not read. `memory` is the projected
    /// memory, `[batch, 1, memory_len, features]`. `d_out` is the gradient of `out`, with the shape
    /// of `out`. All are in the stack's dtype.
    pub fn new(forward: DecoderForward<'a>, memory: TensorView<'a>, d_out: TensorView<'a>) -> Self {
        let call = forward.call;
        let memory = call.memory.map(|call| MemoryCall { rows: Some(memory), ..call });
        let forward = StackForward { memory, ..call };
        DecoderBackward { call: StackBackward::new(forward, d_out, LayersGradients::Decoder(&[])) }
    }

    /// Writes the gradient of `x` to `d_x`, which has the shape of `x` and is F32, F16 or BF16.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call.d_x = d_x.into();
        self
    }

    /// Writes the gradient of the memory, through the keys and values of all layers, to `d_memory`.
    /// It has the shape of `memory` and is F32, F16 or BF16.
    pub fn d_memory(mut self, d_memory: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call.d_memory = d_memory.into();
        self
    }

    /// Writes the gradients of the layers' weights to `d_layers`: one entry for each layer, or
    /// none.
    pub fn d_layers(mut self, d_layers: &'a [DecoderLayerGradients<'a>]) -> Self {
        self.call.d_layers = LayersGradients::Decoder(d_layers);
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

impl TransformerDecoder {
    /// Returns the size of the temporary memory that `call` needs. It holds the layers' outputs if
    /// the forward call has no [`hidden`](DecoderForward::hidden). Nothing else in it grows with
    /// the number of layers.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &DecoderBackward) -> Result<ScratchSize, Error> {
        self.stack.backward_scratch_size(&call.call)
    }

    /// Records the gradients of a forward call: of its input, of the memory and of all weights.
    /// These include the weights of the memory's keys and values. Every order of norms, gates and
    /// every mask are supported. For gradients of the masks' tensors use
    /// [`MultiHeadAttention::backward`](crate::MultiHeadAttention::backward).
    ///
    /// Sums are f32, and so are gradients between the parts of layers. The kernels use no atomics,
    /// so every run gives the same bits.
    ///
    /// # Errors
    /// - Everything that [`Error`] lists for tensors, masks, options and scratch.
    /// - Gradients that overlap each other or an input.
    /// - [`Error::Unsupported`] if the call sets no gradient, or the gradient of a tensor that the
    ///   stack does not have.
    /// - [`Error::Unsupported`] for a forward call with a cache.
    ///
    /// On an error the call records nothing.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &DecoderBackward,
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
    pub fn prepare_backward(&self, call: &DecoderBackward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        self.stack.prepare_backward("transformer decoder backward", &call.call, scratch)
    }
}
