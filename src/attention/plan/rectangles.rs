//! Which pairs of queries and keys are in memory at a time, where they must be.

use std::ops::Range;

use super::fused::TANH;
use crate::device::DeviceFacts;
use crate::tensor::Shape;

/// Pairs of some batch entries' queries and keys, of all heads.
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

/// Which gradients are summed over a rectangle: those of queries over all of their keys, those of
/// keys over all of their queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sides {
    pub queries: bool,
    pub keys: bool,
}

/// Most pairs in memory, if a row of them is not more.
const MOST_PAIRS: usize = 1 << 23;

/// Rectangles that together are all pairs: one if it is not too large; else each has all keys of
/// some queries, and each of others all queries of some keys, as sums over either are `wanted`.
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
    // Of queries, and of keys.
    for (side, of_queries) in [(wanted.queries, true), (wanted.keys, false)] {
        if !side {
            continue;
        }
        let (len, others) = if of_queries { (q_len, kv_len) } else { (kv_len, q_len) };
        // The grid counts queries, and sequences by heads.
        let longest = if of_queries { len.min(grid) } else { len };
        let rows = (most / heads.saturating_mul(others).max(1)).max(1);
        let entries = if longest == len { (rows / len).min(grid / heads.max(1)).max(1) } else { 1 };
        // Whole workgroups' rows, so that each gives one part of a sum.
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
