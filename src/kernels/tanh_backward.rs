//! Twin of `tanh_backward.wgsl`.

use super::{FLOATS, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TanhBackward {
    pub out: DType,
    pub d_out: DType,
}

/// Invocations of a workgroup, an element each.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        out: View,
        d_out: View,
        d_sum: View,
        channels: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl TanhBackward {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![
            Binding::read("out", self.out, Width::One),
            Binding::read("d_out", self.d_out, Width::One),
            Binding::write("d_sum", DType::F32, Width::One),
        ];
        let constants = [Constant::U32("WORKGROUP", WORKGROUP as u32)];
        let parts = [shader!("tensor/view"), shader!("tanh_backward")];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        FLOATS.into_iter().flat_map(|out| FLOATS.into_iter().map(move |d_out| TanhBackward { out, d_out }))
    }
}
