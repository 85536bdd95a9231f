//! Twin of `cache_words.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{Kernel, Untyped, Variant, kernel, shader};

kernel! {
    /// The kernel that copies words of the sequence table. It has one text.
    CacheWords, CacheWordsCall
    tensors {
        to: Raw Write U32 one,
        source: Raw Read U32 one,
        moves: Raw Read U32 one,
    }
    numbers {
        /// The first pair of `moves`.
        first: u32,
        /// The number of pairs.
        count: u32,
        /// The last word of `to` and of `source`.
        to_last: u32,
        source_last: u32,
    }
    variant {}
}

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for CacheWords {
    const LABEL: &'static str = "attention.cache_words";
    const FAMILIES: Families = Families::of(Family::CacheLengths);

    fn describe(&self) -> Kernel {
        self.declare().kernel(&[shader!("cache/cache_words")], WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [CacheWords { to: Untyped, source: Untyped, moves: Untyped }]
    }
}
