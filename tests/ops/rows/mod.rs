//! Operators on rows.

pub mod embedding;
pub mod logits;
pub mod mean_pool;
pub mod norm;
pub mod pointwise;
pub mod radix_sort;
