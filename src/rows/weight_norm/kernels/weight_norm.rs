//! The host side of `weight_norm.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::rows::totals::{TOTALS_BYTES, WORKGROUP};
use crate::tensor::DType;

kernel! {
    /// Scales vectors to a length: `gain · x / |x|`.
    WeightNorm, WeightNormCall
    tensors {
        x: One Read F32 one repeating,
        gain: One Read F32 one repeating,
        out: One Write F32 one repeating,
    }
    numbers {
        dim: u32,
    }
    variant {}
}

impl Variant for WeightNorm {
    const LABEL: &'static str = "attention.weight_norm";
    const FAMILIES: Families = Families::of(Family::WeightNorms);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("rows/weight_norm/weight_norm"),
            shader!("rows/weight_norm/length"),
            shader!("rows/totals"),
        ];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, TOTALS_BYTES)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().map(|x| WeightNorm { x, gain: x, out: DType::F32 })
    }
}
