//! The kernels: the tensors, numbers, variants and WGSL of each.

pub(crate) mod keep_rows;
