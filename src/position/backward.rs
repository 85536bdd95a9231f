//! The gradients of rotations and of learned positions.

use super::kernels::table_backward::{LANES, TableBackwardCall};
use super::{AddPositions, MOST_GROUPS, PositionTable, Positions, Rotate, check_rows, rotation};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Prepared, Recorder};
use crate::tensor::{CallTensors, Element, Error, TensorView};

/// The gradient of a learned table of positions, for one sum that [`Positions::add`] computed.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct TableBackward<'a> {
    forward: AddPositions<'a>,
    d_out: TensorView<'a>,
    d_table: TensorView<'a>,
    accumulate: bool,
}

impl<'a> TableBackward<'a> {
    /// Makes the gradient of the table of `forward`.
    ///
    /// `forward` is the call as it was made, with a learned table; the kernel reads its positions.
    /// `d_out` is the gradient with respect to its sum, `[batch, heads, length, dim]`. `d_table`
    /// receives the gradient of the table, in the same shape; the kernel writes every row. Each is
    /// F32, F16 or BF16.
    pub fn new(forward: AddPositions<'a>, d_out: TensorView<'a>, d_table: TensorView<'a>) -> Self {
        TableBackward { forward, d_out, d_table, accumulate: false }
    }

    /// Adds the gradient to `d_table` instead of overwriting it. The kernel rounds the sum to the
    /// table's type: choose F32 for many additions.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }

    fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let TableBackward { forward: AddPositions { x, table, at, .. }, d_out, d_table, .. } = self;
        let PositionTable::Learned(table) = table else {
            let why = "a sinusoid has no parameters; omit the call or use `PositionTable::Learned`";
            return Err(Error::Unsupported { what: "the gradient of a sinusoid", why });
        };
        let mut tensors = CallTensors::new(device);
        tensors.read("d_out", *d_out, Element::Float, x.shape())?;
        at.check(x.shape(), &mut tensors)?;
        let [_, _, length, dim] = x.shape();
        tensors.write("d_table", *d_table, Element::Float, [1, 1, table.shape()[2], dim])?;
        check_rows(at, length, "d_table", d_table.shape())?;
        tensors.finish()
    }

    /// Returns the dispatch. Call it after `check`.
    fn dispatch(&self, device: &DeviceFacts) -> Dispatch<'a> {
        let TableBackward { forward: AddPositions { at, .. }, d_out, d_table, accumulate } = self;
        let [batch, heads, length, dim] = d_out.shape();
        let rows = d_table.shape()[2];
        let blocks = dim.div_ceil(LANES);
        let work = rows * blocks;
        let groups = work.min(MOST_GROUPS).min(device.max_workgroups as usize);
        let call = TableBackwardCall {
            d_out: *d_out,
            d_table: *d_table,
            positions: at.tensor(),
            // A checked tensor's rows are fewer than 2³².
            at: at.params(length, (rows - 1) as u32, device),
            batch: batch as u32,
            heads: heads as u32,
            length: length as u32,
            dim: dim as u32,
            blocks: blocks as u32,
            work: work as u32,
            step: groups as u32,
            accumulates: *accumulate,
        };
        call.dispatch([groups, 1, 1], device)
    }
}

impl Positions {
    /// Records the gradient of a rotation into an encoder or a pass.
    ///
    /// `x` of the call is the gradient with respect to the rotated tensor. The kernel writes the
    /// gradient with respect to the tensor before the rotation, to `out` or in place.
    ///
    /// It rotates by the opposite angles, with the same amplitude. With the caller's cosines and
    /// sines, pair `(a, b)` becomes `a cos + b sin` and `b cos − a sin`.
    ///
    /// ```no_run
    /// # use wgpu_attention::{Error, TensorView, wgpu};
    /// # use wgpu_attention::position::{Positions, Rope, Rotate, RowPositions};
    /// # fn f(positions: &Positions, encoder: &mut wgpu::CommandEncoder, rope: &Rope, d_q: TensorView) -> Result<(), Error> {
    /// // In place: from the gradient of the rotated queries to that of the queries.
    /// positions.rotate_backward(encoder, &Rotate::new(d_q, rope, RowPositions::Start(0)))
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`rotate`](Self::rotate).
    pub fn rotate_backward(&self, into: &mut impl Recorder, call: &Rotate) -> Result<(), Error> {
        self.prepare_rotate_backward(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernel. [`Prepared::record`] records it any
    /// number of times.
    ///
    /// # Errors
    /// As [`rotate_backward`](Self::rotate_backward).
    pub fn prepare_rotate_backward(&self, call: &Rotate) -> Result<Prepared, Error> {
        let call = rotation(call, -1.0, &self.pipelines.facts())?;
        self.pipelines.bind("rotate backward", &[call], &self.bindings)
    }

    /// Records the gradient of a learned table into an encoder or a pass.
    ///
    /// The gradient of a row sums the `d_out` of all rows at its position, over heads and
    /// sequences. The kernel sums in f32 and in a fixed order. Positions past the last row count as
    /// the last, as in [`add`](Self::add). The gradient with respect to `x` is `scale · d_out`,
    /// which this call does not compute.
    ///
    /// # Errors
    /// A call with an error records nothing. Errors are the tensor errors of [`Error`], and:
    ///
    /// - shapes that differ
    /// - a start from which the rows reach past the table
    /// - a gradient that overlaps an input
    pub fn table_backward(&self, into: &mut impl Recorder, call: &TableBackward) -> Result<(), Error> {
        self.prepare_table_backward(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernel. [`Prepared::record`] records it any
    /// number of times.
    ///
    /// # Errors
    /// As [`table_backward`](Self::table_backward).
    pub fn prepare_table_backward(&self, call: &TableBackward) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        call.check(device)?;
        self.pipelines.bind("table backward", &[call.dispatch(device)], &self.bindings)
    }
}
