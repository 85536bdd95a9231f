//! The host side of `indexer_d_queries.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, families, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradients of queries and weights.
    IndexerDQueries, IndexerDQueriesCall
    tensors {
        q: One Read F32 width view,
        k: One Read F32 width view,
        w: One Read F32 one view,
        ranges: One Read U32 one,
        d_scores: One Read F32 one view,
        indices: Opt Read U32 one view,
        d_q: Opt Write F32 one view,
        d_w: Opt Write F32 one view,
    }
    numbers {
        /// The first batch entry and the first query of the span, in `ranges`.
        span: [u32; 2],
        all_queries: u32,
        heads: u32,
        head_dim: u32,
        /// The length of the lists.
        listed: u32,
        scale: f32,
    }
    variant {
        lanes: u32,
        width: Width,
    }
}

/// The products that a workgroup computes at once.
pub(crate) const CHUNK: u32 = 64;

impl Variant for IndexerDQueries {
    const LABEL: &'static str = "attention.indexer_d_queries";

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("selected/indexer/queries"),
            shader!("selected/indexer/rows"),
            shader!("selected/indexer/indexer_d_queries"),
        ];
        let memory = 8 * CHUNK + 4 * self.lanes;
        self.declare().u32("LANES", self.lanes).u32("CHUNK", CHUNK).kernel(&parts, self.lanes, memory)
    }

    fn families(&self) -> Families {
        families(&[Some(Family::IndexerGradients)], &[self.q, self.k, self.w, self.d_scores])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [8, 64].into_iter().flat_map(|lanes| {
            FLOATS.into_iter().flat_map(move |dtype| {
                [None, Some(DType::U32)].into_iter().flat_map(move |indices| {
                    let written = [(Some(dtype), None), (None, Some(dtype)), (Some(dtype), Some(dtype))];
                    written.into_iter().flat_map(move |(d_q, d_w)| {
                        WIDTHS.map(|width| IndexerDQueries {
                            q: dtype,
                            k: dtype,
                            w: dtype,
                            ranges: DType::U32,
                            d_scores: dtype,
                            indices,
                            d_q,
                            d_w,
                            lanes,
                            width,
                        })
                    })
                })
            })
        })
    }
}
