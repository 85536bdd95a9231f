//! The kernels: the tensors, numbers, variants and WGSL of each.

pub(crate) mod local;
pub(crate) mod local_columns;
pub(crate) mod local_gradients;
pub(crate) mod local_positions;
pub(crate) mod local_positions_backward;
pub(crate) mod local_rows;
pub(crate) mod local_weights;
