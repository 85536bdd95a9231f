//! Attention, its gradients, its stages.

pub mod backward;
pub mod backward_matrix;
pub mod backward_scores;
pub mod batch_invariant;
pub mod bf16;
pub mod biases;
pub mod differential;
pub mod fused;
pub mod hidden_tiles;
pub mod key_splits;
pub mod matrix;
pub mod merge;
pub mod merge_backward;
pub mod packed;
pub mod scores;
pub mod stages;
pub mod work_limit;
