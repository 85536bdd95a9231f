//! The host side of `rotate.wgsl`.

use super::rotation_table::{self, RotationParams};
use super::row_positions::{self, PositionParams, X_IS_OUT};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, FLOATS_OR_NONE, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// Rotary position embedding.
    Rotate, RotateCall
    tensors {
        x: Source Read F32 one view,
        out: One Write F32 one view,
        // Either this table or the next two.
        rotation_table: Opt Read F32 one,
        cos_table: Opt Read F32 one repeating,
        sin_table: Opt Read F32 one repeating,
        positions: Opt Read U32 one,
    }
    numbers {
        at: PositionParams,
        rotation: RotationParams,
        /// The number of items in a row: pairs, then copied channels.
        items: u32,
        /// The number of items in a head's rows.
        work: u32,
        /// The number of invocations that share these items.
        step: u32,
        /// 1, or −1 for the opposite rotation.
        turn: f32,
        /// The bounds of the sections: see `RopeSections::bounds`.
        height: u32,
        width: u32,
        interleaved: u32,
    }
    variant {
        /// True if `positions` holds three axes, and sections choose the axis of each pair.
        axes: bool,
    }
}

/// The number of invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

/// The axis of a pair's position if all pairs have the same position.
const ONE_AXIS: &str = "fn axis_of(pair: u32) -> u32 { return 0u; }\n";

/// The cosine and sine from the table of a rope.
const ROTATION_OF_TABLE: &str = "fn rotation_of(b: u32, pair: u32, position: u32) -> vec2<f32> { return rotation(p.rotation, pair, position); }\n";

impl Variant for Rotate {
    const LABEL: &'static str = "attention.rotate";
    const FAMILIES: Families = Families::of(Family::Rotations);

    fn describe(&self) -> Kernel {
        let rotation = match self.rotation_table {
            Some(_) => ROTATION_OF_TABLE,
            None => shader!("position/cos_sin"),
        };
        let axis = if self.axes { shader!("position/sections") } else { ONE_AXIS };
        let parts = [
            shader!("tensor/view"),
            rotation_table::SHADER,
            row_positions::SHADER,
            axis,
            rotation,
            shader!("position/rotate"),
        ];
        self.declare().instead_of("x", X_IS_OUT).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|x| {
            FLOATS_OR_NONE.into_iter().flat_map(move |out| {
                FLOATS_OR_NONE.into_iter().flat_map(move |cos_sin| {
                    // Only a rope has sections.
                    let three = cos_sin.is_none().then_some((Some(DType::U32), true));
                    let positions = [(None, false), (Some(DType::U32), false)].into_iter().chain(three);
                    positions.map(move |(positions, axes)| Rotate {
                        x: out.map(|_| x),
                        out: out.unwrap_or(x),
                        rotation_table: cos_sin.is_none().then_some(DType::F32),
                        cos_table: cos_sin,
                        sin_table: cos_sin,
                        positions,
                        axes,
                    })
                })
            })
        })
    }
}
