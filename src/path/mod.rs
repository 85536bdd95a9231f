//! Sequences of kernels: from checked tensors to calls.

pub(crate) mod project;
pub(crate) mod staged;

use crate::kernel::Call;
use crate::kernels::Stage;

pub(crate) type Calls<'a> = Vec<Call<'a, Stage>>;

/// Workgroup counts as wgpu takes them; what does not fit is beyond every device's limit.
pub(crate) fn grid(counts: [usize; 3]) -> [u32; 3] {
    counts.map(|n| u32::try_from(n).unwrap_or(u32::MAX))
}
