//! Twin of `cache_reorder.wgsl`.

use super::cache::{CacheParams, sequence_table, word_of};
use crate::cache::storage::LayoutKind;
use crate::device::{DeviceFacts, Families, Family};
use crate::kernel::{Kernel, Untyped, Variant, Width, kernel, shader};

kernel! {
    /// The moves of whole sequences. A ring and a contiguous cache have the same layout of rows.
    CacheReorder, CacheReorderCall
    tensors {
        rows: Raw Write U32 width,
        sequence_table: Raw Read U32 one,
    }
    numbers {
        cache: CacheParams,
        /// Words of a head that move, words from one head to the next, and the first word. If
        /// `width` is four, words are vectors.
        run: u32,
        head: u32,
        start: u32,
    }
    variant {
        /// Four for channels, one for scales and positions.
        width: Width,
        /// Words that an invocation has in registers.
        columns: u32,
    }
}

impl Variant for CacheReorder {
    const LABEL: &'static str = "attention.cache_reorder";
    const FAMILIES: Families = Families::of(Family::CacheCopies);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("cache/params"),
            shader!("cache/sequence_table"),
            word_of(self.width),
            shader!("cache/cache_reorder"),
        ];
        let [lanes, steps] = Self::parts(self.columns);
        self.declare()
            .with(sequence_table(LayoutKind::Contiguous, false))
            .u32("LANES", lanes)
            .u32("COLUMNS", self.columns)
            .u32("STEPS", steps)
            .kernel(&parts, lanes, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let forms = [Width::One, Width::Four].into_iter().flat_map(|width| [4, 16].map(|n| (width, n)));
        forms.map(|(width, columns)| CacheReorder { rows: Untyped, sequence_table: Untyped, width, columns })
    }
}

impl CacheReorder {
    /// Invocations of a workgroup, and the times that one loads words. Software drivers have one
    /// invocation with many words.
    fn parts(columns: u32) -> [u32; 2] {
        if columns == 4 { [64, 1] } else { [1, 64] }
    }

    /// Words that an invocation has in registers.
    pub fn columns(device: &DeviceFacts) -> u32 {
        if device.software { 16 } else { 4 }
    }

    /// Workgroups for `run` words.
    pub fn workgroups(run: u32, columns: u32) -> usize {
        let [lanes, steps] = Self::parts(columns);
        run.div_ceil(lanes * steps * columns) as usize
    }
}
