//! The host side of `recurrent_d_ends.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradients of the decays of whole chunks.
    RecurrentDEnds, RecurrentDEndsCall
    tensors {
        memory: One Write F32 four,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        workgroup: u32,
    }
}

impl Variant for RecurrentDEnds {
    const LABEL: &'static str = "attention.recurrent_d_ends";
    const FAMILIES: Families = Families::of(Family::RecurrenceGradients);

    fn describe(&self) -> Kernel {
        Pieces::new(self.declare(), self.workgroup)
            .text("fn at4(o: u32) -> vec4<f32> { return memory_at4(o, 1u, 4u); }\n")
            .text(shader!("recurrent/recurrent_d_ends"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [8, 16, 64].map(|workgroup| RecurrentDEnds { memory: DType::F32, workgroup })
    }
}
