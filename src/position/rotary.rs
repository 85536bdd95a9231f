//! Rotary positions inside a layer.

use super::{Rotate, Rotation, RowPositions, check_rotation, rotation};
use crate::device::DeviceFacts;
use crate::kernel::Dispatch;
use crate::tensor::{CallTensors, Error, TensorView, same_view};

/// The rotation that a layer applies after its projections, and the positions of the rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rotary<'a> {
    pub rotation: Rotation<'a>,
    pub at: RowPositions<TensorView<'a>>,
}

impl<'a> Rotary<'a> {
    /// Checks the rotation for rows `[batch, heads, length, dim]`.
    pub fn check(&self, shape: [usize; 4], tensors: &mut CallTensors<'a, '_>) -> Result<(), Error> {
        self.at.check_axes(shape, self.rotation.axes(), tensors)?;
        check_rotation(&self.rotation, shape, &self.at, tensors)?;
        match self.rotation {
            Rotation::Rope(rope) => rope.check_width("q", shape),
            Rotation::CosSin { .. } => Ok(()),
        }
    }

    /// True if both rotate rows in the same way.
    pub fn is_same(&self, other: &Rotary) -> bool {
        let at = match (&self.at, &other.at) {
            (RowPositions::Start(a), RowPositions::Start(b)) => a == b,
            (RowPositions::Tensor(a), RowPositions::Tensor(b)) => same_view(a, b),
            _ => false,
        };
        at && match (&self.rotation, &other.rotation) {
            (Rotation::Rope(a), Rotation::Rope(b)) => a.is_same(b),
            (
                Rotation::CosSin { cos: a, sin: b, order },
                Rotation::CosSin { cos: c, sin: d, order: other },
            ) => same_view(a, c) && same_view(b, d) && order == other,
            _ => false,
        }
    }

    /// Returns the caller's tensors that the rotation reads.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, TensorView<'a>)> + use<'a> {
        let [cos, sin] = match self.rotation {
            Rotation::Rope(_) => [None; 2],
            Rotation::CosSin { cos, sin, .. } => [Some(cos), Some(sin)],
        };
        let all = [("cos", cos), ("sin", sin), ("positions", self.at.tensor())];
        all.into_iter().filter_map(|(name, t)| Some((name, t?)))
    }

    /// Returns the dispatch that rotates `x` in place; with `back`, by the opposite angles, for a
    /// gradient.
    pub fn dispatch(
        &self,
        x: TensorView<'a>,
        back: bool,
        device: &DeviceFacts,
    ) -> Result<Dispatch<'a>, Error> {
        let call = Rotate::new(x, self.rotation, self.at);
        rotation(&call, if back { -1.0 } else { 1.0 }, device)
    }
}
