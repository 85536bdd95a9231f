//! Twin of `weight_norm.wgsl`.

use super::local::{TOTALS_BYTES, WORKGROUP};
use super::{FLOATS, shader};
use crate::kernel::{Kernel, Variant, kernel};
use crate::tensor::DType;

kernel! {
    /// Vectors of a given length: `gain · x / |x|`.
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

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("weight_norm"),
            shader!("weight_norm/length"),
            shader!("local/totals"),
        ];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, TOTALS_BYTES)
    }
}

impl WeightNorm {
    pub fn all() -> impl Iterator<Item = Self> {
        FLOATS.into_iter().map(|x| WeightNorm { x, gain: x, out: DType::F32 })
    }
}
