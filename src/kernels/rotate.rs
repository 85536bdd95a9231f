//! Twin of `rotate.wgsl`.

use super::rotation_table::{self, RotationParams};
use super::row_positions::{self, PositionParams};
use super::shader;
use crate::kernel::{Binding, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rotate {
    pub x: DType,
    /// Without, x is written.
    pub out: Option<DType>,
    /// The type of cosines and sines, where tensors give them.
    pub cos_sin: Option<DType>,
    /// Whether a tensor says where the rows stand.
    pub positions: bool,
}

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

/// Cosine and sine from the table of a rope.
const ROTATION_OF_TABLE: &str = "fn rotation_of(b: u32, pair: u32, position: u32) -> vec2<f32> { return rotation(p.rotation, pair, position); }\n";

params! {
    pub(crate) struct Params {
        x: View,
        out: View,
        cos: View,
        sin: View,
        at: PositionParams,
        rotation: RotationParams,
        items: u32,
        work: u32,
        step: u32,
        turn: f32,
    }
}

impl Rotate {
    pub fn describe(&self) -> Kernel {
        let mut bindings = Vec::new();
        let out = row_positions::declare_in_and_out(self.x, self.out, &mut bindings);
        let (table, rotation) = match self.cos_sin {
            None => {
                bindings.push(rotation_table::binding());
                ("", ROTATION_OF_TABLE)
            }
            Some(dtype) => {
                bindings.push(Binding::read("cos_table", dtype, Width::One));
                bindings.push(Binding::read("sin_table", dtype, Width::One));
                (rotation_table::NONE, shader!("position/cos_sin"))
            }
        };
        let (constant, at) = row_positions::declare(self.positions, &mut bindings);
        let parts = [
            shader!("tensor/view"),
            rotation_table::SHADER,
            table,
            row_positions::SHADER,
            rotation,
            shader!("rotate"),
            out,
            at,
        ];
        Kernel::new::<Params>(&[constant], bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|x| {
            super::FLOATS_OR_NONE.into_iter().flat_map(move |out| {
                super::FLOATS_OR_NONE.into_iter().flat_map(move |cos_sin| {
                    [false, true].into_iter().map(move |positions| Rotate { x, out, cos_sin, positions })
                })
            })
        })
    }
}
