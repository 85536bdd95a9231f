//! The kernels: tensors, numbers, variant and text of each.

pub(crate) mod additive_backward;
pub(crate) mod additive_pairs;
