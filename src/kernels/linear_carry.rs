//! Twin of `linear_carry.wgsl`.

use super::linear::Params;
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, Width};
use crate::tensor::DType;

/// What changes the text of moving states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearCarry {
    pub way: Way,
}

/// Which way states are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Way {
    /// There are none yet: zeros.
    Zero,
    /// From the caller's memory.
    Fetch,
    /// Into the caller's memory.
    Keep,
}

pub(crate) const WORKGROUP: usize = 64;

const ZERO: &str = "fn leave(at: u32) { carry_store4(at, vec4<f32>()); }
fn move_state(own: u32, kv: u32, f: u32, c: u32, at: u32) { carry_store4(at, vec4<f32>()); }
";
const FETCH: &str = "fn leave(at: u32) { carry_store4(at, vec4<f32>()); }
fn move_state(own: u32, kv: u32, f: u32, c: u32, at: u32) {
    if c + 4u == p.state_stride {
        carry_store4(at, vec4<f32>(norm_at(view_at(p.v, own, kv, f, 0u)), 0.0, 0.0, 0.0));
    } else {
        carry_store4(at, state_at4(view_at(p.x, own, kv, f, c), p.x.strides.w, p.value_dim - c) * p.value_unit);
    }
}
";
const KEEP: &str = "fn leave(at: u32) {}
fn move_state(own: u32, kv: u32, f: u32, c: u32, at: u32) {
    let four = carry_at4(at, 1u, 4u);
    if c + 4u == p.state_stride {
        norm_store(view_at(p.v, own, kv, f, 0u), four.x);
    } else {
        for (var n = 0u; n < min(4u, p.value_dim - c); n++) {
            state_store(view_at(p.x, own, kv, f, c + n), component(four, n) * p.value_scale);
        }
    }
}
";

impl LinearCarry {
    pub fn describe(&self) -> Kernel {
        let carry = match self.way {
            Way::Keep => Binding::read("carry", DType::F32, Width::Four),
            _ => Binding::write("carry", DType::F32, Width::Four),
        };
        let of_caller = |name| match self.way {
            Way::Keep => Some(Binding::write(name, DType::F32, Width::One)),
            Way::Fetch => Some(Binding::read(name, DType::F32, Width::One)),
            Way::Zero => None,
        };
        let bindings = [of_caller("state"), of_caller("norm"), Some(carry)].into_iter().flatten().collect();
        let text = match self.way {
            Way::Zero => ZERO,
            Way::Fetch => FETCH,
            Way::Keep => KEEP,
        };
        let constants = [Constant::U32("WORKGROUP", WORKGROUP as u32)];
        let parts = [shader!("tensor/view"), shader!("linear/params"), shader!("linear_carry"), text];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> [Self; 3] {
        [Way::Zero, Way::Fetch, Way::Keep].map(|way| LinearCarry { way })
    }
}
