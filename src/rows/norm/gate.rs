//! Gates of norms.

use crate::matmul::Activation;

/// A gate of a norm: a factor `f(gate)` of each element, before or after the norm. `T` is a tensor
/// with the shape of the rows, or a slice for the reference.
#[derive(Clone, Copy, Debug)]
pub struct NormGate<T> {
    pub(crate) gate: T,
    pub(crate) activation: Activation,
    /// True if the gate comes before the norm.
    pub(crate) first: bool,
}

impl<T> NormGate<T> {
    /// Multiplies the results of the norm: `norm(x) · f(gate)`. Gated DeltaNet (Yang, Kautz and
    /// Hatamizadeh 2024) has [`Activation::Silu`], Kimi Linear has [`Activation::Sigmoid`].
    pub fn after(gate: T, activation: Activation) -> Self {
        NormGate { gate, activation, first: false }
    }

    /// Multiplies the rows before the norm: `norm(x · f(gate))`. Mamba-2 (Dao and Gu 2024) has
    /// [`Activation::Silu`].
    pub fn before(gate: T, activation: Activation) -> Self {
        NormGate { gate, activation, first: true }
    }
}
