//! The host side of `hadamard_rows.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::vec4_grid::WORKGROUP;
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};

kernel! {
    /// Rows times a Walsh–Hadamard matrix.
    HadamardRows, HadamardRowsCall
    tensors {
        x: One Read F32 width view,
        out: One Write F32 width view,
    }
    numbers {
        /// Channels of a block.
        block: u32,
        /// Vectors of four channels in a row, and in all rows of a head.
        fours: u32,
        work: u32,
        /// Invocations that share the work of a head.
        step: u32,
        /// 1 / √block.
        scale: f32,
    }
    variant { width: Width, }
}

impl Variant for HadamardRows {
    const LABEL: &'static str = "attention.hadamard_rows";
    const FAMILIES: Families = Families::of(Family::Hadamard);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("tensor/store_four"),
            shader!("cache/hadamard"),
            shader!("cache/hadamard_rows"),
        ];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).bool("IN_FOURS", self.width == Width::Four).kernel(
            &parts,
            WORKGROUP as u32,
            0,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [f32, ..] = FLOATS;
        let types = FLOATS.into_iter().flat_map(move |dtype| [[dtype, f32], [f32, dtype]]).skip(1);
        types.flat_map(|[x, out]| WIDTHS.map(|width| HadamardRows { x, out, width }))
    }
}
