//! The host side of `top_k_sort.wgsl`.

use super::top_k_select::{NONE, lanes};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, FLOATS_OR_NONE, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The second step: sorted blocks of results.
    TopKSort, TopKSortCall
    tensors {
        x: Opt Read F32 one view,
        values: Opt Write F32 one view,
        indices: Opt Write U32 one view,
        pairs: Opt Write U32 one,
    }
    numbers {
        k: u32,
        heads: u32,
        length: u32,
        /// Results of a block, with those past the end of the row: a power of two.
        block: u32,
        neg_inf: f32,
    }
    variant {
        lanes: u32,
        /// The results that the workgroup memory holds.
        most: u32,
    }
}

/// The results of a block: few, for many workgroups per core, or as many as fit in 16 KiB.
pub(crate) const BLOCKS: [u32; 2] = [512, 2048];

impl Variant for TopKSort {
    const LABEL: &'static str = "attention.top_k_sort";
    const FAMILIES: Families = Families::of(Family::TopK);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("rows/logits/place"),
            shader!("rows/logits/sort_key"),
            shader!("rows/logits/results"),
            shader!("rows/logits/top_k_sort"),
        ];
        self.declare().u32("LANES", self.lanes).u32("BLOCK", self.most).u32("NONE", NONE).kernel(
            &parts,
            self.lanes,
            8 * self.most,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let some = Some(DType::U32);
        [false, true].into_iter().flat_map(move |cpu| {
            let lanes = lanes(cpu);
            let last = FLOATS.into_iter().flat_map(move |x| {
                FLOATS_OR_NONE.into_iter().flat_map(move |values| {
                    BLOCKS.map(|most| TopKSort {
                        x: Some(x),
                        values,
                        indices: some,
                        pairs: None,
                        lanes,
                        most,
                    })
                })
            });
            let most = BLOCKS[1];
            last.chain([TopKSort { x: None, values: None, indices: None, pairs: some, lanes, most }])
        })
    }
}
