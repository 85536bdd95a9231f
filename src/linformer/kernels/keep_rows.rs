//! The host side of `keep_rows.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// A copy of rows, with zeros for masked rows.
    KeepRows, KeepRowsCall
    tensors {
        x: One Read F32 one view,
        kept: One Read Bool one repeating,
        y: One Write F32 one view,
    }
    numbers {
        length: u32,
        dim: u32,
    }
    variant {
        /// True if rows are added to the contents of `y`.
        accumulates: bool,
    }
}

/// Rows of a workgroup.
pub(crate) const ROWS: usize = 16;
const WORKGROUP: u32 = 64;

impl Variant for KeepRows {
    const LABEL: &'static str = "attention.keep_rows";
    const FAMILIES: Families = Families::of(Family::AbsentRows);

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("linformer/keep_rows")];
        self.declare()
            .u32("ROWS", ROWS as u32)
            .u32("WORKGROUP", WORKGROUP)
            .bool("ACCUMULATES", self.accumulates)
            .kernel(&parts, WORKGROUP, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let kept = DType::Bool;
        FLOATS.into_iter().flat_map(move |x| {
            FLOATS.into_iter().flat_map(move |y| {
                [false, true].into_iter().map(move |accumulates| KeepRows { x, kept, y, accumulates })
            })
        })
    }
}
