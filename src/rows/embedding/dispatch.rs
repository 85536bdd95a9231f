//! Dispatches for embeddings and their gradient, from checked tensors.

use super::kernels::embedding::{EmbeddingCall, WORKGROUP};
use super::kernels::embedding_backward::{EmbeddingBackwardCall, LANES};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, Scratch, ScratchSize, Slot, Width, fits, in_scratch};
use crate::rows::radix_sort::dispatch::SortProblem;
use crate::tensor::{DType, Error, TensorView, count};

/// The checked tensors of an embedding.
#[derive(Clone, Copy)]
pub(crate) struct EmbeddingOp<'a> {
    /// `[batch, 1, length, 1]`, U32.
    pub ids: TensorView<'a>,
    /// `[1, 1, rows, width]`: the table, or its gradient.
    pub table: TensorView<'a>,
    /// `[batch, 1, length, width]`: the output, or its gradient.
    pub out: TensorView<'a>,
    pub scale: f32,
    pub accumulates: bool,
}

/// The largest number of workgroups of a dispatch. If there is more work, each workgroup repeats.
const MOST_GROUPS: usize = 65535;

impl<'a> EmbeddingOp<'a> {
    fn width(&self) -> Width {
        Width::of(self.table.layout.in_fours(3) && self.out.layout.in_fours(3))
    }

    /// Writes the table rows of the ids.
    pub fn forward(&self, device: &DeviceFacts) -> Dispatch<'a> {
        let EmbeddingOp { ids, table, out, scale, accumulates } = *self;
        let [batch, _, length, dim] = out.shape();
        let fours = dim.div_ceil(4);
        let work = count([batch, length, fours, 1]);
        let groups = work.div_ceil(WORKGROUP).min(MOST_GROUPS).min(device.max_workgroups as usize);
        let call = EmbeddingCall {
            ids,
            table,
            out,
            rows: table.shape()[2] as u32,
            dim: dim as u32,
            length: length as u32,
            fours: fours as u32,
            work: work as u32,
            step: (groups * WORKGROUP) as u32,
            scale,
            accumulates: accumulates.into(),
            width: self.width(),
        };
        call.dispatch([groups, 1, 1], device)
    }

    /// The number of low bits that distinguish the table's rows.
    fn bits(&self) -> u32 {
        (u32::BITS - (self.table.shape()[2] as u32 - 1).leading_zeros()).max(1)
    }

    /// The sort of the ids in each batch entry.
    fn sort(&self, order: TensorView<'a>) -> SortProblem<'a> {
        SortProblem { keys: self.ids.transposed(2, 3), order, ranks: None, bits: self.bits() }
    }

    fn order_shape(&self) -> [usize; 4] {
        let [batch, _, length, _] = self.ids.shape();
        [batch, 1, 1, length]
    }

    /// The temporary memory of the gradient.
    ///
    /// # Errors
    /// The device cannot bind this much memory.
    pub fn backward_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let order = fits(count(self.order_shape()) as u64, 4, device)?;
        // The size of a sort does not depend on its output.
        let size = self.sort(self.ids.transposed(2, 3)).scratch_size(device)?;
        Ok(size.with(Slot::Order, order))
    }

    /// Writes the gradient of the table.
    ///
    /// # Errors
    /// The scratch is too small.
    pub fn backward(&self, scratch: &'a Scratch, device: &DeviceFacts) -> Result<Dispatches<'a>, Error> {
        let EmbeddingOp { ids, table, out, scale, accumulates } = *self;
        let [batch, _, length, dim] = out.shape();
        let rows = table.shape()[2];
        let order = in_scratch(scratch.buffer(Slot::Order)?, DType::U32, self.order_shape(), 0);
        let mut dispatches = self.sort(order).dispatches(|slot| scratch.buffer(slot), device)?;
        let groups = rows.min(MOST_GROUPS).min(device.max_workgroups as usize);
        let call = EmbeddingBackwardCall {
            d_out: out,
            ids,
            order,
            d_table: table,
            rows: rows as u32,
            dim: dim as u32,
            length: length as u32,
            batch: batch as u32,
            id_mask: u32::MAX >> (u32::BITS - self.bits()),
            step: groups as u32,
            scale,
            accumulates,
            width: self.width(),
        };
        dispatches.push(call.dispatch([groups, dim.div_ceil(4 * LANES), 1], device));
        Ok(dispatches)
    }
}
