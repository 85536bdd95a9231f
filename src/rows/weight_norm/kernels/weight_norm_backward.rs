//! The host side of `weight_norm_backward.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::rows::totals::{TOTALS_BYTES, WORKGROUP};
use crate::tensor::DType;

kernel! {
    /// The gradients of `gain · x / |x|`.
    WeightNormBackward, WeightNormBackwardCall
    tensors {
        x: One Read F32 one repeating,
        gain: One Read F32 one repeating,
        d_out: One Read F32 one repeating,
        d_x: One Write F32 one repeating,
        d_gain: One Write F32 one repeating,
    }
    numbers {
        dim: u32,
        /// Heads that share a gain.
        heads: u32,
    }
    variant {
        /// True if gradients are added to the values in the outputs.
        accumulates: bool,
    }
}

impl Variant for WeightNormBackward {
    const LABEL: &'static str = "attention.weight_norm_backward";
    const FAMILIES: Families = Families::of(Family::WeightNormGradients);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("rows/weight_norm/weight_norm_backward"),
            shader!("rows/weight_norm/length"),
            shader!("rows/totals"),
        ];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).bool("ACCUMULATES", self.accumulates).kernel(
            &parts,
            WORKGROUP as u32,
            TOTALS_BYTES,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [d_out, d_x, d_gain] = [DType::F32; 3];
        FLOATS.into_iter().flat_map(move |x| {
            [false, true].map(|accumulates| WeightNormBackward {
                x,
                gain: x,
                d_out,
                d_x,
                d_gain,
                accumulates,
            })
        })
    }
}
