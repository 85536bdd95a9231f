//! The host side of `recurrent_out.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::linear_attention::plan::LinearTiles;
use crate::tensor::DType;

kernel! {
    /// The results of the rows of a chunk.
    RecurrentOut, RecurrentOutCall
    tensors {
        chunks: One Read U32 one,
        memory: One Read F32 four,
        written: One Write F32 width view,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        tiles: LinearTiles,
        width: Width,
    }
}

impl Variant for RecurrentOut {
    const LABEL: &'static str = "attention.recurrent_out";
    const FAMILIES: Families = Families::of(Family::Recurrence);

    fn describe(&self) -> Kernel {
        Pieces::tiled(self.declare(), self.tiles)
            .chunks()
            .products()
            .store(self.width == Width::Four)
            .text(shader!("recurrent/recurrent_out"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        LinearTiles::ALL.into_iter().flat_map(|tiles| {
            FLOATS.into_iter().flat_map(move |dtype| {
                WIDTHS.map(|width| RecurrentOut {
                    chunks: DType::U32,
                    memory: DType::F32,
                    written: dtype,
                    tiles,
                    width,
                })
            })
        })
    }
}
