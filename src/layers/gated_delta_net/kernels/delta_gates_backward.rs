//! The host side of `delta_gates_backward.wgsl`.

use super::delta_gates::WORKGROUP;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradients of rates and decays: those of their logits, and terms of those of the weights.
    DeltaGatesBackward, DeltaGatesBackwardCall
    tensors {
        logits: One Read F32 one view,
        a_log: One Read F32 one view,
        dt_bias: One Read F32 one view,
        d_beta: One Read F32 one view,
        d_decay: One Read F32 one view,
        terms: One Write F32 one view,
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

impl Variant for DeltaGatesBackward {
    const LABEL: &'static str = "attention.delta_gates_backward";
    const FAMILIES: Families = Families::of(Family::RecurrenceGradients);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("layers/gated_delta_net/gates"),
            shader!("layers/gated_delta_net/delta_gates_backward"),
        ];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let float = DType::F32;
        FLOATS.into_iter().flat_map(move |a_log| {
            FLOATS.into_iter().map(move |dt_bias| DeltaGatesBackward {
                logits: float,
                a_log,
                dt_bias,
                d_beta: float,
                d_decay: float,
                terms: float,
            })
        })
    }
}
