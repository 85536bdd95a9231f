//! How the rows of a softmax are shared out.

/// Workgroups and rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rows {
    /// Invocations of a workgroup.
    pub workgroup: u32,
    /// Invocations that share a row: 1 or all.
    pub lanes: u32,
}

/// The form for software drivers (`cpu`) has one row per invocation, that for GPUs one per
/// workgroup.
pub(crate) fn rows(kv_len: usize, cpu: bool) -> Rows {
    if cpu {
        return Rows { workgroup: 8, lanes: 1 };
    }
    let lanes = kv_len.div_ceil(4).next_power_of_two().clamp(32, 256) as u32;
    Rows { workgroup: lanes, lanes }
}

/// The same of `count` rows that are summed in fours: where they are fewer than a software driver
/// computes at once, its lanes share one.
pub(crate) fn rows_or_parts(count: usize, features: usize, cpu: bool) -> Rows {
    if cpu && count < VECTOR as usize {
        return Rows { workgroup: VECTOR, lanes: VECTOR };
    }
    rows(features, cpu)
}

/// Lanes that share a row.
const VECTOR: u32 = 8;
