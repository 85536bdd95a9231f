//! The host side of `log_softmax_backward.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::rows::norm::kernels::norm::{ROWS, combine};
use crate::rows::plan::Rows;

kernel! {
    /// The gradient of log-softmax, from its output and the gradient of the output.
    LogSoftmaxBackward, LogSoftmaxBackwardCall
    tensors {
        out: One Read F32 width view,
        d_out: One Read F32 width view,
        d_x: One Write F32 width view,
    }
    numbers {
        columns: u32,
        heads: u32,
        length: u32,
        rows: u32,
        /// The distance from one row of a workgroup or an invocation to its next row.
        step: u32,
        inf: f32,
    }
    variant {
        shares: Rows,
        accumulates: bool,
        width: Width,
    }
}

impl Variant for LogSoftmaxBackward {
    const LABEL: &'static str = "attention.log_softmax_backward";
    const FAMILIES: Families = Families::of(Family::LogSoftmaxGradients);

    fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.shares;
        let (combine, workgroup_memory) = combine(self.shares);
        let parts = [shader!("tensor/view"), shader!("rows/logits/log_softmax_backward"), combine];
        self.declare()
            .u32("WORKGROUP", workgroup)
            .u32("ROW_LANES", lanes)
            .bool("ACCUMULATES", self.accumulates)
            .bool("IN_FOURS", self.width == Width::Four)
            .kernel(&parts, workgroup, workgroup_memory)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        ROWS.into_iter().flat_map(|shares| {
            FLOATS.into_iter().flat_map(move |out| {
                FLOATS.into_iter().flat_map(move |gradient| {
                    WIDTHS.into_iter().flat_map(move |width| {
                        [false, true].map(|accumulates| LogSoftmaxBackward {
                            out,
                            d_out: gradient,
                            d_x: gradient,
                            shares,
                            accumulates,
                            width,
                        })
                    })
                })
            })
        })
    }
}
