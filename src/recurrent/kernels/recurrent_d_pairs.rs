//! The host side of `recurrent_d_pairs.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::linear_attention::plan::LinearTiles;
use crate::tensor::DType;

kernel! {
    /// The gradients of rows through the other rows of their chunk.
    RecurrentDPairs, RecurrentDPairsCall
    tensors {
        memory: One Write F32 four,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        tiles: LinearTiles,
        delta: bool,
    }
}

impl Variant for RecurrentDPairs {
    const LABEL: &'static str = "attention.recurrent_d_pairs";
    const FAMILIES: Families = Families::of(Family::RecurrenceGradients);

    fn describe(&self) -> Kernel {
        Pieces::tiled(self.declare(), self.tiles)
            .bool("IS_DELTA", self.delta)
            .rows()
            .products()
            .sums()
            .text(shader!("recurrent/recurrent_d_pairs"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        LinearTiles::ALL
            .into_iter()
            .flat_map(|tiles| [false, true].map(|delta| RecurrentDPairs { memory: DType::F32, tiles, delta }))
    }
}
