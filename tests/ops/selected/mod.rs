//! Attention to selected keys.

pub mod indexer;
