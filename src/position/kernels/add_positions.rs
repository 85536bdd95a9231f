//! The host side of `add_positions.wgsl`.

use super::rotation_table::{self, RotationParams};
use super::row_positions::{self, PositionParams, X_IS_OUT};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, FLOATS_OR_NONE, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// `scale · x` plus the encoding of each row's position.
    AddPositions, AddPositionsCall
    tensors {
        x: Source Read F32 one view,
        out: One Write F32 one view,
        // The learned table, or the table of a sinusoidal encoding.
        table: Opt Read F32 one view,
        rotation_table: Opt Read F32 one,
        positions: Opt Read U32 one,
    }
    numbers {
        at: PositionParams,
        rotation: RotationParams,
        dim: u32,
        /// The number of channels in a head's rows.
        work: u32,
        /// The number of invocations that share these channels.
        step: u32,
        scale: f32,
    }
    variant {}
}

/// The number of invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for AddPositions {
    const LABEL: &'static str = "attention.add_positions";
    const FAMILIES: Families = Families::of(Family::Positions);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            rotation_table::SHADER,
            row_positions::SHADER,
            shader!("position/add_positions"),
        ];
        self.declare().instead_of("x", X_IS_OUT).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|x| {
            FLOATS_OR_NONE.into_iter().flat_map(move |out| {
                FLOATS_OR_NONE.into_iter().flat_map(move |table| {
                    [None, Some(DType::U32)].into_iter().map(move |positions| AddPositions {
                        x: out.map(|_| x),
                        out: out.unwrap_or(x),
                        table,
                        rotation_table: table.is_none().then_some(DType::F32),
                        positions,
                    })
                })
            })
        })
    }
}
