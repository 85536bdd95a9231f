//! The host side of `linear_carry.wgsl`.

use super::linear::LinearNumbers;
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::{Access, DType};

/// The direction in which states are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Way {
    /// No copy: the states are set to zero.
    Zero,
    /// From the caller's memory.
    Fetch,
    /// Into the caller's memory.
    Keep,
}

kernel! {
    /// A copy of the states of sequences.
    LinearCarry, LinearCarryCall
    tensors {
        // The caller's tensors: read to fetch states, written to store them.
        state: Opt Read F32 one view,
        norm: Opt Read F32 one view,
        // Read to store states in the caller's tensors.
        carry: Opt Write F32 four,
    }
    numbers {
        numbers: LinearNumbers,
    }
    variant {
        way: Way,
    }
}

pub(crate) const WORKGROUP: usize = 64;

const ZERO: &str = "fn leave(at: u32) { carry_store4(at, vec4<f32>()); }
fn move_state(own: u32, kv: u32, f: u32, c: u32, at: u32) { carry_store4(at, vec4<f32>()); }
";
const FETCH: &str = "fn leave(at: u32) { carry_store4(at, vec4<f32>()); }
fn move_state(own: u32, kv: u32, f: u32, c: u32, at: u32) {
    if c + 4u == p.state_stride {
        carry_store4(at, vec4<f32>(norm_at(view_at(p.norm, own, kv, f, 0u)), 0.0, 0.0, 0.0));
    } else {
        let four = state_at4(view_at(p.state, own, kv, f, c), p.state.strides.w, p.value_dim - c);
        carry_store4(at, lowered(four, p.value_exponent));
    }
}
";
const KEEP: &str = "fn leave(at: u32) {}
fn move_state(own: u32, kv: u32, f: u32, c: u32, at: u32) {
    let four = carry_at4(at, 1u, 4u);
    if c + 4u == p.state_stride {
        norm_store(view_at(p.norm, own, kv, f, 0u), four.x);
    } else {
        for (var n = 0u; n < min(4u, p.value_dim - c); n++) {
            state_store(view_at(p.state, own, kv, f, c + n), component(four, n) * p.value_scale);
        }
    }
}
";

impl Variant for LinearCarry {
    const LABEL: &'static str = "attention.linear_carry";
    const FAMILIES: Families = Families::of(Family::LinearAttention);

    fn describe(&self) -> Kernel {
        let (text, of_caller, of_carry) = match self.way {
            Way::Zero => (ZERO, Access::Read, Access::Write),
            Way::Fetch => (FETCH, Access::Read, Access::Write),
            Way::Keep => (KEEP, Access::Write, Access::Read),
        };
        self.declare()
            .access("state", of_caller)
            .access("norm", of_caller)
            .access("carry", of_carry)
            .u32("WORKGROUP", WORKGROUP as u32)
            .kernel(
                &[shader!("tensor/view"), shader!("linear_attention/linear_carry"), text],
                WORKGROUP as u32,
                0,
            )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [Way::Zero, Way::Fetch, Way::Keep].map(|way| {
            let of_caller = (way != Way::Zero).then_some(DType::F32);
            LinearCarry { state: of_caller, norm: of_caller, carry: Some(DType::F32), way }
        })
    }
}
