//! The sizes of chunks of rows, spans of chunks and tiles of a product.

use crate::device::DeviceFacts;

/// The tile of an invocation, and the number of invocations that share a workgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearTiles {
    /// Invocations of a workgroup.
    pub workgroup: u32,
    /// Invocations that share the same rows, each with four columns.
    pub lanes: u32,
    /// Rows of an invocation: a multiple of four that divides a chunk.
    pub rows: u32,
}

impl LinearTiles {
    pub const ALL: [LinearTiles; 3] = [
        LinearTiles { workgroup: 64, lanes: 16, rows: 8 },
        LinearTiles { workgroup: 8, lanes: 8, rows: 16 },
        LinearTiles { workgroup: 16, lanes: 16, rows: 16 },
    ];

    /// Returns the tiles. On a software driver a workgroup is one vector, so that the driver loads
    /// data shared by its lanes once.
    pub fn of(cpu: bool, device: &DeviceFacts) -> Self {
        match (cpu, device.lanes) {
            (false, _) => Self::ALL[0],
            (true, 16) => Self::ALL[2],
            (true, _) => Self::ALL[1],
        }
    }

    /// Returns the number of workgroups for `rows` rows and `columns` columns.
    pub fn groups(self, rows: usize, columns: usize) -> usize {
        let rows_each = (self.rows * self.workgroup / self.lanes) as usize;
        rows.div_ceil(rows_each) * columns.div_ceil(4 * self.lanes as usize)
    }
}

/// Rows of a chunk of causal attention. Kernels compute the pairs within a chunk, and a state
/// stands for all earlier rows.
pub(crate) const CHUNK: usize = 64;
/// The number of chunks of the keys, for attention without causality.
const PARTS: usize = 256;
/// The most bytes for the states, and for the products within chunks, of a span of chunks.
const SPAN_BYTES: u64 = 32 << 20;
/// The most bytes of a buffer of rows for the heads of a group: the default limit of a binding.
const ROW_BYTES: u64 = 128 << 20;
/// The rows of a chunk are a multiple of this number, which the rows of every tile divide.
const TILE_ROWS: usize = 16;
/// Chunks of a dispatch whose chunks need no memory.
const WIDE_SPAN: usize = 16384;

/// The sizes that the plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearOutline {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub q_len: usize,
    pub kv_len: usize,
    pub features: usize,
    pub value_dim: usize,
    pub causal: bool,
    /// The number of packed sequences.
    pub packed: Option<usize>,
}

/// The plan of a call: its chunks, spans and states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinearPlan {
    pub chunk_len: usize,
    /// Chunks of the keys of a batch entry, and of its queries.
    pub slots: usize,
    pub query_slots: usize,
    /// Chunks that are computed together.
    pub span: usize,
    /// Floats of a row of a state.
    pub state_stride: usize,
    /// The number of states: one for each sequence. Packed rows have two more, for the rows before
    /// and after all sequences.
    pub sequences: usize,
}

impl LinearPlan {
    pub fn new(outline: &LinearOutline) -> Self {
        let LinearOutline { batch, heads, kv_heads, q_len, kv_len, features, value_dim, causal, packed } =
            *outline;
        let chunk_len =
            if causal { CHUNK } else { kv_len.div_ceil(PARTS).next_multiple_of(CHUNK).max(CHUNK) };
        // A chunk is not longer than the sequence.
        let chunk_len = chunk_len.min(q_len.max(kv_len).next_multiple_of(TILE_ROWS));
        // Every sequence may end in a partly filled chunk, and so may the rows before and after all
        // sequences.
        let more = packed.map_or(0, |n| n.saturating_add(2));
        let slots = kv_len.div_ceil(chunk_len).saturating_add(more);
        let query_slots = q_len.div_ceil(chunk_len).saturating_add(more);
        let state_stride = value_dim.next_multiple_of(4).saturating_add(4);
        let state = (4 * batch as u64).saturating_mul(kv_heads as u64).saturating_mul(features as u64);
        let state = state.saturating_mul(state_stride as u64);
        let scores =
            (4 * batch as u64).saturating_mul(heads as u64).saturating_mul((chunk_len * chunk_len) as u64);
        let largest = if causal { state.max(scores) } else { state };
        let span = (SPAN_BYTES / largest.max(1)).clamp(1, WIDE_SPAN as u64) as usize;
        LinearPlan {
            chunk_len,
            slots,
            query_slots,
            span: span.min(slots),
            state_stride,
            sequences: packed.map_or(batch, |n| n.saturating_add(2)),
        }
    }

    /// Returns the bytes of a state.
    fn state_bytes(&self, outline: &LinearOutline) -> u64 {
        4u64.saturating_mul(outline.features as u64).saturating_mul(self.state_stride as u64)
    }

    /// Returns the bytes of the states of a span.
    pub fn states_bytes(&self, outline: &LinearOutline) -> u64 {
        let heads = (outline.batch as u64).saturating_mul(outline.kv_heads as u64);
        heads.saturating_mul(self.span as u64).saturating_mul(self.state_bytes(outline))
    }

    /// Returns the bytes of the states of sequences.
    pub fn carry_bytes(&self, outline: &LinearOutline) -> u64 {
        (self.sequences as u64)
            .saturating_mul(outline.kv_heads as u64)
            .saturating_mul(self.state_bytes(outline))
    }

    /// Returns the bytes of the products within the chunks of a span.
    pub fn scores_bytes(&self, outline: &LinearOutline) -> u64 {
        let heads = (outline.batch as u64).saturating_mul(outline.heads as u64);
        heads.saturating_mul(self.span as u64).saturating_mul(4 * (self.chunk_len * self.chunk_len) as u64)
    }

    /// Returns the spans of `slots` chunks that need no memory for each chunk.
    pub fn wide_spans(slots: usize) -> Vec<(usize, usize)> {
        (0..slots).step_by(WIDE_SPAN).map(|first| (first, WIDE_SPAN.min(slots - first))).collect()
    }

    /// Returns the spans of `slots` chunks: the first chunk of each span and its number of chunks.
    pub fn spans(&self, slots: usize) -> Vec<(usize, usize)> {
        (0..slots).step_by(self.span.max(1)).map(|first| (first, self.span.min(slots - first))).collect()
    }
}

/// Bytes of scratch that a key/value head of a batch entry needs, with its query heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadBytes {
    /// The largest state or product within a chunk.
    pub chunk: u64,
    /// The largest buffer of rows.
    pub rows: u64,
}

/// The batch entries and key/value heads that are computed together: the first of each, and how
/// many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadGroup {
    pub batch: (usize, usize),
    pub kv_heads: (usize, usize),
}

impl HeadGroup {
    /// Returns the groups of all heads, which use the same scratch one after the other. Each group
    /// has at most `most_heads` query heads, and few enough that its buffers stay within their
    /// limits.
    pub fn all(outline: &LinearOutline, bytes: HeadBytes, most_heads: usize) -> Vec<Self> {
        let LinearOutline { batch, heads, kv_heads, .. } = *outline;
        Self::of(batch, kv_heads, heads, [(SPAN_BYTES, bytes.chunk), (ROW_BYTES, bytes.rows)], most_heads)
    }

    /// Returns the groups of `kv_heads` heads of each batch entry. A group keeps each limit, given
    /// as the most bytes and the bytes of one of these heads.
    pub fn of(
        batch: usize,
        kv_heads: usize,
        heads: usize,
        limits: [(u64, u64); 2],
        most_heads: usize,
    ) -> Vec<Self> {
        let most_heads = most_heads / (heads / kv_heads.max(1)).max(1);
        let fitting = limits.into_iter().map(|(most, each)| most / each.max(1)).fold(u64::MAX, u64::min);
        let most = most_heads.min(usize::try_from(fitting).unwrap_or(usize::MAX)).max(1);
        let (entries, heads) = if most >= kv_heads { (most / kv_heads.max(1), kv_heads) } else { (1, most) };
        // Groups of about the same size.
        let even = |all: usize, most: usize| all.div_ceil(all.div_ceil(most.max(1)).max(1)).max(1);
        let (entries, heads) = (even(batch, entries), even(kv_heads, heads));
        let cut =
            |all: usize, each: usize| (0..all).step_by(each).map(move |first| (first, each.min(all - first)));
        let rows = cut(batch, entries);
        rows.flat_map(|batch| cut(kv_heads, heads).map(move |kv_heads| HeadGroup { batch, kv_heads }))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_groups_cover_every_head_once_and_bound_memory() {
        for (batch, kv_heads, group) in
            [(1, 1, 1), (1025, 8, 1), (1, 8, 4), (65_536, 1, 1), (3, 70_000, 2), (7, 33, 3), (1, 1, 70_000)]
        {
            let heads = kv_heads * group;
            for (chunk, rows) in [(1024, 1 << 10), (17 << 10, 1 << 20), (33 << 20, 1), (1, 200 << 20)] {
                let outline = LinearOutline {
                    batch,
                    heads,
                    kv_heads,
                    q_len: 16,
                    kv_len: 16,
                    features: 16,
                    value_dim: 16,
                    causal: true,
                    packed: None,
                };
                let mut seen = 0;
                for HeadGroup { batch, kv_heads } in
                    HeadGroup::all(&outline, HeadBytes { chunk, rows }, 65_535)
                {
                    let count = batch.1 * kv_heads.1;
                    seen += count;
                    assert!(count == 1 || count as u64 * chunk <= SPAN_BYTES, "{outline:?} {chunk}");
                    assert!(count == 1 || count as u64 * rows <= ROW_BYTES, "{outline:?} {rows}");
                    assert!(count == 1 || count * group <= 65_535, "{outline:?}");
                    assert!(
                        batch.0 + batch.1 <= outline.batch && kv_heads.0 + kv_heads.1 <= outline.kv_heads
                    );
                }
                assert_eq!(seen, batch * kv_heads);
            }
        }
    }

    #[test]
    fn chunks_are_no_longer_than_sequences() {
        let outline = |len, causal| LinearOutline {
            batch: 1,
            heads: 1,
            kv_heads: 1,
            q_len: len,
            kv_len: len,
            features: 16,
            value_dim: 16,
            causal,
            packed: None,
        };
        for causal in [true, false] {
            for (len, chunk_len) in [(1, 16), (16, 16), (17, 32), (63, 64), (64, 64), (1000, 64)] {
                assert_eq!(LinearPlan::new(&outline(len, causal)).chunk_len, chunk_len, "{len}");
            }
        }
    }

    #[test]
    fn spans_cover_every_chunk_once_and_memory_is_bounded() {
        for (q_len, kv_len) in [(1, 1), (64, 64), (65, 65), (1 << 20, 1 << 20), (7, 100_000)] {
            for (causal, packed) in [(true, None), (false, None), (true, Some(5)), (false, Some(5))] {
                let outline = LinearOutline {
                    batch: 1,
                    heads: 4,
                    kv_heads: 2,
                    q_len,
                    kv_len,
                    features: 64,
                    value_dim: 64,
                    causal,
                    packed,
                };
                let plan = LinearPlan::new(&outline);
                let mut next = 0;
                for (first, count) in plan.spans(plan.slots) {
                    assert_eq!(first, next);
                    assert!(count > 0 && count <= plan.span);
                    next += count;
                }
                assert_eq!(next, plan.slots);
                assert!(plan.slots * plan.chunk_len >= kv_len);
                assert!(plan.states_bytes(&outline) <= SPAN_BYTES);
                assert!(!causal || plan.scores_bytes(&outline) <= SPAN_BYTES);
            }
        }
    }
}
