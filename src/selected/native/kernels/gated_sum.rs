//! The host side of `gated_sum.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::vec4_grid::WORKGROUP;
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};

kernel! {
    /// The sum of three branches of attention, each times its gate.
    GatedSum, GatedSumCall
    tensors {
        branches: One Read F32 width view,
        gates: One Read F32 one view,
        out: One Write F32 width view,
    }
    numbers {
        batch: u32,
        dim: u32,
        /// Vectors of four channels in a row, and in all rows of a head.
        fours: u32,
        work: u32,
        /// Invocations that share the work of a head.
        step: u32,
    }
    variant { width: Width, }
}

impl Variant for GatedSum {
    const LABEL: &'static str = "attention.gated_sum";
    const FAMILIES: Families = Families::of(Family::NativeSparse);

    fn describe(&self) -> Kernel {
        let parts =
            [shader!("tensor/view"), shader!("tensor/store_four"), shader!("selected/native/gated_sum")];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).bool("IN_FOURS", self.width == Width::Four).kernel(
            &parts,
            WORKGROUP as u32,
            0,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [f32, ..] = FLOATS;
        let types = FLOATS
            .map(|dtype| [dtype; 2])
            .into_iter()
            .chain(FLOATS.map(|dtype| [dtype, f32]).into_iter().skip(1));
        types.flat_map(|[dtype, gates]| {
            WIDTHS.map(|width| GatedSum { branches: dtype, gates, out: dtype, width })
        })
    }
}
