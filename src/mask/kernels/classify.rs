//! The host side of `classify.wgsl`.

use super::{MaskVariant, Masked};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The classification of blocks of pairs.
    Classify, ClassifyCall
    tensors { map: One Write U32 one view, }
    // Only the rules that a block map represents.
    groups { mask: Masked MaskVariant, }
    numbers {
        /// Queries and keys of a block.
        size: [u32; 2],
        map_heads: u32,
        /// The number of batch entries of the problem per entry of the map.
        batches: u32,
        /// The number of heads of the problem per head of the map.
        heads: u32,
    }
    variant {}
}

impl Variant for Classify {
    const LABEL: &'static str = "attention.classify";
    const FAMILIES: Families = Families::of(Family::Masks);

    fn describe(&self) -> Kernel {
        let mask = self.mask.wgsl();
        let parts = [shader!("tensor/view"), shader!("mask/classify"), shader!("mask/document_range"), &mask];
        // Each of 64 invocations has a word and a summary of 40 bytes. Eight more summaries combine
        // those of the invocations.
        self.declare().bool("PER_PAIR_MASK", self.mask.is_per_pair()).kernel(&parts, 64, 64 * 4 + 72 * 40)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let masks = MaskVariant::all().into_iter().map(MaskVariant::blocks_only);
        masks.map(|mask| Classify { map: DType::U32, mask })
    }
}
