//! The host side of `position/rotation_table.wgsl`, for every kernel that rotates.

use crate::kernel::{params, shader, shared};

params! {
    pub(crate) struct RotationParams {
        pairs: u32,
        amplitude: f32,
        rotary_dim: u32,
        order: u32,
    }
}
shared! { RotationParams = "RotationParams" }

/// The number of digits of a position, and the number of values of a digit.
pub(crate) const LEVELS: usize = 3;
pub(crate) const DIGITS: usize = 256;

/// `RotationParams::order` for pairs whose channels are half the rotated channels apart. With the
/// other order they are adjacent.
pub(crate) const ORDER_HALF: u32 = 0;

pub(crate) const SHADER: &str = shader!("position/rotation_table");
