//! Twin of `local_positions.wgsl`.

use super::local::{TOTALS_BYTES, WORKGROUP};
use super::{FLOATS, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of predicted positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LocalPositions {
    pub vector: DType,
    /// Whether sequences have lengths.
    pub lengths: bool,
}

params! {
    pub(crate) struct Params {
        x: View,
        vector: View,
        lengths: View,
        positions: View,
        rows: u32,
        kv_len: u32,
        units: u32,
        step: u32,
    }
}

impl LocalPositions {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("x", DType::F32, Width::One),
            Binding::read("vector", self.vector, Width::One),
        ];
        let lengths = super::local::lengths(self.lengths, &mut bindings);
        bindings.push(Binding::write("positions", DType::F32, Width::One));
        let constants = [Constant::U32("WORKGROUP", WORKGROUP as u32)];
        let parts = [
            shader!("tensor/view"),
            shader!("local_positions"),
            shader!("local/predict"),
            shader!("local/totals"),
            shader!("additive/tanh"),
            lengths,
        ];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32);
        Kernel { workgroup_memory: TOTALS_BYTES, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        FLOATS.into_iter().flat_map(|vector| [false, true].map(|lengths| LocalPositions { vector, lengths }))
    }
}
