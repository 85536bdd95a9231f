//! Twin of `weight_norm_backward.wgsl`.

use super::local::{TOTALS_BYTES, WORKGROUP};
use super::{FLOATS, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WeightNormBackward {
    /// Of vectors and gains.
    pub x: DType,
    /// Whether gradients are added to what is there.
    pub accumulates: bool,
}

params! {
    pub(crate) struct Params {
        x: View,
        gain: View,
        d_out: View,
        d_x: View,
        d_gain: View,
        dim: u32,
        heads: u32,
        pad0: u32,
        pad1: u32,
    }
}

impl WeightNormBackward {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![
            Binding::read("x", self.x, Width::One),
            Binding::read("gain", self.x, Width::One),
            Binding::read("d_out", DType::F32, Width::One),
            Binding::write("d_x", DType::F32, Width::One),
            Binding::write("d_gain", DType::F32, Width::One),
        ];
        let constants =
            [Constant::U32("WORKGROUP", WORKGROUP as u32), Constant::Bool("ACCUMULATES", self.accumulates)];
        let parts = [
            shader!("tensor/view"),
            shader!("weight_norm_backward"),
            shader!("weight_norm/length"),
            shader!("local/totals"),
        ];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32);
        Kernel { workgroup_memory: TOTALS_BYTES, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        FLOATS
            .into_iter()
            .flat_map(|x| [false, true].map(|accumulates| WeightNormBackward { x, accumulates }))
    }
}
