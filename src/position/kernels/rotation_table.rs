//! Twin of `position/rotation_table.wgsl`: for every kernel that rotates.

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

/// Digits of a position, and values of a digit.
pub(crate) const LEVELS: usize = 3;
pub(crate) const DIGITS: usize = 256;

/// `RotationParams::order` where the channels of a pair lie half the rotated ones apart, else one.
pub(crate) const ORDER_HALF: u32 = 0;

pub(crate) const SHADER: &str = shader!("position/rotation_table");
