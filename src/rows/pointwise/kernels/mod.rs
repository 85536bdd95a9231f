//! The kernels: tensors, numbers, variant and text of each.

pub(crate) mod pointwise;
pub(crate) mod pointwise_backward;
