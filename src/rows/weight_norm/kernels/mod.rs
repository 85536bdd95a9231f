//! The kernels: tensors, numbers, variant and text of each kernel.

pub(crate) mod weight_norm;
pub(crate) mod weight_norm_backward;
