//! The host side of `block_means.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::vec4_grid::WORKGROUP;
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::tensor::DType;

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
        width: Width,
    }
}

impl Variant for BlockMeans {
    const LABEL: &'static str = "attention.block_means";
    const FAMILIES: Families = Families::of(Family::NativeSparse);

    fn describe(&self) -> Kernel {
        let parts =
            [shader!("tensor/view"), shader!("tensor/store_four"), shader!("selected/native/block_means")];
        self.declare()
            .u32("WORKGROUP", WORKGROUP as u32)
            .bool("BACKWARD", self.backward)
            .bool("IN_FOURS", self.width == Width::Four)
            .kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let forward = FLOATS.map(|dtype| (dtype, false));
        forward.into_iter().chain([(DType::F32, true)]).flat_map(|(dtype, backward)| {
            WIDTHS.map(|width| BlockMeans { x: dtype, out: dtype, backward, width })
        })
    }
}
