//! The kernels of the gated DeltaNet layer.

pub(crate) mod delta_gates;
pub(crate) mod delta_gates_backward;
