//! Constants of kernels whose workgroups compute totals.

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: usize = 64;
/// Bytes of workgroup memory for totals.
pub(crate) const TOTALS_BYTES: u32 = (WORKGROUP * size_of::<f32>()) as u32;
