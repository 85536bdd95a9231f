//! Operators on rows.

pub mod elementwise;
pub mod embedding;
pub mod logits;
pub mod mean_pool;
pub mod norm;
pub mod radix_sort;
