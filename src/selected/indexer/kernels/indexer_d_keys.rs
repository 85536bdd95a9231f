//! The host side of `indexer_d_keys.wgsl`.

use super::indexer_d_queries::CHUNK;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, families, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradient of keys.
    IndexerDKeys, IndexerDKeysCall
    tensors {
        q: One Read F32 width view,
        k: One Read F32 width view,
        w: One Read F32 one view,
        ranges: One Read U32 one,
        d_scores: One Read F32 one view,
        // The sums of earlier spans.
        sums: Opt Write F32 one view,
        d_k: Opt Write F32 one view,
    }
    numbers {
        /// The first batch entry and the first query of the span, in `ranges`.
        span: [u32; 2],
        all_queries: u32,
        heads: u32,
        queries: u32,
        /// Queries whose products are computed together.
        group: u32,
        head_dim: u32,
        /// 1 if `sums` has the sum of earlier spans.
        adds: u32,
        scale: f32,
    }
    variant {
        lanes: u32,
        width: Width,
    }
}

impl Variant for IndexerDKeys {
    const LABEL: &'static str = "attention.indexer_d_keys";

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("selected/indexer/queries"),
            shader!("selected/indexer/rows"),
            shader!("selected/indexer/indexer_d_keys"),
        ];
        self.declare().u32("LANES", self.lanes).u32("CHUNK", CHUNK).kernel(&parts, self.lanes, 4 * CHUNK)
    }

    fn families(&self) -> Families {
        families(&[Some(Family::IndexerGradients)], &[self.q, self.k, self.w, self.d_scores])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let sums = Some(DType::F32);
        [8, 64].into_iter().flat_map(move |lanes| {
            FLOATS.into_iter().flat_map(move |dtype| {
                let written = [(None, Some(dtype)), (sums, None), (sums, Some(dtype))];
                written.into_iter().flat_map(move |(sums, d_k)| {
                    WIDTHS.map(|width| IndexerDKeys {
                        q: dtype,
                        k: dtype,
                        w: dtype,
                        ranges: DType::U32,
                        d_scores: dtype,
                        sums,
                        d_k,
                        lanes,
                        width,
                    })
                })
            })
        })
    }
}
