//! Twin of `tanh_backward.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradient of a tanh's argument, from the tanh's output and the gradient of that output.
    TanhBackward, TanhBackwardCall
    tensors {
        out: One Read F32 one view,
        d_out: One Read F32 one view,
        d_sum: One Write F32 one view,
    }
    numbers {
        channels: u32,
    }
    variant {}
}

/// Invocations of a workgroup. Each computes one element.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for TanhBackward {
    const LABEL: &'static str = "attention.tanh_backward";
    const FAMILIES: Families = Families::of(Family::AttentionalGradients);

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("layers/attentional/tanh_backward")];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let d_sum = DType::F32;
        FLOATS
            .into_iter()
            .flat_map(move |out| FLOATS.into_iter().map(move |d_out| TanhBackward { out, d_out, d_sum }))
    }
}
