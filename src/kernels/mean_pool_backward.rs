//! Twin of `mean_pool_backward.wgsl`.

use super::mean_pool::{Pooled, each};
use super::norm::{combine, read_or_none};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::Rows;
use crate::tensor::DType;

/// What changes the text of the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MeanPoolBackward {
    pub rows: Rows,
    pub pooled: Pooled,
    /// Of x, which the gradient needs if what was given has a length of 1.
    pub x: Option<DType>,
    pub d_out: DType,
    pub d_x: DType,
    pub accumulates: bool,
    pub width: Width,
}

params! {
    pub(crate) struct Params {
        x: View,
        numbers: View,
        keep: View,
        d_out: View,
        d_x: View,
        features: u32,
        length: u32,
        sequences: u32,
        step: u32,
        eps: f32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl MeanPoolBackward {
    pub fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.rows;
        let mut none = String::new();
        let mut bindings = Vec::new();
        read_or_none("x", self.x, self.width, &mut bindings, &mut none);
        let [lengths, packed, keep] = self.pooled.declare(&mut bindings, &mut none);
        bindings.push(Binding::read("d_out", self.d_out, self.width));
        bindings.push(Binding::write("d_x", self.d_x, self.width));
        let (combine, workgroup_memory) = combine(self.rows);
        let constants = [
            lengths,
            packed,
            keep,
            Constant::U32("WORKGROUP", workgroup),
            Constant::U32("ROW_LANES", lanes),
            Constant::Bool("L2", self.x.is_some()),
            Constant::Bool("ACCUMULATES", self.accumulates),
            Constant::Bool("IN_FOURS", self.width == Width::Four),
        ];
        let parts = [
            shader!("tensor/view"),
            shader!("mean_pool/sequence"),
            shader!("mean_pool_backward"),
            combine,
            &none,
        ];
        Kernel { workgroup_memory, ..Kernel::new::<Params>(&constants, bindings, &parts, workgroup) }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        each().map(|(rows, pooled, l2, [d_out, d_x], width)| MeanPoolBackward {
            rows,
            pooled,
            x: l2.then_some(d_out),
            d_out,
            d_x,
            accumulates: (width == Width::One) != l2,
            width,
        })
    }
}
