//! The host side of `recurrent_d_errors.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::linear_attention::plan::LinearTiles;
use crate::tensor::DType;

kernel! {
    /// The gradients of the errors within a chunk.
    RecurrentDErrors, RecurrentDErrorsCall
    tensors {
        memory: One Write F32 four,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        tiles: LinearTiles,
    }
}

impl Variant for RecurrentDErrors {
    const LABEL: &'static str = "attention.recurrent_d_errors";
    const FAMILIES: Families = Families::of(Family::RecurrenceGradients);

    fn describe(&self) -> Kernel {
        Pieces::tiled(self.declare(), self.tiles)
            .rows()
            .products()
            .sums()
            .text(shader!("recurrent/recurrent_d_errors"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        LinearTiles::ALL.map(|tiles| RecurrentDErrors { memory: DType::F32, tiles })
    }
}
