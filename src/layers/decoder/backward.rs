//! The gradients of a decoder.

use super::{DecoderForward, TransformerDecoder};
use crate::kernel::{Prepared, Recorder, Scratch, ScratchSize};
use crate::layers::multi_head::MultiHeadGradients;
use crate::layers::stack::{FeedForwardGradients, LayersGradients, MemoryCall, StackBackward, StackForward};
use crate::rows::norm::NormGradients;
use crate::tensor::{Error, TensorView};

/// Where the gradients of [`DecoderLayerWeights`](crate::layers::DecoderLayerWeights) go: nowhere
/// by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct DecoderLayerGradients<'a> {
    /// Of its self-attention.
    pub self_attention: MultiHeadGradients<'a>,
    /// Of its attention to the memory.
    pub cross_attention: MultiHeadGradients<'a>,
    /// Of its feed-forward layer.
    pub feed_forward: FeedForwardGradients<'a>,
    /// Of the norms of self-attention, of cross-attention and of the feed-forward layer.
    pub norms: [NormGradients<'a>; 3],
}

/// One backward call of a decoder: the forward call as it was made, without a cache; the memory
/// that its keys and values are of; the gradient of its output; and where gradients go.
///
/// # What is kept
///
/// Of the forward call its input, the memory, its keys and values as
/// [`TransformerDecoder::project_memory`] has written them, and
/// [`DecoderForward::hidden`] if it was given; else what each layer gives is computed once more, and takes as much scratch. The rest of
/// a layer is computed again when its turn comes, whose scratch does not grow with the number of layers (Chen et al. 2016, "Training
/// deep nets with sublinear memory cost").
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct DecoderBackward<'a> {
    call: StackBackward<'a>,
}

impl<'a> DecoderBackward<'a> {
    /// `forward` as it was made, whose `out` is not read; the `memory` that was projected for it,
    /// `[batch, 1, memory_len, features]`; and the gradient of `out`, shaped as that. All are of
    /// the stack's dtype.
    pub fn new(forward: DecoderForward<'a>, memory: TensorView<'a>, d_out: TensorView<'a>) -> Self {
        let call = forward.call;
        let memory = call.memory.map(|call| MemoryCall { rows: Some(memory), ..call });
        let forward = StackForward { memory, ..call };
        DecoderBackward { call: StackBackward::new(forward, d_out, LayersGradients::Decoder(&[])) }
    }

    /// Writes the gradient of `x` there, shaped as that, F32, F16 or BF16.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call.d_x = d_x.into();
        self
    }

    /// Writes the gradient of the memory there, through the keys and values of all layers, shaped
    /// as `memory`, F32, F16 or BF16.
    pub fn d_memory(mut self, d_memory: impl Into<Option<TensorView<'a>>>) -> Self {
        self.call.d_memory = d_memory.into();
        self
    }

    /// Writes the gradients of the layers' weights there: one entry for each layer, or none.
    pub fn d_layers(mut self, d_layers: &'a [DecoderLayerGradients<'a>]) -> Self {
        self.call.d_layers = LayersGradients::Decoder(d_layers);
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

impl TransformerDecoder {
    /// The temporary memory that `call` needs. It grows with the number of layers only by what they
    /// give, and only where the forward call has not kept that ([`DecoderForward::hidden`]).
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &DecoderBackward) -> Result<ScratchSize, Error> {
        self.stack.backward_scratch_size(&call.call)
    }

    /// Records the gradients of a forward call into an encoder or a pass: of its input, of the
    /// memory and of all weights, those of the memory's keys and values too; in any order of norms,
    /// gated or not, under every mask. Gradients of the masks' own tensors are
    /// [`MultiHeadAttention::backward`](crate::MultiHeadAttention::backward)'s.
    ///
    /// Sums are f32, and so are gradients between the parts of layers. No atomics: the same bits
    /// every time.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors, masks, options and scratch; gradients that share a buffer with an input or overlap;
    /// [`Error::Unsupported`] if none is asked for, or that of a tensor which the stack has not, and for a forward call with a cache.
    /// Then nothing has been recorded.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &DecoderBackward,
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
    pub fn prepare_backward(&self, call: &DecoderBackward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        self.stack.prepare_backward("transformer decoder backward", &call.call, scratch)
    }
}
