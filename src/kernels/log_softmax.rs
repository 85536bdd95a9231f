//! Twin of `log_softmax.wgsl`.

use super::norm::{ROWS, combine};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::Rows;
use crate::tensor::DType;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LogSoftmax {
    pub rows: Rows,
    pub x: DType,
    pub out: DType,
    pub width: Width,
}

params! {
    pub(crate) struct Params {
        x: View,
        out: View,
        columns: u32,
        heads: u32,
        length: u32,
        rows: u32,
        step: u32,
        inf: f32,
        nan: f32,
        pad: u32,
    }
}

impl LogSoftmax {
    pub fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.rows;
        let bindings =
            vec![Binding::read("x", self.x, self.width), Binding::write("out", self.out, self.width)];
        let (combine, workgroup_memory) = combine(self.rows);
        let constants = [
            Constant::U32("WORKGROUP", workgroup),
            Constant::U32("ROW_LANES", lanes),
            Constant::Bool("IN_FOURS", self.width == Width::Four),
        ];
        let parts = [shader!("tensor/view"), shader!("log_softmax"), combine];
        Kernel { workgroup_memory, ..Kernel::new::<Params>(&constants, bindings, &parts, workgroup) }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.into_iter().flat_map(|rows| {
            super::FLOATS.into_iter().flat_map(move |x| {
                super::FLOATS
                    .into_iter()
                    .flat_map(move |out| super::WIDTHS.map(|width| LogSoftmax { rows, x, out, width }))
            })
        })
    }
}
