//! The gradient of a table of embeddings.

use super::dispatch::EmbeddingOp;
use super::{Embedding, EmbeddingForward, check, check_scale};
use crate::device::DeviceFacts;
use crate::kernel::{Prepared, Recorder, Scratch, ScratchSize};
use crate::tensor::{Access, Error, TensorView, expect_shape};

/// The gradient of the table of one forward call.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct EmbeddingBackward<'a> {
    forward: EmbeddingForward<'a>,
    d_out: TensorView<'a>,
    d_table: TensorView<'a>,
    accumulate: bool,
}

impl<'a> EmbeddingBackward<'a> {
    /// The backward pass of `forward`. It reads the `ids` and `scale` of `forward`. `d_out` is the
    /// gradient of its `out`, `[batch, 1, length, width]`. `d_table` is the output for the gradient
    /// of its `table`, with the same shape. Every row of `d_table` is written. Both are F32, F16 or
    /// BF16.
    pub fn new(forward: EmbeddingForward<'a>, d_out: TensorView<'a>, d_table: TensorView<'a>) -> Self {
        EmbeddingBackward { forward, d_out, d_table, accumulate: false }
    }

    /// Adds the gradient to `d_table` instead of overwriting it. Rows without ids are then
    /// unchanged. The sum is rounded to the type of `d_table`: choose F32 to add many gradients.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }

    fn op(&self, device: &DeviceFacts) -> Result<EmbeddingOp<'a>, Error> {
        let EmbeddingBackward {
            forward: EmbeddingForward { ids, table, scale, .. },
            d_out,
            d_table,
            accumulate,
        } = *self;
        expect_shape("d_table", d_table.shape(), table.shape())?;
        check(ids, ("d_table", d_table, Access::Write), ("d_out", d_out, Access::Read), device)?;
        let scale = check_scale(scale)?;
        Ok(EmbeddingOp { ids, table: d_table, out: d_out, scale, accumulates: accumulate })
    }
}

impl Embedding {
    /// The temporary memory that `call` needs to sort the ids. It is at most 8 bytes for each id.
    /// In addition, each batch entry needs 64 bytes for every 1024 ids, rounded up.
    ///
    /// # Errors
    /// See [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &EmbeddingBackward) -> Result<ScratchSize, Error> {
        let device = &self.pipelines.facts();
        call.op(device)?.backward_size(device)
    }

    /// Records the gradient of a table into an encoder or a pass. The kernels sort the ids, and add
    /// the gradients of each id in order. There are no atomics, so the bits are the same on every
    /// run. Few invocations add the gradients of ids that occur often.
    ///
    /// # Errors
    /// Shapes that do not match, a `d_table` that overlaps an input, or a too small
    /// scratch. Every other [`Error`] of tensors. After an error nothing has been recorded.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &EmbeddingBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`backward`](Self::backward).
    pub fn prepare_backward(
        &self,
        call: &EmbeddingBackward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let op = call.op(device)?;
        scratch.check(op.backward_size(device)?)?;
        let scratch: &Scratch = scratch;
        self.pipelines.bind("embedding backward", &op.backward(scratch, device)?, scratch.bindings())
    }
}
