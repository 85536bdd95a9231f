//! The kernels: the tensors, numbers, variants and WGSL of each.

pub(crate) mod lsh_codes;
pub(crate) mod lsh_gather;
pub(crate) mod lsh_gradients;
pub(crate) mod lsh_hash;
pub(crate) mod lsh_merge;
