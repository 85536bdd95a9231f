//! Twin of `position/rotation_table.wgsl`: for every kernel that rotates.

use super::shader;
use crate::kernel::{Binding, Width, params, shared};
use crate::tensor::DType;

params! {
    pub(crate) struct RotationParams {
        pairs: u32,
        amplitude: f32,
        rotary_dim: u32,
        order: u32,
    }
}
shared! { RotationParams = "RotationParams" }

/// Digits of a position, and values of a digit.
pub(crate) const LEVELS: usize = 3;
pub(crate) const DIGITS: usize = 256;

/// `RotationParams::order` where the channels of a pair lie half the rotated ones apart, else one.
pub(crate) const ORDER_HALF: u32 = 0;

pub(crate) const SHADER: &str = shader!("position/rotation_table");
/// In place of the binding where nothing is rotated.
pub(crate) const NONE: &str = "fn rotation_table_at(o: u32) -> f32 { return 0.0; }\n";

/// The table, `[3, 256, pairs, 2]`.
pub(crate) fn binding() -> Binding {
    Binding::read("rotation_table", DType::F32, Width::One)
}
