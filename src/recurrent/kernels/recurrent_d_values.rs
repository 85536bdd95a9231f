//! The host side of `recurrent_d_values.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradient of values.
    RecurrentDValues, RecurrentDValuesCall
    tensors {
        chunks: One Read U32 one,
        memory: One Read F32 four,
        written: One Write F32 width view,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        workgroup: u32,
        width: Width,
    }
}

impl Variant for RecurrentDValues {
    const LABEL: &'static str = "attention.recurrent_d_values";
    const FAMILIES: Families = Families::of(Family::RecurrenceGradients);

    fn describe(&self) -> Kernel {
        Pieces::new(self.declare(), self.workgroup)
            .chunks()
            .text("fn at4(o: u32) -> vec4<f32> { return memory_at4(o, 1u, 4u); }\n")
            .store(self.width == Width::Four)
            .text(shader!("recurrent/recurrent_d_values"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|dtype| {
            [(8, Width::Four), (16, Width::One), (64, Width::Four), (64, Width::One)].map(
                |(workgroup, width)| RecurrentDValues {
                    chunks: DType::U32,
                    memory: DType::F32,
                    written: dtype,
                    workgroup,
                    width,
                },
            )
        })
    }
}
