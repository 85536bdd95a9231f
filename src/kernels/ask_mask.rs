//! Twin of `ask_mask.wgsl`.

use super::{mask, shader};
use crate::kernel::{Binding, Constant, Kernel, Width, params};
use crate::tensor::DType;

/// What changes the text of the questions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AskMask {
    /// Whether the score's derivative is asked for.
    pub derivative: bool,
    pub mask: mask::MaskVariant,
}

/// Pairs of a workgroup.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        mask: mask::MaskParams,
        count: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl AskMask {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("pairs", DType::U32, Width::One),
            Binding::read("scores", DType::F32, Width::One),
            Binding::write("answers", DType::F32, Width::One),
        ];
        bindings.extend(self.mask.bindings());
        let constants = [Constant::U32("WORKGROUP", WORKGROUP as u32)];
        let mask = if self.derivative { self.mask.wgsl_with_slope() } else { self.mask.wgsl_without_slope() };
        let parts = [shader!("tensor/view"), shader!("ask_mask"), mask.as_str()];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let masks = mask::MaskVariant::all().into_iter().map(mask::MaskVariant::scores_only);
        masks.flat_map(|mask| [false, true].map(|derivative| AskMask { derivative, mask }))
    }
}
