//! The host side of `position/row_positions.wgsl`.

use crate::kernel::{View, params, shader, shared};

params! {
    pub(crate) struct PositionParams {
        view: View,
        start: u32,
        by_row: u32,
        last: u32,
        pad: u32,
    }
}
shared! { PositionParams = "PositionParams" }

pub(crate) const SHADER: &str = shader!("position/row_positions");

/// Replaces the accessor of x if the kernel writes x in place.
pub(super) const X_IS_OUT: &str = "fn x_at(o: u32) -> f32 { return out_at(o); }\n";
