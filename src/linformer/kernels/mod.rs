//! The kernels: tensors, numbers, variant and text of each.

pub(crate) mod keep_rows;
