//! The host side of `delta_gates.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The rates and the decays of a gated DeltaNet layer.
    DeltaGates, DeltaGatesCall
    tensors {
        logits: One Read F32 one view,
        a_log: One Read F32 one view,
        dt_bias: One Read F32 one view,
        beta: One Write F32 one view,
        decay: One Write F32 one view,
    }
    numbers {
        heads: u32,
        length: u32,
        /// Rates of all heads and tokens.
        count: u32,
        /// The distance from an invocation's rate to its next one.
        step: u32,
    }
    variant {
    }
}

pub(crate) const WORKGROUP: usize = 64;

impl Variant for DeltaGates {
    const LABEL: &'static str = "attention.delta_gates";
    const FAMILIES: Families = Families::of(Family::Recurrence);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("layers/gated_delta_net/gates"),
            shader!("layers/gated_delta_net/delta_gates"),
        ];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let float = DType::F32;
        FLOATS.into_iter().flat_map(move |a_log| {
            let of = move |dt_bias| DeltaGates { logits: float, a_log, dt_bias, beta: float, decay: float };
            FLOATS.into_iter().map(of)
        })
    }
}
