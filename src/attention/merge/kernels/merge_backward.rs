//! Twin of `merge_backward.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradients of a part.
    MergeBackward, MergeBackwardCall
    tensors {
        part_out: One Read F32 one view,
        part_lse: One Read F32 one view,
        out: One Read F32 one view,
        lse: One Read F32 one view,
        d_out: One Read F32 one view,
        d_lse: Opt Read F32 one view,
        d_part_out: One Write F32 one view,
        d_part_lse: One Write F32 one view,
    }
    numbers {
        q_len: u32,
        value_dim: u32,
        /// −∞.
        neg_inf: f32,
    }
    variant {}
}

/// Rows of a workgroup.
pub(crate) const ROWS: usize = 4;
/// Invocations that share a row.
const ROW_LANES: usize = 16;

const D_LSE: &str =
    "fn d_lse_of(b: u32, h: u32, i: u32) -> f32 { return d_lse_at(view_at(p.d_lse, b, h, i, 0u)); }\n";
const NO_D_LSE: &str = "fn d_lse_of(b: u32, h: u32, i: u32) -> f32 { return 0.0; }\n";

impl Variant for MergeBackward {
    const LABEL: &'static str = "attention.merge_backward";
    const FAMILIES: Families = Families::of(Family::MergeGradients);

    fn describe(&self) -> Kernel {
        let d_lse = if self.d_lse.is_some() { D_LSE } else { NO_D_LSE };
        let invocations = ROWS * ROW_LANES;
        self.declare().u32("ROWS", ROWS as u32).u32("ROW_LANES", ROW_LANES as u32).kernel(
            &[shader!("tensor/view"), shader!("attention/merge/merge_backward"), d_lse],
            invocations as u32,
            (invocations * size_of::<f32>()) as u32,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|part_out| {
            FLOATS.into_iter().flat_map(move |out| {
                [None, Some(DType::F32)].into_iter().flat_map(move |d_lse| {
                    [[out, part_out], [DType::F32, part_out], [out, DType::F32]].into_iter().map(
                        move |[d_out, d_part_out]| MergeBackward {
                            part_out,
                            part_lse: DType::F32,
                            out,
                            lse: DType::F32,
                            d_out,
                            d_lse,
                            d_part_out,
                            d_part_lse: DType::F32,
                        },
                    )
                })
            })
        })
    }
}
