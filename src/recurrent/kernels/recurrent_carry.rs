//! The host side of `recurrent_carry.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::{Access, DType};

kernel! {
    /// The states of sequences, from or to the caller.
    RecurrentCarry, RecurrentCarryCall
    tensors {
        state: Opt Write F32 one view,
        indices: Opt Read U32 one view,
        carry: One Write F32 four,
    }
    numbers {
        numbers: RecurrentNumbers,
        first_sequence: u32,
    }
    variant {
        workgroup: u32,
        /// True if the states are copied to the caller.
        kept: bool,
    }
}

impl Variant for RecurrentCarry {
    const LABEL: &'static str = "attention.recurrent_carry";
    const FAMILIES: Families = Families::of(Family::Recurrence);

    fn describe(&self) -> Kernel {
        let state = if self.kept { Access::Write } else { Access::Read };
        Pieces::new(self.declare().access("state", state), self.workgroup)
            .bool("IS_KEPT", self.kept)
            .text(if self.state.is_some() && !self.kept { "fn state_store(o: u32, x: f32) {}\n" } else { "" })
            .text(shader!("recurrent/recurrent_carry"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [8, 16, 64].into_iter().flat_map(|workgroup| {
            [(false, false, false), (true, false, false), (true, true, false), (true, false, true), (true, true, true)]
                .map(|(state, indices, kept)| RecurrentCarry {
                    state: state.then_some(DType::F32),
                    indices: indices.then_some(DType::U32),
                    carry: DType::F32,
                    workgroup,
                    kept,
                })
        })
    }
}
