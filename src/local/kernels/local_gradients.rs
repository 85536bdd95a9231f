//! The host side of `local_gradients.wgsl`.

use super::local::length_of;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::rows::totals::{TOTALS_BYTES, WORKGROUP};
use crate::tensor::DType;

kernel! {
    /// The terms of the gradients of local attention.
    LocalGradients, LocalGradientsCall
    tensors {
        q: One Read F32 width repeating,
        k: One Read F32 width repeating,
        v: One Read F32 width repeating,
        d_out: One Read F32 width repeating,
        positions: One Read F32 one repeating,
        lengths: Opt Read U32 one repeating,
        band: One Write F32 one repeating,
        d_positions: Opt Write F32 one repeating,
    }
    numbers {
        q_len: u32,
        kv_len: u32,
        head_dim: u32,
        value_dim: u32,
        batch: u32,
        group: u32,
        /// Heads that share a position.
        heads: u32,
        half_window: i32,
        /// Workgroups that share a head's queries.
        step: u32,
        scale: f32,
        /// 1 / √2σ; 0 without a Gaussian.
        narrowness: f32,
        /// 1 / σ²; 0 without a Gaussian.
        steepness: f32,
    }
    variant {
        /// True if the gradient of positions is added to the contents of `d_positions`.
        accumulates: bool,
        width: Width,
    }
}

impl Variant for LocalGradients {
    const LABEL: &'static str = "attention.local_gradients";
    const FAMILIES: Families = Families::of(Family::LocalGradients);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("local/local_gradients"),
            shader!("local/reach"),
            shader!("local/window_scores"),
            shader!("rows/totals"),
            length_of(self.lengths),
        ];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).bool("ACCUMULATES", self.accumulates).kernel(
            &parts,
            WORKGROUP as u32,
            TOTALS_BYTES,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let f32 = DType::F32;
        FLOATS.into_iter().flat_map(move |dtype| {
            [None, Some(DType::U32)].into_iter().flat_map(move |lengths| {
                [(None, false), (Some(f32), false), (Some(f32), true)].into_iter().flat_map(
                    move |(d_positions, accumulates)| {
                        WIDTHS.map(|width| LocalGradients {
                            q: dtype,
                            k: dtype,
                            v: dtype,
                            d_out: dtype,
                            positions: f32,
                            lengths,
                            band: f32,
                            d_positions,
                            accumulates,
                            width,
                        })
                    },
                )
            })
        })
    }
}
