//! Twin of `cache_copy.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{Kernel, Untyped, Variant, kernel, shader};

kernel! {
    /// The copy of a page. The kernel has one text.
    CacheCopy, CacheCopyCall
    tensors {
        rows: Raw Write U32 one,
    }
    numbers {
        /// First row of the page.
        src: u32,
        dst: u32,
        /// Slots to copy, of `page_len`.
        slots: u32,
        page_len: u32,
        kv_heads: u32,
        /// Words of a row.
        words: u32,
        groups: u32,
        /// The word at which scales begin.
        scales: u32,
    }
    variant {}
}

impl Variant for CacheCopy {
    const LABEL: &'static str = "attention.cache_copy";
    const FAMILIES: Families = Families::of(Family::CacheCopies);

    fn describe(&self) -> Kernel {
        self.declare().kernel(&[shader!("cache/cache_copy")], 64, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [CacheCopy { rows: Untyped }]
    }
}
