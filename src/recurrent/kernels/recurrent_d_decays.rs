//! The host side of `recurrent_d_decays.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradients of decays.
    RecurrentDDecays, RecurrentDDecaysCall
    tensors {
        chunks: One Read U32 one,
        memory: One Write F32 four,
        d_decay: One Write F32 one view,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        delta: bool,
    }
}

/// The invocations of a workgroup: at least the rows of a chunk.
const WORKGROUP: usize = 64;

impl Variant for RecurrentDDecays {
    const LABEL: &'static str = "attention.recurrent_d_decays";
    const FAMILIES: Families = Families::of(Family::RecurrenceGradients);

    fn describe(&self) -> Kernel {
        Pieces::new(self.declare(), WORKGROUP as u32)
            .bool("IS_DELTA", self.delta)
            .chunks()
            .text("fn at4(o: u32) -> vec4<f32> { return memory_at4(o, 1u, 4u); }\n")
            .text(shader!("recurrent/recurrent_d_decays"))
            .workgroup_memory(3 * WORKGROUP * size_of::<f32>())
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|d_decay| {
            [false, true].map(|delta| RecurrentDDecays {
                chunks: DType::U32,
                memory: DType::F32,
                d_decay,
                delta,
            })
        })
    }
}
