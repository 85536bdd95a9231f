//! The host side of `column_sums.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, families, kernel, shader};

kernel! {
    /// The gradient of a projection's bias: sums over all rows.
    ColumnSums, ColumnSumsCall
    tensors {
        d_y: One Read F32 one view,
        sums: One Write F32 one,
    }
    numbers {
        /// The first element of `sums`, and the stride from one sum to the next.
        first: u32,
        stride: u32,
        columns: u32,
        dim: u32,
        /// Rows of all sequences.
        rows: u32,
        /// Rows of one sequence.
        length: u32,
    }
    variant {
        /// True if the sums are added to the values in `sums`.
        accumulates: bool,
    }
}

/// Columns of a workgroup, and the number of invocations that share the rows of a column.
pub(crate) const COLUMNS: usize = 16;
const STRIPS: usize = 16;

impl Variant for ColumnSums {
    const LABEL: &'static str = "attention.column_sums";

    fn describe(&self) -> Kernel {
        let invocations = COLUMNS * STRIPS;
        self.declare()
            .u32("COLUMNS", COLUMNS as u32)
            .u32("STRIPS", STRIPS as u32)
            .bool("ACCUMULATES", self.accumulates)
            .kernel(
                &[shader!("tensor/view"), shader!("matmul/projection/column_sums")],
                invocations as u32,
                (invocations * size_of::<f32>()) as u32,
            )
    }

    fn families(&self) -> Families {
        families(&[Some(Family::RowSums)], &[self.d_y, self.sums])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|d_y| {
            FLOATS.into_iter().flat_map(move |sums| {
                [false, true].into_iter().map(move |accumulates| ColumnSums { d_y, sums, accumulates })
            })
        })
    }
}
