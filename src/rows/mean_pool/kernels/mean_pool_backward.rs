//! The host side of `mean_pool_backward.wgsl`.

use super::mean_pool::{Pooled, each};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, Width, kernel, shader};
use crate::rows::norm::kernels::norm::combine;
use crate::rows::plan::Rows;

kernel! {
    /// The gradient of the rows of each sequence.
    MeanPoolBackward, MeanPoolBackwardCall
    tensors {
        // The gradient needs x if the means were divided by their length.
        x: Opt Read F32 width view,
        numbers: Opt Read U32 one view,
        keep: Opt Read Bool one view,
        d_out: One Read F32 width view,
        d_x: One Write F32 width view,
    }
    numbers {
        features: u32,
        length: u32,
        sequences: u32,
        /// The distance from one sequence of a workgroup or an invocation to its next sequence.
        step: u32,
        eps: f32,
    }
    variant {
        rows: Rows,
        pooled: Pooled,
        accumulates: bool,
        width: Width,
    }
}

impl Variant for MeanPoolBackward {
    const LABEL: &'static str = "attention.mean_pool_backward";
    const FAMILIES: Families = Families::of(Family::MeanPoolGradients);

    fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.rows;
        let (combine, workgroup_memory) = combine(self.rows);
        let parts = [
            shader!("tensor/view"),
            shader!("rows/mean_pool/sequence"),
            shader!("rows/mean_pool/mean_pool_backward"),
            combine,
        ];
        self.pooled
            .constants(self.declare())
            .u32("WORKGROUP", workgroup)
            .u32("ROW_LANES", lanes)
            .bool("L2", self.x.is_some())
            .bool("ACCUMULATES", self.accumulates)
            .bool("IN_FOURS", self.width == Width::Four)
            .kernel(&parts, workgroup, workgroup_memory)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        each().map(|(rows, pooled, l2, [d_out, d_x], width)| {
            let ([numbers, keep], accumulates) = (pooled.types(), (width == Width::One) != l2);
            MeanPoolBackward {
                x: l2.then_some(d_out),
                numbers,
                keep,
                d_out,
                d_x,
                rows,
                pooled,
                accumulates,
                width,
            }
        })
    }
}
