//! The host side of `local_positions_backward.wgsl`.

use super::local::length_of;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::rows::totals::{TOTALS_BYTES, WORKGROUP};
use crate::tensor::DType;

kernel! {
    /// The gradients of predicted positions.
    LocalPositionsBackward, LocalPositionsBackwardCall
    tensors {
        x: One Read F32 one repeating,
        vector: One Read F32 one repeating,
        lengths: Opt Read U32 one repeating,
        d_positions: One Read F32 one repeating,
        d_x: One Write F32 one repeating,
        terms: One Write F32 one repeating,
    }
    numbers {
        rows: u32,
        /// Keys of each sequence if there are no lengths.
        kv_len: u32,
        units: u32,
        /// Workgroups that share a batch entry's rows.
        step: u32,
    }
    variant {}
}

impl Variant for LocalPositionsBackward {
    const LABEL: &'static str = "attention.local_positions_backward";
    const FAMILIES: Families = Families::of(Family::LocalGradients);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("local/local_positions_backward"),
            shader!("local/predict"),
            shader!("rows/totals"),
            shader!("additive/tanh"),
            length_of(self.lengths),
        ];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, TOTALS_BYTES)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [x, d_positions, d_x, terms] = [DType::F32; 4];
        FLOATS.into_iter().flat_map(move |vector| {
            [None, Some(DType::U32)].map(|lengths| LocalPositionsBackward {
                x,
                vector,
                lengths,
                d_positions,
                d_x,
                terms,
            })
        })
    }
}
