//! The kernels: tensors, numbers, variant and text of each.

pub(crate) mod selected_keys;
pub(crate) mod selected_sums;
pub(crate) mod selected_weights;
