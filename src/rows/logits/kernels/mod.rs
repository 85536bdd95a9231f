//! The kernels: tensors, numbers, variant and text of each kernel.

pub(crate) mod log_softmax;
pub(crate) mod log_softmax_backward;
pub(crate) mod top_k;
pub(crate) mod top_k_merge;
pub(crate) mod top_k_select;
pub(crate) mod top_k_sort;
