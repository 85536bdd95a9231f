//! Twin of `add_positions.wgsl`.

use super::rotation_table::{self, RotationParams};
use super::row_positions::{self, PositionParams};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AddPositions {
    pub x: DType,
    /// Without, x is written.
    pub out: Option<DType>,
    /// Type of the learned table; without, the encoding is sinusoidal.
    pub learned: Option<DType>,
    /// Whether a tensor says where the rows stand.
    pub positions: bool,
}

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        x: View,
        out: View,
        table: View,
        at: PositionParams,
        rotation: RotationParams,
        dim: u32,
        work: u32,
        step: u32,
        scale: f32,
    }
}

impl AddPositions {
    pub fn describe(&self) -> Kernel {
        let mut bindings = Vec::new();
        let out = row_positions::declare_in_and_out(self.x, self.out, &mut bindings);
        let table = match self.learned {
            Some(dtype) => {
                bindings.push(Binding::read("table", dtype, Width::One));
                rotation_table::NONE
            }
            None => {
                bindings.push(rotation_table::binding());
                "fn table_at(o: u32) -> f32 { return 0.0; }\n"
            }
        };
        let (constant, at) = row_positions::declare(self.positions, &mut bindings);
        let constants = [constant, Constant::Bool("LEARNED", self.learned.is_some())];
        let shaders =
            [shader!("tensor/view"), rotation_table::SHADER, row_positions::SHADER, shader!("add_positions")];
        Kernel::new::<Params>(
            &constants,
            bindings,
            &[&shaders[..], &[out, table, at]].concat(),
            WORKGROUP as u32,
        )
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|x| {
            super::FLOATS_OR_NONE.into_iter().flat_map(move |out| {
                super::FLOATS_OR_NONE.into_iter().flat_map(move |learned| {
                    [false, true].into_iter().map(move |positions| AddPositions {
                        x,
                        out,
                        learned,
                        positions,
                    })
                })
            })
        })
    }
}
