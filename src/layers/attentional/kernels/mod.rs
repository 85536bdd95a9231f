//! The kernels: tensors, numbers, variant and text of each.

pub(crate) mod tanh_backward;
pub(crate) mod tanh_sum;
