//! The host side of `recurrent_norms.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The factors that give rows the length 1.
    RecurrentNorms, RecurrentNormsCall
    tensors {
        q: One Read F32 one view,
        k: One Read F32 one view,
        chunks: One Read U32 one,
        memory: One Write F32 four,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
    }
}

pub(crate) const WORKGROUP: usize = 64;

impl Variant for RecurrentNorms {
    const LABEL: &'static str = "attention.recurrent_norms";
    const FAMILIES: Families = Families::of(Family::Recurrence);

    fn describe(&self) -> Kernel {
        Pieces::new(self.declare(), WORKGROUP as u32)
            .chunks()
            .text(shader!("recurrent/recurrent_norms"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.map(|dtype| RecurrentNorms { q: dtype, k: dtype, chunks: DType::U32, memory: DType::F32 })
    }
}
