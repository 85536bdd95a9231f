//! Constants of kernels whose workgroups add up totals.

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: usize = 64;
/// Workgroup memory of totals.
pub(crate) const TOTALS_BYTES: u32 = (WORKGROUP * size_of::<f32>()) as u32;
