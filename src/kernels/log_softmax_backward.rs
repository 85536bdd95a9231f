//! Twin of `log_softmax_backward.wgsl`.

use super::norm::{ROWS, combine};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::Rows;
use crate::tensor::DType;

/// What changes the text of the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LogSoftmaxBackward {
    pub rows: Rows,
    pub out: DType,
    pub d_out: DType,
    pub d_x: DType,
    pub accumulates: bool,
    pub width: Width,
}

params! {
    pub(crate) struct Params {
        out: View,
        d_out: View,
        d_x: View,
        columns: u32,
        heads: u32,
        length: u32,
        rows: u32,
        step: u32,
        inf: f32,
        pad0: u32,
        pad1: u32,
    }
}

impl LogSoftmaxBackward {
    pub fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.rows;
        let bindings = vec![
            Binding::read("out", self.out, self.width),
            Binding::read("d_out", self.d_out, self.width),
            Binding::write("d_x", self.d_x, self.width),
        ];
        let (combine, workgroup_memory) = combine(self.rows);
        let constants = [
            Constant::U32("WORKGROUP", workgroup),
            Constant::U32("ROW_LANES", lanes),
            Constant::Bool("ACCUMULATES", self.accumulates),
            Constant::Bool("IN_FOURS", self.width == Width::Four),
        ];
        let parts = [shader!("tensor/view"), shader!("log_softmax_backward"), combine];
        Kernel { workgroup_memory, ..Kernel::new::<Params>(&constants, bindings, &parts, workgroup) }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.into_iter().flat_map(|rows| {
            super::FLOATS.into_iter().flat_map(move |out| {
                super::FLOATS.into_iter().flat_map(move |gradient| {
                    super::WIDTHS.into_iter().flat_map(move |width| {
                        [false, true].map(|accumulates| LogSoftmaxBackward {
                            rows,
                            out,
                            d_out: gradient,
                            d_x: gradient,
                            accumulates,
                            width,
                        })
                    })
                })
            })
        })
    }
}
