//! Operators on rows.

pub mod causal_conv;
pub mod elementwise;
pub mod embedding;
pub mod gated_norm;
pub mod logits;
pub mod mean_pool;
pub mod norm;
pub mod radix_sort;
