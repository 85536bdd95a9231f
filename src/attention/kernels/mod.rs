//! The kernels: tensors, numbers, variant and text of each.

pub(crate) mod additive_scores;
pub(crate) mod append_keys;
pub(crate) mod average_weights;
pub(crate) mod captured_gradients;
pub(crate) mod fused;
pub(crate) mod fused_backward;
pub(crate) mod key_lists;
pub(crate) mod merge_splits;
pub(crate) mod row_stats;
pub(crate) mod row_totals;
pub(crate) mod score_gradients;
pub(crate) mod score_stage;
pub(crate) mod scores;
pub(crate) mod softmax;
pub(crate) mod weighted_sum;
