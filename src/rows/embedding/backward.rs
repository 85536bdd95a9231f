//! The gradient of a table of embeddings.

use super::dispatch::EmbeddingOp;
use super::{Embedding, EmbeddingForward, check, check_scale};
use crate::device::DeviceFacts;
use crate::kernel::{Prepared, Recorder, Scratch, ScratchSize};
use crate::tensor::{Access, Error, TensorView, expect_shape};

/// The gradient of a table, of one forward call.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct EmbeddingBackward<'a> {
    forward: EmbeddingForward<'a>,
    d_out: TensorView<'a>,
    d_table: TensorView<'a>,
    accumulate: bool,
}

impl<'a> EmbeddingBackward<'a> {
    /// `forward` as it was made, whose `ids` and `scale` are read, the gradient of its `out`,
    /// `[batch, 1, length, width]`, and where the gradient of its `table` goes, shaped as that and
    /// written in every row; F32, F16 or BF16 each.
    pub fn new(forward: EmbeddingForward<'a>, d_out: TensorView<'a>, d_table: TensorView<'a>) -> Self {
        EmbeddingBackward { forward, d_out, d_table, accumulate: false }
    }

    /// Adds the gradient to what is there instead of writing over it: rows without ids are not
    /// touched. The sum is rounded to the table's type: choose F32 for many.
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
    /// The temporary memory that `call` needs: 8 bytes for each id, and at most 64 for every 1024
    /// of a batch entry, to sort them.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &EmbeddingBackward) -> Result<ScratchSize, Error> {
        let device = &self.pipelines.facts();
        call.op(device)?.backward_size(device)
    }

    /// Records the gradient of a table into an encoder or a pass. Ids are sorted, and the gradients
    /// of each summed in their order, without atomics: the same bits every time. Ids that occur
    /// often are summed by few invocations.
    ///
    /// # Errors
    /// Shapes that differ, a `d_table` that shares a buffer with an input, a scratch that is too small, and everything else that
    /// [`Error`] lists for tensors; then nothing has been recorded.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &EmbeddingBackward,
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
