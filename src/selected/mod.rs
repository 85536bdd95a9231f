//! Attention to keys that are chosen for each query.

pub(crate) mod indexer;

pub use indexer::{Indexer, IndexerBackward, IndexerForward};
