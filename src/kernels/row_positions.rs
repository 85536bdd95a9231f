//! Twin of `position/row_positions.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, View, Width, params, shared};
use crate::tensor::DType;

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

/// Declares the tensor of positions, if there is one. The constant says so; the text stands in for what is not there.
pub(crate) fn declare(positions: bool, bindings: &mut Vec<Binding>) -> (Constant, &'static str) {
    let constant = Constant::Bool("HAS_POSITIONS", positions);
    if positions {
        bindings.push(Binding::read("positions", DType::U32, Width::One));
        return (constant, "");
    }
    (constant, "fn positions_at(o: u32) -> u32 { return 0u; }\n")
}

/// Stands for x where x is written.
pub(super) const X_IS_OUT: &str = "fn x_at(o: u32) -> f32 { return out_at(o); }\n";
