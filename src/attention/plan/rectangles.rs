//! Rectangles of query–key pairs that must be in memory together.

use std::ops::Range;

use super::fused::TANH;
use crate::device::DeviceFacts;
use crate::tensor::Shape;

/// Pairs of queries and keys of some batch entries, for all heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rectangle {
    pub batch: Range<usize>,
    pub queries: Range<usize>,
    pub keys: Range<usize>,
}

impl Rectangle {
    pub fn sizes(&self) -> [usize; 3] {
        [self.batch.len(), self.queries.len(), self.keys.len()]
    }
}

/// The gradients that are summed over a rectangle. A gradient of queries sums over all their keys,
/// a gradient of keys over all their queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sides {
    pub queries: bool,
    pub keys: bool,
}

/// The most pairs in memory, unless a single row has more.
const MOST_PAIRS: usize = 1 << 23;

/// Returns rectangles that together cover all pairs: one if it is not too large. Otherwise, for
/// gradients of queries, each rectangle has all keys of some queries. For gradients of keys, each
/// has all queries of some keys. `wanted` chooses the sides.
pub(crate) fn rectangles(
    shape: &Shape,
    wanted: Sides,
    work_limit: u64,
    device: &DeviceFacts,
) -> Vec<(Rectangle, Sides)> {
    let Shape { batch, heads, q_len, kv_len, head_dim, .. } = *shape;
    let most = (work_limit as f64 / (2.0 * TANH * head_dim as f64)) as usize;
    let most = most.clamp(1, MOST_PAIRS);
    let grid = device.max_workgroups as usize;
    let pairs = heads.saturating_mul(q_len).saturating_mul(kv_len);
    let whole = pairs.saturating_mul(batch) <= most && batch.saturating_mul(heads) <= grid && q_len <= grid;
    if whole {
        return vec![(Rectangle { batch: 0..batch, queries: 0..q_len, keys: 0..kv_len }, wanted)];
    }
    let mut all = Vec::new();
    // Rectangles for queries, then for keys.
    for (side, of_queries) in [(wanted.queries, true), (wanted.keys, false)] {
        if !side {
            continue;
        }
        let (len, others) = if of_queries { (q_len, kv_len) } else { (kv_len, q_len) };
        // The grid has an axis for queries, and one for batch entries times heads.
        let longest = if of_queries { len.min(grid) } else { len };
        let rows = (most / heads.saturating_mul(others).max(1)).max(1);
        let entries = if longest == len { (rows / len).min(grid / heads.max(1)).max(1) } else { 1 };
        // Whole workgroups of rows, so that each workgroup computes one part of a sum.
        let step = if rows >= len && longest == len {
            len
        } else if rows.min(longest) >= 64 {
            rows.min(longest) / 64 * 64
        } else {
            1 << rows.min(longest).ilog2()
        };
        for b in (0..batch).step_by(entries) {
            for at in (0..len).step_by(step) {
                let own = at..(at + step).min(len);
                let (queries, keys) = if of_queries { (own, 0..kv_len) } else { (0..q_len, own) };
                let sides = Sides { queries: of_queries, keys: !of_queries };
                all.push((Rectangle { batch: b..(b + entries).min(batch), queries, keys }, sides));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_is_in_one_rectangle_of_each_side() {
        let device = &DeviceFacts::LEAST;
        for (batch, heads, q_len, kv_len) in [(2, 3, 5, 7), (3, 2, 130, 90), (1, 1, 1, 300), (5, 1, 64, 1)] {
            let shape = Shape { batch, heads, kv_heads: 1, q_len, kv_len, head_dim: 1, value_dim: 1 };
            for limit in [1, 32 * 100, 32 * 2000, 32 * 20_000, 1 << 37] {
                let sides = Sides { queries: true, keys: true };
                let all = rectangles(&shape, sides, limit, device);
                for of_queries in [true, false] {
                    let mut seen = vec![0; batch * q_len * kv_len];
                    for (r, sides) in &all {
                        if !(if of_queries { sides.queries } else { sides.keys }) {
                            continue;
                        }
                        let complete =
                            if of_queries { r.keys == (0..kv_len) } else { r.queries == (0..q_len) };
                        assert!(complete, "{r:?}");
                        let pairs = r.sizes().iter().product::<usize>() * heads;
                        let row = heads * if of_queries { kv_len } else { q_len };
                        assert!(pairs as u64 * 32 <= limit || pairs == row, "{r:?} {limit}");
                        for b in r.batch.clone() {
                            for i in r.queries.clone() {
                                r.keys.clone().for_each(|j| seen[(b * q_len + i) * kv_len + j] += 1);
                            }
                        }
                    }
                    assert!(seen.iter().all(|n| *n == 1), "{shape:?} {limit}");
                }
            }
        }
    }
}
