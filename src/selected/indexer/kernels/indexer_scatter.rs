//! The host side of `indexer_scatter.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, families, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// A matrix of gradients of scores, from those at listed keys.
    IndexerScatter, IndexerScatterCall
    tensors {
        indices: One Read U32 one view,
        d_scores: One Read F32 one view,
        dense: One Write F32 one,
    }
    numbers {
        queries: u32,
        keys: u32,
        k: u32,
    }
    variant { lanes: u32, }
}

impl Variant for IndexerScatter {
    const LABEL: &'static str = "attention.indexer_scatter";

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("selected/indexer/indexer_scatter")];
        self.declare().u32("LANES", self.lanes).kernel(&parts, self.lanes, 0)
    }

    fn families(&self) -> Families {
        families(&[Some(Family::IndexerGradients)], &[self.d_scores])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [8, 64].into_iter().flat_map(|lanes| {
            FLOATS.map(|d_scores| IndexerScatter { indices: DType::U32, d_scores, dense: DType::F32, lanes })
        })
    }
}
