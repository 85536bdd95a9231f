//! Twin of `column_sums.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ColumnSums {
    pub d_y: DType,
    pub sums: DType,
    /// Whether the sums are added to what is there.
    pub accumulates: bool,
}

/// Columns of a workgroup, and invocations that share a column's rows.
pub(crate) const COLUMNS: usize = 16;
const STRIPS: usize = 16;

params! {
    pub(crate) struct Params {
        d_y: View,
        first: u32,
        stride: u32,
        columns: u32,
        dim: u32,
        rows: u32,
        length: u32,
        pad0: u32,
        pad1: u32,
    }
}

impl ColumnSums {
    pub fn describe(&self) -> Kernel {
        let bindings =
            vec![Binding::read("d_y", self.d_y, Width::One), Binding::write("sums", self.sums, Width::One)];
        let constants = [
            Constant::U32("COLUMNS", COLUMNS as u32),
            Constant::U32("STRIPS", STRIPS as u32),
            Constant::Bool("ACCUMULATES", self.accumulates),
        ];
        let parts = [shader!("tensor/view"), shader!("column_sums")];
        let invocations = COLUMNS * STRIPS;
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, invocations as u32);
        Kernel { workgroup_memory: (invocations * size_of::<f32>()) as u32, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|d_y| {
            super::FLOATS.into_iter().flat_map(move |sums| {
                [false, true].into_iter().map(move |accumulates| ColumnSums { d_y, sums, accumulates })
            })
        })
    }
}
