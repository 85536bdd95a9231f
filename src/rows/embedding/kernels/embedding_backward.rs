//! The host side of `embedding_backward.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradient of the table of an embedding.
    EmbeddingBackward, EmbeddingBackwardCall
    tensors {
        d_out: One Read F32 width view,
        ids: One Read U32 one view,
        order: One Read U32 one,
        d_table: One Write F32 width view,
    }
    numbers {
        /// Rows of the table.
        rows: u32,
        dim: u32,
        length: u32,
        batch: u32,
        id_mask: u32,
        /// Workgroups that share the rows.
        step: u32,
        scale: f32,
    }
    variant {
        accumulates: bool,
        width: Width,
    }
}

/// Invocations of a workgroup. Each invocation computes four channels.
pub(crate) const LANES: usize = 64;

impl Variant for EmbeddingBackward {
    const LABEL: &'static str = "attention.embedding_backward";
    const FAMILIES: Families = Families::of(Family::EmbeddingGradients);

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("rows/embedding/embedding_backward")];
        self.declare()
            .u32("LANES", LANES as u32)
            .bool("ACCUMULATES", self.accumulates)
            .bool("IN_FOURS", self.width == Width::Four)
            .kernel(&parts, LANES as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|d_out| {
            FLOATS.into_iter().flat_map(move |d_table| {
                WIDTHS.into_iter().flat_map(move |width| {
                    [false, true].map(|accumulates| EmbeddingBackward {
                        d_out,
                        ids: DType::U32,
                        order: DType::U32,
                        d_table,
                        accumulates,
                        width,
                    })
                })
            })
        })
    }
}
