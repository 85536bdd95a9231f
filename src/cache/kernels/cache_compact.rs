//! Twin of `cache_compact.wgsl`.

use super::cache::{CacheParams, sequence_table};
use crate::cache::storage::LayoutKind;
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Untyped, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The kernel that removes tokens.
    CacheCompact, CacheCompactCall
    tensors {
        rows: Raw Write U32 one,
        sequence_table: Raw Read U32 one,
        keep: One Read U32 one repeating,
    }
    numbers {
        cache: CacheParams,
        /// The largest number of tokens that a sequence keeps.
        most: u32,
        /// Words of a row.
        words: u32,
        groups: u32,
        /// The word at which scales begin.
        scales: u32,
    }
    variant {
        layout_kind: LayoutKind,
    }
}

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for CacheCompact {
    const LABEL: &'static str = "attention.cache_compact";
    const FAMILIES: Families = Families::of(Family::CacheCopies);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("cache/params"),
            shader!("cache/sequence_table"),
            shader!("cache/cache_compact"),
        ];
        self.declare().with(sequence_table(self.layout_kind, true)).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [LayoutKind::Contiguous, LayoutKind::Paged].map(|layout_kind| CacheCompact {
            rows: Untyped,
            sequence_table: Untyped,
            keep: DType::U32,
            layout_kind,
        })
    }
}
