//! The kernels: tensors, numbers, variant and text of each kernel.

pub(crate) mod elementwise;
pub(crate) mod elementwise_backward;
