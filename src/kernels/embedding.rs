//! Twin of `embedding.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Embedding {
    pub table: DType,
    pub out: DType,
    pub accumulates: bool,
    pub width: Width,
}

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        ids: View,
        table: View,
        out: View,
        rows: u32,
        width: u32,
        length: u32,
        fours: u32,
        work: u32,
        step: u32,
        scale: f32,
        pad: u32,
    }
}

impl Embedding {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![
            Binding::read("ids", DType::U32, Width::One),
            Binding::read("table", self.table, self.width),
            Binding::write("out", self.out, self.width),
        ];
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP as u32),
            Constant::Bool("ACCUMULATES", self.accumulates),
            Constant::Bool("IN_FOURS", self.width == Width::Four),
        ];
        let parts = [shader!("tensor/view"), shader!("embedding")];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|table| {
            super::FLOATS.into_iter().flat_map(move |out| {
                super::WIDTHS.into_iter().flat_map(move |width| {
                    [false, true].map(|accumulates| Embedding { table, out, accumulates, width })
                })
            })
        })
    }
}
