//! Twin of `merge.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Several, Slots, Variant, View, kernel, params, shader, shared};
use crate::tensor::DType;

/// The parts of one dispatch. With out and lse, they use as many buffers as every device can bind.
pub(crate) const PARTS: usize = Several::MOST;
/// Rows of a workgroup. The shader has the same number.
pub(crate) const ROWS: usize = 4;

params! {
    pub(crate) struct MergePart {
        out: View,
        lse: View,
    }
}
shared! { [MergePart; PARTS] = "array<MergePart, 3>" }

kernel! {
    /// The merge.
    Merge, MergeCall
    tensors {
        out: One Write F32 one view,
        lse: One Write F32 one view,
        part_out: Several Read F32 one,
        part_lse: Several Read F32 one,
    }
    numbers {
        parts: [MergePart; PARTS],
        q_len: u32,
        value_dim: u32,
        /// −∞.
        neg_inf: f32,
    }
    variant {
        /// True if out and lse already hold a merged part.
        accumulates: bool,
    }
}

impl Variant for Merge {
    const LABEL: &'static str = "attention.merge";
    const FAMILIES: Families = Families::of(Family::Merges);

    fn describe(&self) -> Kernel {
        self.declare()
            .u32("PARTS", self.part_out.count as u32)
            .bool("ACCUMULATES", self.accumulates)
            .bool("NATURAL_SCORES", true)
            .kernel(
                &[
                    shader!("tensor/view"),
                    shader!("attention/softmax/online"),
                    shader!("attention/merge/merge"),
                ],
                64,
                0,
            )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        (1..=PARTS).flat_map(|count| {
            [false, true].into_iter().flat_map(move |accumulates| {
                FLOATS.into_iter().flat_map(move |part| {
                    FLOATS.into_iter().map(move |out| Merge {
                        out,
                        lse: DType::F32,
                        part_out: Slots { count, dtype: part },
                        part_lse: Slots { count, dtype: DType::F32 },
                        accumulates,
                    })
                })
            })
        })
    }
}
