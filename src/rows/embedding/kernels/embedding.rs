//! The host side of `embedding.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// Looks up rows of a table by ids, and scales them.
    Embedding, EmbeddingCall
    tensors {
        ids: One Read U32 one view,
        table: One Read F32 width view,
        out: One Write F32 width view,
    }
    numbers {
        /// Rows of the table.
        rows: u32,
        dim: u32,
        length: u32,
        /// Groups of four channels in a row.
        fours: u32,
        /// Groups of four channels in all rows.
        work: u32,
        /// Invocations that share these groups.
        step: u32,
        scale: f32,
        /// 1 if the rows are added to `out`.
        accumulates: u32,
    }
    variant {
        width: Width,
    }
}

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for Embedding {
    const LABEL: &'static str = "attention.embedding";
    const FAMILIES: Families = Families::of(Family::Embeddings);

    fn describe(&self) -> Kernel {
        let parts =
            [shader!("tensor/view"), shader!("tensor/store_four"), shader!("rows/embedding/embedding")];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).bool("IN_FOURS", self.width == Width::Four).kernel(
            &parts,
            WORKGROUP as u32,
            0,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let ids = DType::U32;
        FLOATS.into_iter().flat_map(move |table| {
            FLOATS.into_iter().flat_map(move |out| {
                WIDTHS.into_iter().map(move |width| Embedding { ids, table, out, width })
            })
        })
    }
}
