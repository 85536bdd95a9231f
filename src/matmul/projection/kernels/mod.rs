//! The kernels: tensors, numbers, variant and text of each kernel.

pub(crate) mod column_sums;
pub(crate) mod part_sums;
pub(crate) mod project;
pub(crate) mod project_backward;
