//! Twin of `cache_reorder.wgsl`.

use super::cache::{CacheParams, sequence_table};
use crate::cache::storage::LayoutKind;
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Untyped, Variant, kernel, shader};

kernel! {
    /// The moves of whole sequences. The kernel has one text, because a ring and a contiguous cache
    /// have the same layout of rows.
    CacheReorder, CacheReorderCall
    tensors {
        rows: Raw Write U32 one,
        sequence_table: Raw Read U32 one,
    }
    numbers {
        cache: CacheParams,
        /// Words of a row.
        words: u32,
        groups: u32,
        /// The word at which scales begin.
        scales: u32,
    }
    variant {}
}

impl Variant for CacheReorder {
    const LABEL: &'static str = "attention.cache_reorder";
    const FAMILIES: Families = Families::of(Family::CacheCopies);

    fn describe(&self) -> Kernel {
        let parts =
            [shader!("cache/params"), shader!("cache/sequence_table"), shader!("cache/cache_reorder")];
        self.declare().with(sequence_table(LayoutKind::Contiguous, false)).kernel(&parts, 64, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [CacheReorder { rows: Untyped, sequence_table: Untyped }]
    }
}
