//! The host side of `lsh_merge.wgsl`.

use super::lsh_gather::{WORKGROUP, with_rows};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The merge of rounds.
    LshMerge, LshMergeCall
    tensors {
        part_out: One Read F32 one view,
        part_lse: One Read F32 one view,
        ranks: One Read U32 one view,
        out: One Write F32 one view,
        lse: Opt Write F32 one view,
    }
    numbers {
        rounds: u32,
        length: u32,
        value_dim: u32,
        /// −∞.
        neg_inf: f32,
    }
    variant {}
}

impl Variant for LshMerge {
    const LABEL: &'static str = "attention.lsh_merge";
    const FAMILIES: Families = Families::of(Family::Lsh);

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("attention/softmax/online"), shader!("lsh/lsh_merge")];
        with_rows(self.declare()).bool("NATURAL_SCORES", true).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|dtype| {
            [None, Some(DType::F32)].map(|lse| LshMerge {
                part_out: dtype,
                part_lse: DType::F32,
                ranks: DType::U32,
                out: dtype,
                lse,
            })
        })
    }
}
