//! Twin of `keep_rows.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KeepRows {
    pub x: DType,
    pub y: DType,
    /// Whether rows are added to what is there.
    pub accumulates: bool,
}

/// Rows of a workgroup.
pub(crate) const ROWS: usize = 16;
const WORKGROUP: u32 = 64;

params! {
    pub(crate) struct Params {
        x: View,
        y: View,
        kept: View,
        length: u32,
        dim: u32,
        pad: [u32; 2],
    }
}

impl KeepRows {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![
            Binding::read("x", self.x, Width::One),
            Binding::read("kept", DType::Bool, Width::One),
            Binding::write("y", self.y, Width::One),
        ];
        let constants = [
            Constant::U32("ROWS", ROWS as u32),
            Constant::U32("WORKGROUP", WORKGROUP),
            Constant::Bool("ACCUMULATES", self.accumulates),
        ];
        Kernel::new::<Params>(
            &constants,
            bindings,
            &[shader!("tensor/view"), shader!("keep_rows")],
            WORKGROUP,
        )
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|x| {
            super::FLOATS.into_iter().flat_map(move |y| {
                [false, true].into_iter().map(move |accumulates| KeepRows { x, y, accumulates })
            })
        })
    }
}
