//! The kernels: tensors, numbers, variant and text of each kernel.

pub(crate) mod quantized_project;
pub(crate) mod quantized_rows;
