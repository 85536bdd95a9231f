//! Twin of `top_k.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TopK {
    /// Invocations that share a row.
    pub lanes: u32,
    pub x: DType,
    pub values: Option<DType>,
    pub width: Width,
}

params! {
    pub(crate) struct Params {
        x: View,
        values: View,
        indices: View,
        columns: u32,
        k: u32,
        heads: u32,
        length: u32,
        rows: u32,
        step: u32,
        pad0: u32,
        pad1: u32,
    }
}

/// Invocations for rows of so many columns; few are enough for software drivers.
pub(crate) fn lanes(columns: usize, cpu: bool) -> u32 {
    if cpu { 8 } else { columns.div_ceil(4).next_power_of_two().clamp(32, 256) as u32 }
}

impl TopK {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![Binding::read("x", self.x, self.width)];
        let none = match self.values {
            Some(values) => {
                bindings.push(Binding::write("values", values, Width::One));
                ""
            }
            None => "fn values_store(o: u32, x: f32) {}\n",
        };
        bindings.push(Binding::write("indices", DType::U32, Width::One));
        let constants = [Constant::U32("LANES", self.lanes), Constant::Bool("VALUES", self.values.is_some())];
        let parts = [shader!("tensor/view"), shader!("top_k"), none];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, self.lanes);
        Kernel { workgroup_memory: 8 * self.lanes, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        [8, 32, 256].into_iter().flat_map(|lanes| {
            super::FLOATS.into_iter().flat_map(move |x| {
                super::FLOATS_OR_NONE
                    .into_iter()
                    .flat_map(move |values| super::WIDTHS.map(|width| TopK { lanes, x, values, width }))
            })
        })
    }
}
