//! The host side of `recurrent_values.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The rows of values of a chunk.
    RecurrentValues, RecurrentValuesCall
    tensors {
        x: One Read F32 width view,
        chunks: One Read U32 one,
        memory: One Write F32 four,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        workgroup: u32,
        width: Width,
    }
}

impl Variant for RecurrentValues {
    const LABEL: &'static str = "attention.recurrent_values";
    const FAMILIES: Families = Families::of(Family::Recurrence);

    fn describe(&self) -> Kernel {
        Pieces::new(self.declare(), self.workgroup)
            .chunks()
            .tensor("x", "x4", "p.value_dim", self.width == Width::Four)
            .text(shader!("recurrent/recurrent_values"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|dtype| {
            [(8, Width::Four), (16, Width::One), (64, Width::Four), (64, Width::One)].map(|(workgroup, width)| {
                RecurrentValues { x: dtype, chunks: DType::U32, memory: DType::F32, workgroup, width }
            })
        })
    }
}
