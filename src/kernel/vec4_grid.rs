//! The grid of kernels whose invocations compute four channels of a row at a time.

use crate::device::DeviceFacts;

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: usize = 64;

/// The largest number of workgroups for a head's rows. If there is more work, each workgroup
/// repeats.
const MOST_GROUPS: usize = 65535;

/// The work of a tensor `[batch, heads, length, dim]`, and the grid for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vec4Grid {
    /// Vectors of four channels in a row.
    pub in_row: u32,
    /// Vectors of four channels in all rows of a head.
    pub in_head: u32,
    /// Invocations that share the work of a head.
    pub step: u32,
    /// Workgroups for a head, heads, and batch entries.
    pub workgroups: [usize; 3],
}

impl Vec4Grid {
    pub fn of([batch, heads, length, dim]: [usize; 4], device: &DeviceFacts) -> Self {
        let in_row = dim.div_ceil(4);
        let in_head = length.saturating_mul(in_row);
        let groups = in_head.div_ceil(WORKGROUP).min(MOST_GROUPS).min(device.max_workgroups as usize);
        Vec4Grid {
            in_row: in_row as u32,
            in_head: in_head as u32,
            step: (groups * WORKGROUP) as u32,
            workgroups: [groups, heads, batch],
        }
    }
}
