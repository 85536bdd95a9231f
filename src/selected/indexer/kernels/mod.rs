//! The kernels: tensors, numbers, variant and text of each kernel.

pub(crate) mod indexer_d_keys;
pub(crate) mod indexer_d_queries;
pub(crate) mod indexer_ranges;
pub(crate) mod indexer_scatter;
pub(crate) mod indexer_scores;
