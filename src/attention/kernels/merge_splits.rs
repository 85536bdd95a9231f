//! Twin of `merge_splits.wgsl`.

use crate::attention::plan::MOST_SPLITS;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, FLOATS_OR_NONE, Kernel, Untyped, Variant, WIDTHS, Width, kernel, shader};
use crate::mask::kernels::{MaskParams, MaskVariant};
use crate::tensor::DType;

kernel! {
    /// The kernel that merges splits.
    MergeSplits, MergeSplitsCall
    tensors {
        partial: Raw Read F32 four,
        out: One Write F32 store view,
        lse: Opt Write F32 one view,
        sink_logits: Opt Read F32 one,
    }
    numbers {
        mask: MaskParams,
        heads: u32,
        kv_heads: u32,
        group: u32,
        value_dim: u32,
        /// Packed rows of all sequences and heads.
        rows: u32,
        splits: u32,
        stats: u32,
        /// Workgroups before this dispatch's.
        first: u32,
    }
    variant {
        /// The store width of out.
        store: Width,
    }
}

/// Rows of a workgroup, and invocations of a row. The shader has the same numbers.
pub(crate) const ROWS: usize = 2;
const ROW_LANES: usize = 32;

impl Variant for MergeSplits {
    const LABEL: &'static str = "attention.merge_splits";
    const FAMILIES: Families = Families::of(Family::SplitKeys);

    fn describe(&self) -> Kernel {
        let mask = MaskVariant::with_sink_logits(self.sink_logits).wgsl();
        let parts = [
            shader!("tensor/view"),
            shader!("attention/softmax/online"),
            shader!("attention/merge_splits"),
            shader!("tensor/out"),
            &mask,
        ];
        // A total of each invocation, and a share of each split.
        let workgroup_memory = ROWS * (8 * ROW_LANES + 4 * MOST_SPLITS);
        self.declare().bool("OUT_IN_FOURS", self.store == Width::Four).bool("NATURAL_SCORES", true).kernel(
            &parts,
            (ROWS * ROW_LANES) as u32,
            workgroup_memory as u32,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|out| {
            WIDTHS.into_iter().flat_map(move |store| {
                FLOATS_OR_NONE.map(|sink_logits| MergeSplits {
                    partial: Untyped,
                    out,
                    lse: sink_logits.map(|_| DType::F32),
                    sink_logits,
                    store,
                })
            })
        })
    }
}
