//! The kernels: tensors, numbers, variant and text of each.

pub(crate) mod cache;
pub(crate) mod cache_advance;
pub(crate) mod cache_append;
pub(crate) mod cache_compact;
pub(crate) mod cache_copy;
pub(crate) mod cache_read;
pub(crate) mod cache_reorder;
pub(crate) mod cache_words;
pub(crate) mod hadamard_rows;
