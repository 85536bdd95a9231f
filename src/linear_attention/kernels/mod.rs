//! The kernels: the tensors, numbers, variants and WGSL of each.

pub(crate) mod linear;
pub(crate) mod linear_carry;
pub(crate) mod linear_chunks;
pub(crate) mod linear_d_keys;
pub(crate) mod linear_d_queries;
pub(crate) mod linear_d_rows;
pub(crate) mod linear_d_values;
pub(crate) mod linear_features;
pub(crate) mod linear_logs;
pub(crate) mod linear_map;
pub(crate) mod linear_map_backward;
pub(crate) mod linear_out;
pub(crate) mod linear_prefix;
pub(crate) mod linear_recurrent;
pub(crate) mod linear_scores;
pub(crate) mod linear_state;
pub(crate) mod linear_stats;
