//! Twin of `tanh_sum.wgsl`.

use super::{FLOATS, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TanhSum {
    pub out: DType,
}

/// Invocations of a workgroup, and channels of each.
pub(crate) const WORKGROUP: usize = 64;
pub(crate) const CHANNELS: usize = 4;

params! {
    pub(crate) struct Params {
        a: View,
        b: View,
        out: View,
        channels: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl TanhSum {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![
            Binding::read("a", DType::F32, Width::One),
            Binding::read("b", DType::F32, Width::One),
            Binding::write("out", self.out, Width::One),
        ];
        let constants = [Constant::U32("WORKGROUP", WORKGROUP as u32)];
        let parts = [shader!("tensor/view"), shader!("tanh_sum"), shader!("additive/tanh")];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        FLOATS.into_iter().map(|out| TanhSum { out })
    }
}
