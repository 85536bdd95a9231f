//! Twin of `average_weights.wgsl`.

use super::shader;
use crate::kernel::{Binding, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the average over heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AverageWeights {
    pub out: DType,
}

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        weights: View,
        out: View,
        out_heads: u32,
        group: u32,
        q_len: u32,
        kv_len: u32,
    }
}

impl AverageWeights {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![
            Binding::read("weights", DType::F32, Width::One),
            Binding::write("out", self.out, Width::One),
        ];
        Kernel::new::<Params>(
            &[],
            bindings,
            &[shader!("tensor/view"), shader!("average_weights")],
            WORKGROUP as u32,
        )
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().map(|out| AverageWeights { out })
    }
}
