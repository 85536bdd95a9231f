//! The kernels: tensors, numbers, variant and text of each.

pub(crate) mod elementwise;
pub(crate) mod elementwise_backward;
