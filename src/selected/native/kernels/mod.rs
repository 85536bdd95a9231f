//! The kernels: tensors, numbers, variant and text of each kernel.

pub(crate) mod block_means;
pub(crate) mod block_scores;
pub(crate) mod gated_sum;
