//! The kernels: the tensors, numbers, variants and WGSL of each.

pub(crate) mod numbers;
pub(crate) mod recurrent_carry;
pub(crate) mod recurrent_chain;
pub(crate) mod recurrent_chunks;
pub(crate) mod recurrent_d_channel_decays;
pub(crate) mod recurrent_d_channels;
pub(crate) mod recurrent_d_decays;
pub(crate) mod recurrent_d_ends;
pub(crate) mod recurrent_d_errors;
pub(crate) mod recurrent_d_pairs;
pub(crate) mod recurrent_d_rates;
pub(crate) mod recurrent_d_rows;
pub(crate) mod recurrent_d_states;
pub(crate) mod recurrent_d_values;
pub(crate) mod recurrent_norms;
pub(crate) mod recurrent_out;
pub(crate) mod recurrent_rows;
pub(crate) mod recurrent_scores;
pub(crate) mod recurrent_solve;
pub(crate) mod recurrent_step;
pub(crate) mod recurrent_values;
