//! Twin of `weight_norm.wgsl`.

use super::local::{TOTALS_BYTES, WORKGROUP};
use super::{FLOATS, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WeightNorm {
    /// Of vectors and gains.
    pub x: DType,
}

params! {
    pub(crate) struct Params {
        x: View,
        gain: View,
        out: View,
        dim: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl WeightNorm {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![
            Binding::read("x", self.x, Width::One),
            Binding::read("gain", self.x, Width::One),
            Binding::write("out", DType::F32, Width::One),
        ];
        let constants = [Constant::U32("WORKGROUP", WORKGROUP as u32)];
        let parts = [
            shader!("tensor/view"),
            shader!("weight_norm"),
            shader!("weight_norm/length"),
            shader!("local/totals"),
        ];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32);
        Kernel { workgroup_memory: TOTALS_BYTES, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        FLOATS.into_iter().map(|x| WeightNorm { x })
    }
}
