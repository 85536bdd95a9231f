//! Twin of `rotate.wgsl`.

use super::rotation_table::{self, RotationParams};
use super::row_positions::{self, PositionParams};
use super::shader;
use crate::kernel::{Kernel, View, params};
use crate::tensor::DType;

/// What changes the text of the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rotate {
    pub x: DType,
    /// Without, x is written.
    pub out: Option<DType>,
    /// Whether a tensor says where the rows stand.
    pub positions: bool,
}

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        x: View,
        out: View,
        at: PositionParams,
        rotation: RotationParams,
        items: u32,
        work: u32,
        step: u32,
        pad: u32,
    }
}

impl Rotate {
    pub fn describe(&self) -> Kernel {
        let mut bindings = Vec::new();
        let out = row_positions::declare_in_and_out(self.x, self.out, &mut bindings);
        bindings.push(rotation_table::binding());
        let (constant, at) = row_positions::declare(self.positions, &mut bindings);
        let parts = [
            shader!("tensor/view"),
            rotation_table::SHADER,
            row_positions::SHADER,
            shader!("rotate"),
            out,
            at,
        ];
        Kernel::new::<Params>(&[constant], bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|x| {
            [None, Some(DType::F32), Some(DType::F16)].into_iter().flat_map(move |out| {
                [false, true].into_iter().map(move |positions| Rotate { x, out, positions })
            })
        })
    }
}
