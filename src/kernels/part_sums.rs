//! Twin of `part_sums.wgsl`.

use super::{FLOATS, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PartSums {
    pub sums: DType,
    /// Whether the sums are added to what is there.
    pub accumulates: bool,
}

/// Elements of a workgroup.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        sums: View,
        shape: [u32; 4],
        elements: u32,
        count: u32,
        first: u32,
        pad: u32,
    }
}

impl PartSums {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![
            Binding::read("parts", DType::F32, Width::One),
            Binding::write("sums", self.sums, Width::One),
        ];
        let constants =
            [Constant::U32("WORKGROUP", WORKGROUP as u32), Constant::Bool("ACCUMULATES", self.accumulates)];
        let parts = [shader!("tensor/view"), shader!("part_sums")];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        FLOATS.into_iter().flat_map(|sums| [false, true].map(|accumulates| PartSums { sums, accumulates }))
    }
}
