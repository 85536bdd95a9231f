//! Operators on rows: norms, activations, embeddings, means, logits, sorting.

pub(crate) mod embedding;
pub(crate) mod logits;
pub(crate) mod mean_pool;
pub(crate) mod norm;
pub(crate) mod plan;
pub(crate) mod pointwise;
pub(crate) mod radix_sort;
pub(crate) mod totals;
pub(crate) mod weight_norm;
