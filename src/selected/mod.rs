//! Attention to keys that are chosen for each query.
