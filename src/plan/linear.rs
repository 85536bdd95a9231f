//! How linear attention is cut: chunks of rows, spans of chunks, tiles of a product.

use crate::device::DeviceFacts;

/// The tile of an invocation, and how many share a workgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearTiles {
    /// Invocations of a workgroup.
    pub workgroup: u32,
    /// Those that have the same rows, each four columns.
    pub lanes: u32,
    /// Rows of an invocation, a multiple of four that divides a chunk.
    pub rows: u32,
}

impl LinearTiles {
    pub const ALL: [LinearTiles; 3] = [
        LinearTiles { workgroup: 64, lanes: 16, rows: 8 },
        LinearTiles { workgroup: 8, lanes: 8, rows: 16 },
        LinearTiles { workgroup: 16, lanes: 16, rows: 16 },
    ];

    /// A software driver's vectors are workgroups of their own, so that it loads once what their lanes share.
    pub fn of(cpu: bool, device: &DeviceFacts) -> Self {
        match (cpu, device.lanes) {
            (false, _) => Self::ALL[0],
            (true, 16) => Self::ALL[2],
            (true, _) => Self::ALL[1],
        }
    }

    /// Workgroups for so many rows and columns.
    pub fn groups(self, rows: usize, columns: usize) -> usize {
        let rows_each = (self.rows * self.workgroup / self.lanes) as usize;
        rows.div_ceil(rows_each) * columns.div_ceil(4 * self.lanes as usize)
    }
}

/// Rows of a chunk of causal attention: within it pairs are computed, before it a state stands for all.
pub(crate) const CHUNK: usize = 64;
/// Chunks that the keys are cut into where order does not matter.
const PARTS: usize = 256;
/// Bytes of states, and of products within chunks, that a span of chunks may take.
const SPAN_BYTES: u64 = 32 << 20;

/// What the cut depends on.
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
    /// Packed sequences.
    pub packed: Option<usize>,
}

/// The cut of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinearPlan {
    pub chunk_len: usize,
    /// Chunks of the keys of a batch, and of its queries.
    pub slots: usize,
    pub query_slots: usize,
    /// Chunks computed together.
    pub span: usize,
    /// Floats of a row of a state.
    pub state_stride: usize,
    /// States that are kept: one for each sequence, and of packed rows two for those that are of none.
    pub sequences: usize,
}

impl LinearPlan {
    pub fn new(outline: &LinearOutline) -> Self {
        let LinearOutline { batch, heads, kv_heads, q_len, kv_len, features, value_dim, causal, packed } =
            *outline;
        let chunk_len =
            if causal { CHUNK } else { kv_len.div_ceil(PARTS).next_multiple_of(CHUNK).max(CHUNK) };
        // Every sequence may end in a chunk that is not full, and so may what is before and after them.
        let more = packed.map_or(0, |n| n.saturating_add(2));
        let slots = kv_len.div_ceil(chunk_len).saturating_add(more);
        let query_slots = q_len.div_ceil(chunk_len).saturating_add(more);
        let state_stride = value_dim.next_multiple_of(4).saturating_add(4);
        let state = (4 * batch as u64).saturating_mul(kv_heads as u64).saturating_mul(features as u64);
        let state = state.saturating_mul(state_stride as u64);
        let scores = (4 * batch as u64).saturating_mul(heads as u64).saturating_mul((CHUNK * CHUNK) as u64);
        let largest = if causal { state.max(scores) } else { state };
        let span = (SPAN_BYTES / largest.max(1)).clamp(1, 16384) as usize;
        LinearPlan {
            chunk_len,
            slots,
            query_slots,
            span: span.min(slots),
            state_stride,
            sequences: packed.map_or(batch, |n| n.saturating_add(2)),
        }
    }

    /// Bytes of a state.
    fn state_bytes(&self, outline: &LinearOutline) -> u64 {
        4u64.saturating_mul(outline.features as u64).saturating_mul(self.state_stride as u64)
    }

    /// Bytes of the states of a span.
    pub fn states_bytes(&self, outline: &LinearOutline) -> u64 {
        let heads = (outline.batch as u64).saturating_mul(outline.kv_heads as u64);
        heads.saturating_mul(self.span as u64).saturating_mul(self.state_bytes(outline))
    }

    /// Bytes of the states of sequences.
    pub fn carry_bytes(&self, outline: &LinearOutline) -> u64 {
        (self.sequences as u64)
            .saturating_mul(outline.kv_heads as u64)
            .saturating_mul(self.state_bytes(outline))
    }

    /// Bytes of the products within the chunks of a span.
    pub fn scores_bytes(&self, outline: &LinearOutline) -> u64 {
        let heads = (outline.batch as u64).saturating_mul(outline.heads as u64);
        heads.saturating_mul(self.span as u64).saturating_mul(4 * (self.chunk_len * self.chunk_len) as u64)
    }

    /// Spans of `slots` chunks: the first of each and how many.
    pub fn spans(&self, slots: usize) -> Vec<(usize, usize)> {
        (0..slots).step_by(self.span.max(1)).map(|first| (first, self.span.min(slots - first))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
