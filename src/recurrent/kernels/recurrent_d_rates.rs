//! The host side of `recurrent_d_rates.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradients of β.
    RecurrentDRates, RecurrentDRatesCall
    tensors {
        chunks: One Read U32 one,
        memory: One Read F32 four,
        d_beta: One Write F32 one view,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {}
}

/// The invocations of a workgroup: at least the rows of a chunk.
const WORKGROUP: u32 = 64;

impl Variant for RecurrentDRates {
    const LABEL: &'static str = "attention.recurrent_d_rates";
    const FAMILIES: Families = Families::of(Family::RecurrenceGradients);

    fn describe(&self) -> Kernel {
        Pieces::new(self.declare(), WORKGROUP).chunks().text(shader!("recurrent/recurrent_d_rates")).kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.map(|d_beta| RecurrentDRates { chunks: DType::U32, memory: DType::F32, d_beta })
    }
}
