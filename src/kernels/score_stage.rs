//! Twin of `score_stage.wgsl`.

use super::mask::{self, Masked};
use super::shader;
use crate::kernel::{Kernel, Variant, kernel};
use crate::tensor::DType;

kernel! {
    /// The way of scores to the caller.
    ScoreStage, ScoreStageCall
    tensors {
        scores: One Read F32 one view,
        out: One Write F32 one view,
    }
    // The parts that the scores have been through.
    groups { mask: Masked mask::MaskVariant, }
    numbers {
        heads: u32,
    }
    variant {}
}

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for ScoreStage {
    const LABEL: &'static str = "attention.score_stage";

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("score_stage"), &self.mask.wgsl()];
        self.declare().bool("PER_PAIR_MASK", self.mask.is_per_pair()).kernel(&parts, WORKGROUP as u32, 0)
    }
}

impl ScoreStage {
    pub fn all() -> impl Iterator<Item = Self> {
        mask::MaskVariant::all().into_iter().map(mask::MaskVariant::scores_only).flat_map(|mask| {
            super::floats_beside(&mask).iter().map(move |&out| ScoreStage { scores: DType::F32, out, mask })
        })
    }
}
