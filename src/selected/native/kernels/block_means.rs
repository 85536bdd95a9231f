//! The host side of `block_means.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::pieces::FOURS_WORKGROUP;
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};

kernel! {
    /// Means of blocks of rows, or the gradient of the rows.
    BlockMeans, BlockMeansCall
    tensors {
        x: One Read F32 width view,
        out: One Write F32 width view,
    }
    numbers {
        /// Rows of `x`.
        terms: u32,
        /// Rows of a block.
        length: u32,
        /// Rows from the start of a block to the start of the next block.
        stride: u32,
        dim: u32,
        /// Vectors of four channels in a row, and in all rows of a head.
        fours: u32,
        work: u32,
        /// Invocations that share the work of a head.
        step: u32,
        /// 1 / length.
        scale: f32,
    }
    variant {
        backward: bool,
        accumulates: bool,
        width: Width,
    }
}

impl Variant for BlockMeans {
    const LABEL: &'static str = "attention.block_means";
    const FAMILIES: Families = Families::of(Family::NativeSparse);

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("selected/native/block_means")];
        self.declare()
            .u32("WORKGROUP", FOURS_WORKGROUP as u32)
            .bool("BACKWARD", self.backward)
            .bool("ACCUMULATES", self.accumulates)
            .bool("IN_FOURS", self.width == Width::Four)
            .kernel(&parts, FOURS_WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [f32, f16, bf16] = FLOATS;
        let forward = FLOATS.map(|dtype| (dtype, dtype, false, false));
        let backward = [(f32, f32), (f32, f16), (f32, bf16)].map(|(x, out)| (x, out, true, true));
        forward.into_iter().chain(backward).flat_map(|(x, out, backward, accumulates)| {
            WIDTHS.map(|width| BlockMeans { x, out, backward, accumulates, width })
        })
    }
}
