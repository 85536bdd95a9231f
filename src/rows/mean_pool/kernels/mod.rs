//! The kernels: tensors, numbers, variant and text of each kernel.

pub(crate) mod mean_pool;
pub(crate) mod mean_pool_backward;
