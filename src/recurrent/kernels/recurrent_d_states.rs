//! The host side of `recurrent_d_states.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::linear_attention::plan::LinearTiles;
use crate::tensor::DType;

kernel! {
    /// The gradients that go through the state.
    RecurrentDStates, RecurrentDStatesCall
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

impl Variant for RecurrentDStates {
    const LABEL: &'static str = "attention.recurrent_d_states";
    const FAMILIES: Families = Families::of(Family::RecurrenceGradients);

    fn describe(&self) -> Kernel {
        Pieces::tiled(self.declare(), self.tiles)
            .rows()
            .products()
            .sums()
            .text(shader!("recurrent/recurrent_d_states"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        LinearTiles::ALL.map(|tiles| RecurrentDStates { memory: DType::F32, tiles })
    }
}
