//! The kernels: the tensors, numbers, variants and WGSL of each.

pub(crate) mod additive_backward;
pub(crate) mod additive_pairs;
