//! The host side of `recurrent_solve.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::linear_attention::plan::LinearTiles;
use crate::tensor::DType;

kernel! {
    /// The equation of the errors of a chunk.
    RecurrentSolve, RecurrentSolveCall
    tensors {
        memory: One Write F32 four,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        tiles: LinearTiles,
        /// True for the transposed equation.
        transposed: bool,
    }
}

impl Variant for RecurrentSolve {
    const LABEL: &'static str = "attention.recurrent_solve";
    const FAMILIES: Families = Families::of(Family::Recurrence);

    fn describe(&self) -> Kernel {
        Pieces::tiled(self.declare(), self.tiles)
            .bool("IS_TRANSPOSED", self.transposed)
            .rows()
            .products()
            .text(shader!("recurrent/recurrent_solve"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        LinearTiles::ALL.into_iter().flat_map(|tiles| {
            [false, true].map(|transposed| RecurrentSolve { memory: DType::F32, tiles, transposed })
        })
    }
}
