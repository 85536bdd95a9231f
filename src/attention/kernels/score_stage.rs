//! Twin of `score_stage.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::mask::kernels::{MaskVariant, Masked, floats_beside};
use crate::tensor::DType;

kernel! {
    /// The kernel that writes the scores of a stage to the caller's tensor.
    ScoreStage, ScoreStageCall
    tensors {
        scores: One Read F32 one view,
        out: One Write F32 one view,
    }
    // The rules that the kernel applies to the scores.
    groups { mask: Masked MaskVariant, }
    numbers {
        heads: u32,
    }
    variant {}
}

/// Invocations of a workgroup. The shader has the same number.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for ScoreStage {
    const LABEL: &'static str = "attention.score_stage";
    const FAMILIES: Families = Families::of(Family::ScoreOutputs);

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("attention/score_stage"), &self.mask.wgsl()];
        self.declare().bool("PER_PAIR_MASK", self.mask.is_per_pair()).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        MaskVariant::all().into_iter().map(MaskVariant::scores_only).flat_map(|mask| {
            floats_beside(&mask).iter().map(move |&out| ScoreStage { scores: DType::F32, out, mask })
        })
    }
}
