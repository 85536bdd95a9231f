//! Twin of `cache_advance.wgsl`.

use super::cache::{CacheParams, sequence_table};
use crate::cache::storage::LayoutKind;
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Untyped, Variant, kernel, shader};
use crate::tensor::DType;

/// The source of the counts by which sequences move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Counts {
    All,
    Each,
    Device,
}

kernel! {
    /// The kernel that moves the lengths of sequences.
    CacheAdvance, CacheAdvanceCall
    tensors {
        sequence_table: Raw Write U32 one,
        counts: Opt Read U32 one view,
    }
    numbers {
        cache: CacheParams,
        /// The largest count.
        rows: u32,
        back: u32,
    }
    variant {
        counted: Counts,
        layout_kind: LayoutKind,
        compacts: bool,
    }
}

impl Variant for CacheAdvance {
    const LABEL: &'static str = "attention.cache_advance";
    const FAMILIES: Families = Families::of(Family::CacheLengths);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("cache/params"),
            shader!("cache/sequence_table"),
            shader!("cache/cache_advance"),
        ];
        self.declare()
            .with(sequence_table(self.layout_kind, self.compacts))
            .u32("COUNTS", self.counted as u32)
            .kernel(&parts, 64, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let layouts = LayoutKind::ALL.map(|layout_kind| (layout_kind, false));
        let all = layouts.into_iter().chain([(LayoutKind::Contiguous, true)]);
        all.flat_map(|(layout_kind, compacts)| {
            [Counts::All, Counts::Each, Counts::Device].map(|counted| CacheAdvance {
                sequence_table: Untyped,
                counts: (counted == Counts::Device).then_some(DType::U32),
                counted,
                layout_kind,
                compacts,
            })
        })
    }
}
