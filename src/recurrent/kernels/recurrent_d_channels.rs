//! The host side of `recurrent_d_channels.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradients of rows, with a decay for each channel.
    RecurrentDChannels, RecurrentDChannelsCall
    tensors {
        memory: One Write F32 four,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        workgroup: u32,
        delta: bool,
    }
}

impl Variant for RecurrentDChannels {
    const LABEL: &'static str = "attention.recurrent_d_channels";
    const FAMILIES: Families = Families::of(Family::RecurrenceGradients);

    fn describe(&self) -> Kernel {
        Pieces::new(self.declare(), self.workgroup)
            .bool("IS_DELTA", self.delta)
            .rows()
            .text("fn at4(o: u32) -> vec4<f32> { return memory_at4(o, 1u, 4u); }\n")
            .text(shader!("recurrent/recurrent_d_channels"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [8, 16, 64].into_iter().flat_map(|workgroup| {
            [false, true].map(|delta| RecurrentDChannels { memory: DType::F32, workgroup, delta })
        })
    }
}
