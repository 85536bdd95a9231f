//! The host side of `lsh_gather.wgsl`.

use super::lsh_hash::length_of;
use crate::device::{Families, Family};
use crate::kernel::{Declared, FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// A copy of rows in the order of their buckets.
    LshGather, LshGatherCall
    tensors {
        x: One Read F32 one view,
        order: One Read U32 one view,
        lengths: Opt Read U32 one repeating,
        y: One Write F32 one view,
    }
    numbers {
        rounds: u32,
        length: u32,
        chunk: u32,
        ahead: u32,
        dim: u32,
    }
    variant {
        /// True if each row is divided by its length.
        normalises: bool,
    }
}

/// Rows of a workgroup, and invocations of each row, in all kernels that compute rows.
pub(crate) const ROWS: usize = 4;
const ROW_LANES: usize = 16;
pub(super) const WORKGROUP: usize = ROWS * ROW_LANES;

/// Adds the constants of the kernels that compute rows.
pub(super) fn with_rows(declared: Declared) -> Declared {
    declared.u32("ROWS", ROWS as u32).u32("ROW_LANES", ROW_LANES as u32)
}

impl Variant for LshGather {
    const LABEL: &'static str = "attention.lsh_gather";
    const FAMILIES: Families = Families::of(Family::Lsh);

    fn describe(&self) -> Kernel {
        with_rows(self.declare()).bool("NORMALISES", self.normalises).kernel(
            &[shader!("tensor/view"), shader!("lsh/lsh_gather"), length_of(self.lengths)],
            WORKGROUP as u32,
            (2 * WORKGROUP * size_of::<f32>()) as u32,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let order = DType::U32;
        FLOATS.into_iter().flat_map(move |x| {
            [false, true].into_iter().flat_map(move |normalises| {
                [None, Some(DType::U32)].map(|lengths| LshGather { x, order, lengths, y: x, normalises })
            })
        })
    }
}
