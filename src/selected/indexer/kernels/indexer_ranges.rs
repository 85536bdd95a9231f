//! The host side of `indexer_ranges.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::mask::kernels::{MaskVariant, Masked};
use crate::tensor::DType;

kernel! {
    /// The range of keys of each query.
    IndexerRanges, IndexerRangesCall
    tensors {
        ranges: One Write U32 one,
    }
    groups { mask: Masked MaskVariant, }
    numbers {
    }
    variant {}
}

/// Queries of a workgroup.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for IndexerRanges {
    const LABEL: &'static str = "attention.indexer_ranges";
    const FAMILIES: Families = Families::of(Family::Indexers);

    fn describe(&self) -> Kernel {
        let mask = self.mask.wgsl();
        let parts = [shader!("tensor/view"), shader!("selected/indexer/indexer_ranges"), mask.as_str()];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let ranges = MaskVariant::all().into_iter().filter(MaskVariant::is_range);
        ranges.map(|mask| IndexerRanges { ranges: DType::U32, mask })
    }
}
