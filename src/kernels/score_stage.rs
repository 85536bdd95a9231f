//! Twin of `score_stage.wgsl`.

use super::{mask, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the way of scores to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ScoreStage {
    pub out: DType,
    /// The parts that the scores have been through.
    pub mask: mask::MaskVariant,
}

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        scores: View,
        out: View,
        mask: mask::MaskParams,
        heads: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl ScoreStage {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("scores", DType::F32, Width::One),
            Binding::write("out", self.out, Width::One),
        ];
        bindings.extend(self.mask.bindings());
        let constants = [Constant::Bool("PER_PAIR_MASK", self.mask.is_per_pair())];
        let parts = [shader!("tensor/view"), shader!("score_stage"), &self.mask.wgsl()];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        mask::MaskVariant::all()
            .into_iter()
            .map(mask::MaskVariant::scores_only)
            .flat_map(|mask| super::floats_beside(&mask).iter().map(move |&out| ScoreStage { out, mask }))
    }
}
