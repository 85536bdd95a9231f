//! Twin of `merge_splits.wgsl`.

use super::{mask, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::MOST_SPLITS;
use crate::tensor::DType;

/// What changes the text of the merge of splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MergeSplits {
    pub out: DType,
    /// Whether out stores in fours.
    pub store: Width,
    pub lse: bool,
    pub sink_logits: Option<DType>,
}

/// Rows of a workgroup, and invocations of a row, as in the shader.
pub(crate) const ROWS: usize = 2;
const ROW_LANES: usize = 32;

params! {
    pub(crate) struct Params {
        out: View,
        lse: View,
        mask: mask::MaskParams,
        heads: u32,
        kv_heads: u32,
        group: u32,
        value_dim: u32,
        rows: u32,
        splits: u32,
        stats: u32,
        first: u32,
    }
}

impl MergeSplits {
    /// The mask, as far as it matters here.
    pub fn mask(&self) -> mask::MaskVariant {
        mask::MaskVariant::with_sink_logits(self.sink_logits)
    }

    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("partial", DType::F32, Width::Four),
            Binding::write("out", self.out, self.store),
        ];
        if self.lse {
            bindings.push(Binding::write("lse", DType::F32, Width::One));
        }
        bindings.extend(self.mask().bindings());
        let constants = [
            Constant::Bool("OUT_IN_FOURS", self.store == Width::Four),
            Constant::Bool("HAS_LSE", self.lse),
            Constant::Bool("NATURAL_SCORES", true),
        ];
        let lse = if self.lse { "" } else { "fn lse_store(o: u32, x: f32) {}\n" };
        let parts = [
            shader!("tensor/view"),
            shader!("softmax/online"),
            shader!("merge_splits"),
            shader!("tensor/out"),
            lse,
            &self.mask().wgsl(),
        ];
        // A total of each invocation, a share of each split.
        let workgroup_memory = (ROWS * (8 * ROW_LANES + 4 * MOST_SPLITS)) as u32;
        Kernel {
            workgroup_memory,
            ..Kernel::new::<Params>(&constants, bindings, &parts, (ROWS * ROW_LANES) as u32)
        }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|out| {
            super::WIDTHS.into_iter().flat_map(move |store| {
                super::FLOATS_OR_NONE.map(|sink_logits| MergeSplits {
                    out,
                    store,
                    lse: sink_logits.is_some(),
                    sink_logits,
                })
            })
        })
    }
}
