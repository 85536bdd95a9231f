//! Twin of `lsh_gather.wgsl`.

use super::lsh_hash::lengths;
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the copy in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LshGather {
    /// Of the rows, before and after.
    pub dtype: DType,
    /// Whether each is divided by its length.
    pub normalises: bool,
    /// Whether sequences have lengths.
    pub lengths: bool,
}

/// Rows of a workgroup, and invocations of each; so too in the other two kernels that have rows.
pub(crate) const ROWS: usize = 4;
const ROW_LANES: usize = 16;
pub(super) const WORKGROUP: usize = ROWS * ROW_LANES;
pub(super) const CONSTANTS: [Constant; 2] =
    [Constant::U32("ROWS", ROWS as u32), Constant::U32("ROW_LANES", ROW_LANES as u32)];

params! {
    pub(crate) struct Params {
        x: View,
        y: View,
        order: View,
        lengths: View,
        rounds: u32,
        length: u32,
        chunk: u32,
        ahead: u32,
        dim: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl LshGather {
    pub fn describe(&self) -> Kernel {
        let mut bindings =
            vec![Binding::read("x", self.dtype, Width::One), Binding::read("order", DType::U32, Width::One)];
        let lengths = lengths(self.lengths, &mut bindings);
        bindings.push(Binding::write("y", self.dtype, Width::One));
        let [rows, lanes] = CONSTANTS;
        let constants = [rows, lanes, Constant::Bool("NORMALISES", self.normalises)];
        let parts = [shader!("tensor/view"), shader!("lsh_gather"), lengths];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32);
        Kernel { workgroup_memory: (2 * WORKGROUP * size_of::<f32>()) as u32, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|dtype| {
            let of = move |[normalises, lengths]: [bool; 2]| LshGather { dtype, normalises, lengths };
            [[false; 2], [false, true], [true, false], [true; 2]].into_iter().map(of)
        })
    }
}
