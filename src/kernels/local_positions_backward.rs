//! Twin of `local_positions_backward.wgsl`.

use super::local::{TOTALS_BYTES, WORKGROUP};
use super::{FLOATS, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the gradients of predicted positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LocalPositionsBackward {
    pub vector: DType,
    /// Whether sequences have lengths.
    pub lengths: bool,
}

params! {
    pub(crate) struct Params {
        x: View,
        vector: View,
        lengths: View,
        d_positions: View,
        d_x: View,
        terms: View,
        rows: u32,
        kv_len: u32,
        units: u32,
        step: u32,
    }
}

impl LocalPositionsBackward {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("x", DType::F32, Width::One),
            Binding::read("vector", self.vector, Width::One),
        ];
        let lengths = super::local::lengths(self.lengths, &mut bindings);
        bindings.push(Binding::read("d_positions", DType::F32, Width::One));
        bindings.extend(["d_x", "terms"].map(|name| Binding::write(name, DType::F32, Width::One)));
        let constants = [Constant::U32("WORKGROUP", WORKGROUP as u32)];
        let parts = [
            shader!("tensor/view"),
            shader!("local_positions_backward"),
            shader!("local/predict"),
            shader!("local/totals"),
            shader!("additive/tanh"),
            lengths,
        ];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32);
        Kernel { workgroup_memory: TOTALS_BYTES, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        FLOATS
            .into_iter()
            .flat_map(|vector| [false, true].map(|lengths| LocalPositionsBackward { vector, lengths }))
    }
}
