//! The kernels: the tensors, numbers, variant and text of each.

pub(crate) mod add_positions;
pub(crate) mod rotate;
pub(crate) mod rotation_table;
pub(crate) mod row_positions;
pub(crate) mod table_backward;
