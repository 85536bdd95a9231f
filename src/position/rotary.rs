//! Rotary positions inside of a layer.

use super::{Rotate, Rotation, RowPositions, check_rotation, rotation};
use crate::device::DeviceFacts;
use crate::kernel::Dispatch;
use crate::tensor::{CallTensors, Error, TensorView, same_view};

/// How a layer rotates what it has projected, and where the rows stand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rotary<'a> {
    pub rotation: Rotation<'a>,
    pub at: RowPositions<TensorView<'a>>,
}

impl<'a> Rotary<'a> {
    /// Checks it for rows `[batch, heads, length, dim]`.
    pub fn check(&self, shape: [usize; 4], tensors: &mut CallTensors<'a, '_>) -> Result<(), Error> {
        self.at.check(shape, tensors)?;
        check_rotation(&self.rotation, shape, &self.at, tensors)?;
        match self.rotation {
            Rotation::Rope(rope) => rope.check_width("q", shape),
            Rotation::CosSin { .. } => Ok(()),
        }
    }

    /// Whether both rotate rows alike.
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

    /// The caller's tensors that it reads.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, TensorView<'a>)> + use<'a> {
        let [cos, sin] = match self.rotation {
            Rotation::Rope(_) => [None; 2],
            Rotation::CosSin { cos, sin, .. } => [Some(cos), Some(sin)],
        };
        let all = [("cos", cos), ("sin", sin), ("positions", self.at.tensor())];
        all.into_iter().filter_map(|(name, t)| Some((name, t?)))
    }

    /// Rotates `x` in place; if it is a gradient, `back`.
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
