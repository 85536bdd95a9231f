//! The host side of `block_scores.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The scores by which queries select blocks of keys.
    BlockScores, BlockScoresCall
    tensors {
        weights: One Read F32 one view,
        scores: One Write F32 one view,
    }
    numbers {
        /// The position of the first query.
        position: u32,
        /// Keys of a block.
        block: u32,
        /// Strides of a block, and of a compressed block.
        block_strides: u32,
        compressed_strides: u32,
        /// Blocks that are always selected: the first ones, and those up to the query's own.
        initial: u32,
        local: u32,
        compressed: u32,
        columns: u32,
        inf: f32,
        neg_inf: f32,
    }
    variant {}
}

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: u32 = 32;

impl Variant for BlockScores {
    const LABEL: &'static str = "attention.block_scores";
    const FAMILIES: Families = Families::of(Family::NativeSparse);

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("selected/native/block_scores")];
        self.declare().u32("WORKGROUP", WORKGROUP).kernel(&parts, WORKGROUP, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [BlockScores { weights: DType::F32, scores: DType::F32 }]
    }
}
