//! The host side of `top_k_merge.wgsl`.

use super::top_k_select::NONE;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, FLOATS_OR_NONE, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The last steps: merged runs of results.
    TopKMerge, TopKMergeCall
    tensors {
        x: Opt Read F32 one view,
        values: Opt Write F32 one view,
        indices: Opt Write U32 one view,
        pairs: One Write U32 one,
    }
    numbers {
        k: u32,
        heads: u32,
        length: u32,
        /// Results of a run before the step.
        run: u32,
        /// The half of the pairs that the step reads.
        half: u32,
        neg_inf: f32,
    }
    variant {}
}

/// Invocations of a workgroup.
pub(crate) const LANES: u32 = 64;

impl Variant for TopKMerge {
    const LABEL: &'static str = "attention.top_k_merge";
    const FAMILIES: Families = Families::of(Family::TopK);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("rows/logits/place"),
            shader!("rows/logits/sort_key"),
            shader!("rows/logits/results"),
            shader!("rows/logits/top_k_merge"),
        ];
        self.declare().u32("LANES", LANES).u32("NONE", NONE).kernel(&parts, LANES, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let (pairs, indices) = (DType::U32, Some(DType::U32));
        let last = FLOATS
            .into_iter()
            .flat_map(move |x| FLOATS_OR_NONE.map(|values| TopKMerge { x: Some(x), values, indices, pairs }));
        last.chain([TopKMerge { x: None, values: None, indices: None, pairs }])
    }
}
