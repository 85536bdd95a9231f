//! Distributes rows among workgroups and invocations.

/// The distribution of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rows {
    /// Invocations of a workgroup.
    pub workgroup: u32,
    /// Invocations that share a row: 1 or the whole workgroup.
    pub lanes: u32,
}

/// The distribution of rows: one row per invocation for software drivers (`cpu`), one row per
/// workgroup for GPUs.
pub(crate) fn rows(kv_len: usize, cpu: bool) -> Rows {
    if cpu {
        return Rows { workgroup: 8, lanes: 1 };
    }
    let lanes = kv_len.div_ceil(4).next_power_of_two().clamp(32, 256) as u32;
    Rows { workgroup: lanes, lanes }
}

/// The distribution of `count` rows that are summed as vec4. With fewer rows than a software driver
/// computes at once, its lanes share one row.
pub(crate) fn rows_or_parts(count: usize, features: usize, cpu: bool) -> Rows {
    if cpu && count < VECTOR as usize {
        return Rows { workgroup: VECTOR, lanes: VECTOR };
    }
    rows(features, cpu)
}

/// The lanes of a software driver that share a row.
const VECTOR: u32 = 8;
