//! Twin of `norm_sums.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the parts of a norm's weight's gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NormSums {
    pub x: DType,
    pub residual: Option<DType>,
    pub d_out: DType,
}

/// Columns of a workgroup, and invocations that share a column's rows.
pub(crate) const COLUMNS: usize = 16;
pub(crate) const STRIPS: usize = 16;

/// Numbers of each row's statistics: the rounded mean, the rest of the mean, the scale.
pub(crate) const STATISTICS: usize = 3;

params! {
    pub(crate) struct Params {
        x: View,
        residual: View,
        d_out: View,
        features: u32,
        heads: u32,
        length: u32,
        rows: u32,
        part: u32,
        count: u32,
        pad0: u32,
        pad1: u32,
    }
}

impl NormSums {
    pub fn describe(&self) -> Kernel {
        let read = |name, dtype| Binding::read(name, dtype, Width::One);
        let mut bindings = vec![read("x", self.x)];
        bindings.extend(self.residual.map(|dtype| read("residual", dtype)));
        bindings.extend([read("d_out", self.d_out), read("statistics", DType::F32)]);
        bindings.push(Binding::write("parts", DType::F32, Width::One));
        let constants = [
            Constant::U32("COLUMNS", COLUMNS as u32),
            Constant::U32("STRIPS", STRIPS as u32),
            Constant::Bool("HAS_RESIDUAL", self.residual.is_some()),
        ];
        let none =
            if self.residual.is_some() { "" } else { "fn residual_at(o: u32) -> f32 { return 0.0; }\n" };
        let parts = [shader!("tensor/view"), shader!("norm_sums"), none];
        let invocations = COLUMNS * STRIPS;
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, invocations as u32);
        Kernel { workgroup_memory: (invocations * 8) as u32, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|x| {
            super::FLOATS.into_iter().flat_map(move |d_out| {
                [None, Some(x)].into_iter().map(move |residual| NormSums { x, residual, d_out })
            })
        })
    }
}
