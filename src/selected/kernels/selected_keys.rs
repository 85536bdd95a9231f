//! Twin of `selected_keys.wgsl`.

use crate::cache::kernels::cache::{CacheParams, CacheVariant, sequence_table};
use crate::cache::storage::{LayoutKind, StorageKind};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Untyped, Variant, kernel, shader};
use crate::mask::Id;
use crate::mask::kernels::{MaskVariant, Masked};
use crate::tensor::DType;

kernel! {
    /// The kernel that lists the keys of each query.
    SelectedKeys, SelectedKeysCall
    tensors {
        indices: One Read U32 one view,
        // Present if the keys are in a cache.
        sequence_table: OptRaw Read U32 one,
        lists: Raw Write U32 one,
        // Present in the backward pass.
        bitmap: OptRaw Write U32 one,
    }
    // Only the rules that hide keys.
    groups { mask: Masked MaskVariant, }
    numbers {
        cache: CacheParams,
        /// The first batch entry, and the first query.
        batch: u32,
        query: u32,
        /// Queries of a batch entry in this dispatch.
        queries: u32,
        /// Indices of a query.
        count: u32,
        block: u32,
        window: u32,
        list_heads: u32,
        /// Query heads that share a list.
        heads_each: u32,
        /// Words of a list, and words of all lists and lengths of a query.
        capacity: u32,
        row: u32,
        /// Words of keys as bits.
        bitmap_words: u32,
    }
    variant {
        /// The layout of the cache that has the keys.
        layout_kind: Option<LayoutKind>,
        /// True if the kernel writes a bitmap.
        with_bitmap: bool,
        lanes: u32,
    }
}

/// Words of keys as bits that a workgroup has at a time, as in the shader.
pub(crate) const RANGE_WORDS: u32 = 2048;
/// Invocations of a workgroup on a software driver, and on a GPU.
pub(crate) const LANES: [u32; 2] = [8, 64];

impl Variant for SelectedKeys {
    const LABEL: &'static str = "attention.selected_keys";
    const FAMILIES: Families = Families::of(Family::SelectedKeys);

    fn describe(&self) -> Kernel {
        let mask = self.mask.wgsl();
        let mut parts =
            vec![shader!("tensor/view"), shader!("cache/params"), shader!("selected/selected_keys"), &mask];
        let mut declared =
            self.declare().u32("LANES", self.lanes).bool("PER_PAIR_MASK", self.mask.is_per_pair());
        if let Some(layout_kind) = self.layout_kind {
            declared = declared.with(sequence_table(layout_kind, false));
            parts.push(shader!("cache/sequence_table"));
        }
        declared.kernel(&parts, self.lanes, 4 * RANGE_WORDS + (4 * self.lanes).next_multiple_of(16) + 16)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let plain = SelectedKeys {
            indices: DType::U32,
            sequence_table: None,
            lists: Untyped,
            bitmap: None,
            mask: MaskVariant::default(),
            layout_kind: None,
            with_bitmap: false,
            lanes: LANES[1],
        };
        let mut all: Vec<_> = hiding_masks().map(|mask| SelectedKeys { mask, ..plain }).collect();
        all.extend(LANES.map(|lanes| SelectedKeys {
            bitmap: Some(Untyped),
            with_bitmap: true,
            lanes,
            ..plain
        }));
        all.extend([LayoutKind::Contiguous, LayoutKind::Paged].map(|layout_kind| {
            let cache = CacheVariant::of([StorageKind::F32; 2], layout_kind);
            let mask = MaskVariant::with_rules([Id::Causal]).in_cache(&cache);
            let (sequence_table, layout_kind) = (Some(Untyped), Some(layout_kind));
            SelectedKeys { sequence_table, mask, layout_kind, ..plain }
        }));
        all
    }
}

/// Returns no rule, and every rule that only hides keys.
pub(super) fn hiding_masks() -> impl Iterator<Item = MaskVariant> {
    let masks = MaskVariant::all().into_iter();
    let hides =
        |mask: &MaskVariant| !mask.changes_scores() && !mask.has(Id::Blocks) && !mask.has(Id::SinkLogits);
    masks.filter(hides)
}
