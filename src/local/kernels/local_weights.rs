//! The host side of `local_weights.wgsl`.

use super::local::length_of;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::rows::totals::{TOTALS_BYTES, WORKGROUP};
use crate::tensor::DType;

kernel! {
    /// Weights of the keys in each query's window.
    LocalWeights, LocalWeightsCall
    tensors {
        q: One Read F32 width repeating,
        k: One Read F32 width repeating,
        positions: One Read F32 one repeating,
        lengths: Opt Read U32 one repeating,
        band: One Write F32 one repeating,
        weights: Opt Write F32 one repeating,
    }
    numbers {
        q_len: u32,
        kv_len: u32,
        head_dim: u32,
        group: u32,
        half_window: i32,
        /// Workgroups that share a head's queries.
        step: u32,
        scale: f32,
        /// 1 / √2σ; 0 without a Gaussian.
        narrowness: f32,
    }
    variant {
        width: Width,
    }
}

impl Variant for LocalWeights {
    const LABEL: &'static str = "attention.local_weights";
    const FAMILIES: Families = Families::of(Family::LocalAttention);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("local/local_weights"),
            shader!("local/reach"),
            shader!("local/window_scores"),
            shader!("rows/totals"),
            length_of(self.lengths),
        ];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, TOTALS_BYTES)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [positions, band] = [DType::F32; 2];
        FLOATS.into_iter().flat_map(move |dtype| {
            [None, Some(DType::U32)].into_iter().flat_map(move |lengths| {
                [None, Some(DType::F32)].into_iter().flat_map(move |weights| {
                    WIDTHS.map(|width| LocalWeights {
                        q: dtype,
                        k: dtype,
                        positions,
                        lengths,
                        band,
                        weights,
                        width,
                    })
                })
            })
        })
    }
}
