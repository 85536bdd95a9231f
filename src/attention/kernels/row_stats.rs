//! Twin of `row_stats.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Untyped, Variant, WIDTHS, Width, families, kernel, shader};
use crate::tensor::DType;

pub(crate) const WORKGROUP: usize = 64;

kernel! {
    /// The kernel of the query statistics that the backward pass needs.
    RowStats, RowStatsCall
    tensors {
        out: One Read F32 width view,
        d_out: One Read F32 width view,
        lse: One Read F32 one view,
        d_lse: Opt Read F32 one view,
        row_stats: Raw Write F32 one,
    }
    numbers {
        heads: u32,
        q_len: u32,
        value_dim: u32,
        /// Workgroups before those of this dispatch.
        first: u32,
        rows: u32,
        /// −∞: WGSL has no literal for it.
        neg_inf: f32,
    }
    variant { width: Width, }
}

impl Variant for RowStats {
    const LABEL: &'static str = "attention.row_stats";

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("attention/row_stats")];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn families(&self) -> Families {
        families(&[Some(Family::RowStats)], &[self.out, self.d_out])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |dtype| {
            WIDTHS.into_iter().flat_map(move |width| {
                [None, Some(DType::F32)].map(|d_lse| RowStats {
                    out: dtype,
                    d_out: dtype,
                    lse: DType::F32,
                    d_lse,
                    row_stats: Untyped,
                    width,
                })
            })
        };
        FLOATS.into_iter().flat_map(of)
    }
}
