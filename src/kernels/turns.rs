//! Twin of `shared/turns.wgsl`: for every kernel that rotates.

use super::shader;
use crate::kernel::{Binding, Width, params, shared};
use crate::tensor::DType;

params! {
    pub(crate) struct Turns {
        pairs: u32,
        amplitude: f32,
        rotary_dim: u32,
        order: u32,
    }
}
shared! { Turns = "Turns" }

/// Digits of a position, and values of a digit.
pub(crate) const LEVELS: usize = 3;
pub(crate) const DIGITS: usize = 256;

pub(crate) const SHADER: &str = shader!("shared/turns");
/// In place of the binding where nothing is rotated.
pub(crate) const NONE: &str = "fn turns_at(o: u32) -> f32 { return 0.0; }\n";

/// The table, `[3, 256, pairs, 2]`.
pub(crate) fn binding() -> Binding {
    Binding::read("turns", DType::F32, Width::One)
}
