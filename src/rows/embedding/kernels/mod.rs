//! The kernels: tensors, numbers, variant and text of each kernel.

pub(crate) mod embedding;
pub(crate) mod embedding_backward;
