//! The host side of `local_columns.wgsl`.

use super::local::{length_of, window_sums};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, Width, kernel, shader};
use crate::rows::totals::WORKGROUP;
use crate::tensor::DType;

kernel! {
    /// Sums over the queries whose window contains a key.
    LocalColumns, LocalColumnsCall
    tensors {
        band: One Read F32 one repeating,
        x: One Read F32 width repeating,
        positions: One Read F32 one repeating,
        lengths: Opt Read U32 one repeating,
        y: One Write F32 width repeating,
    }
    numbers {
        q_len: u32,
        kv_len: u32,
        dim: u32,
        group: u32,
        half_window: i32,
        /// Groups of four channels in a row.
        fours: u32,
        /// Groups of four channels in all keys of a head.
        work: u32,
        /// Invocations that share these groups.
        step: u32,
    }
    variant {
        /// True if sums are added to the contents of `y`.
        accumulates: bool,
        width: Width,
    }
}

impl Variant for LocalColumns {
    const LABEL: &'static str = "attention.local_columns";
    const FAMILIES: Families = Families::of(Family::LocalGradients);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("local/local_columns"),
            shader!("local/reach"),
            shader!("local/store"),
            length_of(self.lengths),
        ];
        self.declare()
            .u32("WORKGROUP", WORKGROUP as u32)
            .bool("ACCUMULATES", self.accumulates)
            .bool("IN_FOURS", self.width == Width::Four)
            .kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [band, positions] = [DType::F32; 2];
        window_sums().map(move |([x, y], lengths, accumulates, width)| LocalColumns {
            band,
            x,
            positions,
            lengths,
            y,
            accumulates,
            width,
        })
    }
}
