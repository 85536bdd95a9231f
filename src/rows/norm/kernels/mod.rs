//! The kernels: tensors, numbers, variant and text of each kernel.

pub(crate) mod norm;
pub(crate) mod norm_backward;
pub(crate) mod norm_sums;
