//! Twin of `average_weights.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The kernel of the mean of attention weights over groups of heads.
    AverageWeights, AverageWeightsCall
    tensors {
        weights: One Read F32 one view,
        out: One Write F32 one view,
    }
    numbers {
        out_heads: u32,
        group: u32,
        q_len: u32,
        kv_len: u32,
    }
    variant {}
}

/// Invocations of a workgroup. The shader has the same number.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for AverageWeights {
    const LABEL: &'static str = "attention.average_weights";
    const FAMILIES: Families = Families::of(Family::ScoreOutputs);

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("attention/average_weights")];
        self.declare().kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().map(|out| AverageWeights { weights: DType::F32, out })
    }
}
