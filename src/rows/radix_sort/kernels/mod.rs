//! The kernels: tensors, numbers, variant and text of each kernel.

pub(crate) mod radix_sort_count;
pub(crate) mod radix_sort_scan;
pub(crate) mod radix_sort_scatter;
