//! The position of each row.

use super::kernels::rotation_table::{DIGITS, LEVELS};
use super::kernels::row_positions::PositionParams;
use crate::device::DeviceFacts;
use crate::kernel::View;
use crate::tensor::{CallTensors, DType, Error, TensorView, axes};

/// The last position of rotary and sinusoidal encodings, 2²⁴ − 1.
pub const MAX_POSITION: u32 = (DIGITS.pow(LEVELS as u32) - 1) as u32;

/// The position of each row. On a device `T` is a [`TensorView`], for the reference a
/// [`HostTensor`](crate::HostTensor).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum RowPositions<T> {
    /// Row `i` of every sequence has position `start + i`.
    Start(u32),
    /// A U32 tensor `[batch or 1, 1, length or 1, 1]` with the position of each row.
    ///
    /// A tensor of length 1 for more rows holds the first position of each sequence. Row `i` then
    /// is `i` positions further. Positions past the last valid position count as that position.
    ///
    /// For a rope with [sections](super::RopeConfig::sections) the tensor may be `[batch or 1, 3,
    /// length or 1, 1]`: positions in time, height and width. With one axis, all three positions of
    /// a row are equal.
    ///
    /// `position_ids` of `transformers` are `[3, batch, length]`. Make the view with
    /// `TensorView::new(ids, DType::U32, [3, batch, length, 1]).transposed(0, 1)`.
    Tensor(T),
}

impl<'a> RowPositions<TensorView<'a>> {
    pub(crate) fn tensor(&self) -> Option<TensorView<'a>> {
        match self {
            RowPositions::Start(_) => None,
            RowPositions::Tensor(t) => Some(*t),
        }
    }

    /// Checks the tensor for rows of `shape`, with positions on one axis. [`check_start`] checks a
    /// start.
    pub(crate) fn check(&self, shape: [usize; 4], tensors: &mut CallTensors<'a, '_>) -> Result<(), Error> {
        self.check_axes(shape, 1, tensors)
    }

    /// Checks the tensor for rows of `shape`, with positions on one axis or on `axes`.
    pub(super) fn check_axes(
        &self,
        [batch, _, length, _]: [usize; 4],
        axes: usize,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<(), Error> {
        let Some(t) = self.tensor() else { return Ok(()) };
        tensors.read_broadcast("positions", t, DType::U32, [batch, t.shape()[1], length, 1])?;
        expect_axes(t.shape(), axes)
    }

    /// True if the tensor has a position for each axis of a rope's sections. Call it after `check`.
    pub(super) fn has_axes(&self) -> bool {
        self.tensor().is_some_and(|t| t.shape()[1] > 1)
    }

    /// Returns the kernel's parameter for rows of `length` and positions up to `last`. Call it
    /// after `check`.
    pub(crate) fn params(&self, length: usize, last: u32, device: &DeviceFacts) -> PositionParams {
        let (view, start, by_row) = match self {
            RowPositions::Start(start) => (View::default(), *start, true),
            RowPositions::Tensor(t) => {
                let by_row = t.shape()[2] != length;
                (View::repeating(*t, device), 0, by_row)
            }
        };
        PositionParams { view, start, by_row: by_row.into(), last, pad: 0 }
    }
}

/// Checks that the axes of a tensor of positions are 1 or `axes`.
pub(super) fn expect_axes(shape: [usize; 4], axes: usize) -> Result<(), Error> {
    let got = shape[1];
    if got == 1 || got == axes {
        return Ok(());
    }
    let expected = match axes {
        1 => "1 (3 are for a rotation by a rope with `RopeConfig::sections`)",
        _ => "3 (time, height and width) or 1",
    };
    let expected = expected.to_string();
    Err(Error::Shape { tensor: "positions", axis: "axes", expected, got, shape, wanted: None })
}

/// Returns the position after the last of `length` rows. A host's slice may claim any length.
fn past(start: u32, length: usize) -> u64 {
    u64::from(start).saturating_add(length as u64)
}

/// Checks that rows do not reach past the last position.
pub(crate) fn check_start<T>(at: &RowPositions<T>, length: usize) -> Result<(), Error> {
    match at {
        RowPositions::Start(start) if past(*start, length) > u64::from(MAX_POSITION) + 1 => {
            let expected = "small enough that `start + length` is at most 2^24";
            Err(Error::Option { option: "start", value: f64::from(*start), expected })
        }
        _ => Ok(()),
    }
}

/// Checks that rows do not reach past the end of a table with a row for each position.
pub(crate) fn check_rows<T>(
    at: &RowPositions<T>,
    length: usize,
    tensor: &'static str,
    shape: [usize; 4],
) -> Result<(), Error> {
    match at {
        RowPositions::Start(start) if past(*start, length) > shape[2] as u64 => Err(Error::Shape {
            tensor,
            axis: axes(tensor)[2],
            expected: format!("at least {} (`start + length`)", past(*start, length)),
            got: shape[2],
            shape,
            wanted: None,
        }),
        _ => Ok(()),
    }
}
