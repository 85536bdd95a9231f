//! The host side of `ask_mask.wgsl`.

use super::{MaskVariant, Masked};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The evaluation of a mask for single pairs.
    AskMask, AskMaskCall
    tensors {
        pairs: One Read U32 one,
        scores: One Read F32 one,
        answers: One Write F32 one,
    }
    groups { mask: Masked MaskVariant, }
    numbers { count: u32, }
    variant {
        /// True if the kernel computes the derivative of the score.
        derivative: bool,
    }
}

/// The number of pairs of a workgroup.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for AskMask {
    const LABEL: &'static str = "attention.ask_mask";
    const FAMILIES: Families = Families::of(Family::Masks);

    fn describe(&self) -> Kernel {
        let mask = if self.derivative { self.mask.wgsl_with_slope() } else { self.mask.wgsl_without_slope() };
        let parts = [shader!("tensor/view"), shader!("mask/ask_mask"), mask.as_str()];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let masks = MaskVariant::all().into_iter().map(MaskVariant::scores_only);
        masks.flat_map(|mask| {
            [false, true].map(|derivative| AskMask {
                pairs: DType::U32,
                scores: DType::F32,
                answers: DType::F32,
                mask,
                derivative,
            })
        })
    }
}
