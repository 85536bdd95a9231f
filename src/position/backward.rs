//! The gradients of positions.

use super::kernels::table_backward::{LANES, TableBackwardCall};
use super::{AddPositions, MOST_GROUPS, PositionTable, Positions, Rotate, check_rows, rotation};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Prepared, Recorder};
use crate::tensor::{CallTensors, Element, Error, TensorView};

/// The gradient of a learned table of positions, of one sum that [`Positions::add`] has computed.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct TableBackward<'a> {
    forward: AddPositions<'a>,
    d_out: TensorView<'a>,
    d_table: TensorView<'a>,
    accumulate: bool,
}

impl<'a> TableBackward<'a> {
    /// `forward` as it was made, with a learned table, whose positions are read; the gradient with
    /// respect to its sum, `[batch, heads, length, dim]`; and where the gradient of the table goes,
    /// shaped as the table and written in every row. Each is F32, F16 or BF16.
    pub fn new(forward: AddPositions<'a>, d_out: TensorView<'a>, d_table: TensorView<'a>) -> Self {
        TableBackward { forward, d_out, d_table, accumulate: false }
    }

    /// Adds the gradient to what is there instead of writing over it. The sum is rounded to the
    /// table's type: choose F32 for many.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }

    fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let TableBackward { forward: AddPositions { x, table, at, .. }, d_out, d_table, .. } = self;
        let PositionTable::Learned(table) = table else {
            let why = "a sinusoid is computed and has no gradient: leave the call out, or give the sum a learned table";
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

    /// Dispatch after `check`.
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
    /// Records the gradient of a rotation into an encoder or a pass: `x` of the call is the
    /// gradient with respect to what was rotated, and what is written, in its place or to `out`,
    /// the gradient with respect to what it was rotated from. That is the rotation by the opposite
    /// angles, with the same amplitude; of given cosines and sines, `a cos + b sin` and `b cos − a
    /// sin` of pair `(a, b)`.
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

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`rotate_backward`](Self::rotate_backward).
    pub fn prepare_rotate_backward(&self, call: &Rotate) -> Result<Prepared, Error> {
        let call = rotation(call, -1.0, &self.pipelines.facts())?;
        self.pipelines.bind("rotate backward", &[call], &self.bindings)
    }

    /// Records the gradient of a learned table into an encoder or a pass: for each of its rows the
    /// sum, in f32 and in a fixed order, of the `d_out` of all rows that stand there, in all heads
    /// of all sequences. Rows past the last stand at the last, as in [`add`](Self::add). The
    /// gradient with respect to `x` is `scale · d_out`, which nothing here computes.
    ///
    /// # Errors
    /// Shapes that differ, a start from which the rows reach past the table, a gradient that shares a buffer with an input,
    /// and everything else that [`Error`] lists for tensors; then nothing has been recorded.
    pub fn table_backward(&self, into: &mut impl Recorder, call: &TableBackward) -> Result<(), Error> {
        self.prepare_table_backward(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`table_backward`](Self::table_backward).
    pub fn prepare_table_backward(&self, call: &TableBackward) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        call.check(device)?;
        self.pipelines.bind("table backward", &[call.dispatch(device)], &self.bindings)
    }
}
