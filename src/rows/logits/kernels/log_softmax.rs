//! The host side of `log_softmax.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::rows::norm::kernels::norm::{ROWS, combine};
use crate::rows::plan::Rows;

kernel! {
    /// The logarithm of the softmax of each row.
    LogSoftmax, LogSoftmaxCall
    tensors {
        x: One Read F32 width view,
        out: One Write F32 width view,
    }
    numbers {
        columns: u32,
        heads: u32,
        length: u32,
        rows: u32,
        /// The distance from one row of a workgroup or an invocation to its next row.
        step: u32,
        inf: f32,
        nan: f32,
    }
    variant {
        shares: Rows,
        width: Width,
    }
}

impl Variant for LogSoftmax {
    const LABEL: &'static str = "attention.log_softmax";
    const FAMILIES: Families = Families::of(Family::LogSoftmax);

    fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.shares;
        let (combine, workgroup_memory) = combine(self.shares);
        let parts = [shader!("tensor/view"), shader!("rows/logits/log_softmax"), combine];
        self.declare()
            .u32("WORKGROUP", workgroup)
            .u32("ROW_LANES", lanes)
            .bool("IN_FOURS", self.width == Width::Four)
            .kernel(&parts, workgroup, workgroup_memory)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        ROWS.into_iter().flat_map(|shares| {
            FLOATS.into_iter().flat_map(move |x| {
                FLOATS
                    .into_iter()
                    .flat_map(move |out| WIDTHS.map(|width| LogSoftmax { x, out, shares, width }))
            })
        })
    }
}
