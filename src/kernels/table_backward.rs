//! Twin of `table_backward.wgsl`.

use super::row_positions::{self, PositionParams};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TableBackward {
    pub d_out: DType,
    pub d_table: DType,
    /// Whether a tensor says where the rows stand.
    pub positions: bool,
    /// Whether the gradient is added to what is there.
    pub accumulates: bool,
}

/// Channels of a workgroup.
pub(crate) const LANES: usize = 64;
/// Of positions that a workgroup looks at together, a bit each.
const WORDS: usize = 8;

params! {
    pub(crate) struct Params {
        d_out: View,
        d_table: View,
        at: PositionParams,
        batch: u32,
        heads: u32,
        length: u32,
        dim: u32,
        blocks: u32,
        work: u32,
        step: u32,
        pad: u32,
    }
}

impl TableBackward {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("d_out", self.d_out, Width::One),
            Binding::write("d_table", self.d_table, Width::One),
        ];
        let (positions, at) = row_positions::declare(self.positions, &mut bindings);
        let constants = [
            positions,
            Constant::U32("LANES", LANES as u32),
            Constant::U32("WORDS", WORDS as u32),
            Constant::Bool("ACCUMULATES", self.accumulates),
        ];
        let parts = [shader!("tensor/view"), row_positions::SHADER, shader!("table_backward"), at];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, LANES as u32);
        Kernel { workgroup_memory: (WORDS * size_of::<u32>()) as u32, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|d_out| {
            super::FLOATS.into_iter().flat_map(move |d_table| {
                [[false; 2], [true, false], [false, true], [true; 2]].into_iter().map(
                    move |[positions, accumulates]| TableBackward { d_out, d_table, positions, accumulates },
                )
            })
        })
    }
}
