//! The host side of `recurrent_d_channel_decays.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradients of decays by channel.
    RecurrentDChannelDecays, RecurrentDChannelDecaysCall
    tensors {
        chunks: One Read U32 one,
        memory: One Read F32 four,
        d_decay: One Write F32 one view,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        workgroup: u32,
        delta: bool,
    }
}

impl Variant for RecurrentDChannelDecays {
    const LABEL: &'static str = "attention.recurrent_d_channel_decays";
    const FAMILIES: Families = Families::of(Family::RecurrenceGradients);

    fn describe(&self) -> Kernel {
        Pieces::new(self.declare(), self.workgroup)
            .bool("IS_DELTA", self.delta)
            .chunks()
            .text(shader!("recurrent/recurrent_d_channel_decays"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|d_decay| {
            [(8, true), (16, false), (64, true), (64, false)].map(|(workgroup, delta)| {
                RecurrentDChannelDecays { chunks: DType::U32, memory: DType::F32, d_decay, workgroup, delta }
            })
        })
    }
}
