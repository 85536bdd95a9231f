//! Twin of `tanh_sum.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The last step of the attentional vector: `tanh(a + b)`.
    TanhSum, TanhSumCall
    tensors {
        a: One Read F32 one view,
        b: One Read F32 one view,
        out: One Write F32 one view,
    }
    numbers {
        channels: u32,
    }
    variant {}
}

/// Invocations of a workgroup, and channels of each invocation.
pub(crate) const WORKGROUP: usize = 64;
pub(crate) const CHANNELS: usize = 4;

impl Variant for TanhSum {
    const LABEL: &'static str = "attention.tanh_sum";
    const FAMILIES: Families = Families::of(Family::Attentional);

    fn describe(&self) -> Kernel {
        let parts =
            [shader!("tensor/view"), shader!("layers/attentional/tanh_sum"), shader!("additive/tanh")];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().map(|out| TanhSum { a: DType::F32, b: DType::F32, out })
    }
}
