//! Twin of `cache_compact.wgsl`.

use super::cache::{CacheParams, sequence_table, word_of};
use crate::cache::storage::LayoutKind;
use crate::device::{DeviceFacts, Families, Family};
use crate::kernel::{Kernel, Untyped, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The kernel that removes tokens.
    CacheCompact, CacheCompactCall
    tensors {
        rows: Raw Write U32 width,
        sequence_table: Raw Read U32 one,
        keep: One Read U32 one repeating,
    }
    numbers {
        cache: CacheParams,
        /// The largest number of tokens that a sequence keeps.
        most: u32,
        /// Words of a row, and the word at which the rows begin. If `width` is four they are
        /// vectors.
        words: u32,
        start: u32,
    }
    variant {
        layout_kind: LayoutKind,
        /// Four for channels, one for scales and positions.
        width: Width,
        /// Words of a row that an invocation moves.
        columns: u32,
    }
}

impl Variant for CacheCompact {
    const LABEL: &'static str = "attention.cache_compact";
    const FAMILIES: Families = Families::of(Family::CacheCopies);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("cache/params"),
            shader!("cache/sequence_table"),
            word_of(self.width),
            shader!("cache/cache_compact"),
        ];
        let lanes = Self::lanes(self.columns);
        self.declare()
            .with(sequence_table(self.layout_kind, true))
            .u32("LANES", lanes)
            .u32("BLOCK", if self.columns == 1 { 8 } else { 32 / self.columns })
            .u32("COLUMNS", self.columns)
            .kernel(&parts, lanes, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [LayoutKind::Contiguous, LayoutKind::Paged].into_iter().flat_map(|layout_kind| {
            let widths = [Width::One, Width::Four].into_iter();
            let forms = widths.flat_map(|width| [1, 8, 16, 32].map(|columns| (width, columns)));
            forms.map(move |(width, columns)| CacheCompact {
                rows: Untyped,
                sequence_table: Untyped,
                keep: DType::U32,
                layout_kind,
                width,
                columns,
            })
        })
    }
}

impl CacheCompact {
    /// Invocations of a workgroup. Software drivers have one with many columns.
    fn lanes(columns: u32) -> u32 {
        if columns == 1 { 32 } else { 1 }
    }

    /// Words of a row of `words` that an invocation moves.
    pub fn columns(words: u32, device: &DeviceFacts) -> u32 {
        match device.software {
            false => 1,
            true if words >= 32 => 32,
            true if words >= 16 => 16,
            true => 8,
        }
    }

    /// Workgroups for the words of a row.
    pub fn workgroups(words: u32, columns: u32) -> usize {
        words.div_ceil(Self::lanes(columns) * columns) as usize
    }
}
