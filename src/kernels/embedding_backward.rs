//! Twin of `embedding_backward.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EmbeddingBackward {
    pub d_out: DType,
    pub d_table: DType,
    pub accumulates: bool,
    pub width: Width,
}

/// Invocations of a workgroup, each with four channels.
pub(crate) const LANES: usize = 64;

params! {
    pub(crate) struct Params {
        d_out: View,
        ids: View,
        d_table: View,
        rows: u32,
        width: u32,
        length: u32,
        batch: u32,
        id_mask: u32,
        step: u32,
        scale: f32,
        pad: u32,
    }
}

impl EmbeddingBackward {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![
            Binding::read("d_out", self.d_out, self.width),
            Binding::read("ids", DType::U32, Width::One),
            Binding::read("order", DType::U32, Width::One),
            Binding::write("d_table", self.d_table, self.width),
        ];
        let constants = [
            Constant::U32("LANES", LANES as u32),
            Constant::Bool("ACCUMULATES", self.accumulates),
            Constant::Bool("IN_FOURS", self.width == Width::Four),
        ];
        let parts = [shader!("tensor/view"), shader!("embedding_backward")];
        Kernel::new::<Params>(&constants, bindings, &parts, LANES as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|d_out| {
            super::FLOATS.into_iter().flat_map(move |d_table| {
                super::WIDTHS.into_iter().flat_map(move |width| {
                    [false, true].map(|accumulates| EmbeddingBackward { d_out, d_table, accumulates, width })
                })
            })
        })
    }
}
