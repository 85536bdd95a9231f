//! The host side of `recurrent_solve.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
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
        workgroup: u32,
        /// True for the transposed equation.
        transposed: bool,
    }
}

impl Variant for RecurrentSolve {
    const LABEL: &'static str = "attention.recurrent_solve";
    const FAMILIES: Families = Families::of(Family::Recurrence);

    fn describe(&self) -> Kernel {
        Pieces::new(self.declare(), self.workgroup)
            .u32("ROWS", 4)
            .bool("IS_TRANSPOSED", self.transposed)
            .rows()
            .text("fn at4(o: u32) -> vec4<f32> { return memory_at4(o, 1u, 4u); }\n")
            .text(shader!("recurrent/recurrent_solve"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [8, 16, 64].into_iter().flat_map(|workgroup| {
            [false, true].map(|transposed| RecurrentSolve { memory: DType::F32, workgroup, transposed })
        })
    }
}
