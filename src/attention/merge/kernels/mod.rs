//! The kernels: tensors, numbers, variant and text of each.

pub(crate) mod merge;
pub(crate) mod merge_backward;
