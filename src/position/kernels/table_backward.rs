//! The host side of `table_backward.wgsl`.

use super::row_positions::{self, PositionParams};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, families, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradient of a learned table of positions.
    TableBackward, TableBackwardCall
    tensors {
        d_out: One Read F32 one view,
        d_table: One Write F32 one view,
        positions: Opt Read U32 one,
    }
    numbers {
        at: PositionParams,
        batch: u32,
        heads: u32,
        length: u32,
        dim: u32,
        /// The number of blocks of `LANES` channels in a row.
        blocks: u32,
        /// The number of blocks in all rows of the table.
        work: u32,
        /// The number of workgroups that share these blocks.
        step: u32,
    }
    variant {
        /// True if the kernel adds the gradient to `d_table`.
        accumulates: bool,
    }
}

/// The number of channels of a workgroup.
pub(crate) const LANES: usize = 64;
/// The words of a bit set of the positions that a workgroup examines together.
const WORDS: usize = 8;

impl Variant for TableBackward {
    const LABEL: &'static str = "attention.table_backward";

    fn describe(&self) -> Kernel {
        self.declare()
            .u32("LANES", LANES as u32)
            .u32("WORDS", WORDS as u32)
            .bool("ACCUMULATES", self.accumulates)
            .kernel(
                &[shader!("tensor/view"), row_positions::SHADER, shader!("position/table_backward")],
                LANES as u32,
                (WORDS * size_of::<u32>()) as u32,
            )
    }

    fn families(&self) -> Families {
        families(&[Some(Family::RowSums)], &[self.d_out, self.d_table])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|d_out| {
            FLOATS.into_iter().flat_map(move |d_table| {
                [None, Some(DType::U32)].into_iter().flat_map(move |positions| {
                    [false, true].map(|accumulates| TableBackward { d_out, d_table, positions, accumulates })
                })
            })
        })
    }
}
