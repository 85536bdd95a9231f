//! What the kernels of local attention share.

use super::{FLOATS, WIDTHS};
use crate::kernel::{Binding, Width};
use crate::tensor::DType;

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: usize = 64;
/// Workgroup memory of totals.
pub(super) const TOTALS_BYTES: u32 = (WORKGROUP * size_of::<f32>()) as u32;

/// Bindings and text of the lengths of sequences; without them all keys are there.
pub(super) fn lengths(given: bool, bindings: &mut Vec<Binding>) -> &'static str {
    if given {
        bindings.push(Binding::read("lengths", DType::U32, Width::One));
        "fn length_of(b: u32) -> u32 { return lengths_at(view_at(p.lengths, b, 0u, 0u, 0u)); }\n"
    } else {
        "fn length_of(b: u32) -> u32 { return p.kv_len; }\n"
    }
}

/// What changes the text of sums over a window, of which there are two kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WindowSums {
    pub x: DType,
    pub y: DType,
    /// Whether sequences have lengths.
    pub lengths: bool,
    /// Whether sums are added to what is there.
    pub accumulates: bool,
    /// Of x and y.
    pub width: Width,
}

impl WindowSums {
    pub(super) fn bindings(&self) -> (Vec<Binding>, &'static str) {
        let mut bindings = vec![
            Binding::read("band", DType::F32, Width::One),
            Binding::read("x", self.x, self.width),
            Binding::read("positions", DType::F32, Width::One),
        ];
        let lengths = lengths(self.lengths, &mut bindings);
        bindings.push(Binding::write("y", self.y, self.width));
        (bindings, lengths)
    }

    /// Sums of the type of what is summed, or F32.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let kinds = FLOATS.into_iter().flat_map(|x| {
            let widened = (x != DType::F32).then_some(DType::F32);
            [Some(x), widened].into_iter().flatten().map(move |y| (x, y))
        });
        kinds.flat_map(|(x, y)| {
            [[false; 2], [false, true], [true, false], [true; 2]].into_iter().flat_map(
                move |[lengths, accumulates]| {
                    WIDTHS.map(|width| WindowSums { x, y, lengths, accumulates, width })
                },
            )
        })
    }
}
