//! Sizes of a call: lists, spans of queries, and temporary memory.

use super::span::{Span, spans, spans_by_entry};
use crate::device::DeviceFacts;
use crate::kernel::fits;
use crate::tensor::{Error, Shape};

/// The largest number of bytes of lists, and of lists and terms in a backward pass.
const MOST_BYTES: u64 = 64 << 20;

/// The sizes of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SelectedPlan {
    pub shape: Shape,
    pub list_heads: usize,
    /// Indices of a query.
    pub count: usize,
    pub block: usize,
    pub window: usize,
    /// Keys that a list can have.
    pub capacity: usize,
    /// Bytes of other temporary memory for each query.
    pub extra_bytes: u64,
    /// True if the call needs a bitmap of the keys.
    pub with_bitmap: bool,
    /// The queries that a dispatch can have.
    pub most_queries: usize,
}

impl SelectedPlan {
    /// Plans a call with lists of `count` indices.
    pub fn new(
        shape: Shape,
        [list_heads, count]: [usize; 2],
        [block, window]: [usize; 2],
        device: &DeviceFacts,
    ) -> Self {
        // A list has each key at most once.
        let capacity = count.saturating_mul(block).saturating_add(window).clamp(1, shape.kv_len);
        let most_queries = device.max_workgroups as usize;
        let (extra_bytes, with_bitmap) = (0, false);
        SelectedPlan {
            shape,
            list_heads,
            count,
            block,
            window,
            capacity,
            extra_bytes,
            with_bitmap,
            most_queries,
        }
    }

    /// The words of a query's lists and lengths.
    pub fn row(&self) -> usize {
        self.shape.heads + self.list_heads * self.capacity
    }

    /// The words of a query's keys as bits.
    pub fn words(&self) -> usize {
        self.shape.kv_len.div_ceil(32)
    }

    /// Key/value heads of the attention. If every query head has a list, no heads share keys.
    pub fn call_heads(&self) -> usize {
        self.list_heads.max(self.shape.kv_heads)
    }

    /// Heads of the attention that read the same keys.
    pub fn share(&self) -> usize {
        self.call_heads() / self.shape.kv_heads
    }

    /// Channels of a row of terms.
    pub fn padded(&self, channels: usize) -> u64 {
        channels.next_multiple_of(4) as u64
    }

    /// The words of the lists of `rows` queries.
    pub fn list_words(&self, rows: usize) -> u64 {
        rows as u64 * self.row() as u64 + self.shape.heads as u64
    }

    /// The words of the bitmap of `rows` queries.
    pub fn bitmap_words(&self, rows: usize) -> u64 {
        rows as u64 * self.list_heads as u64 * self.words() as u64 * 2
    }

    /// The most queries of a span.
    fn most_rows(&self) -> usize {
        let bitmap = if self.with_bitmap { 4 * self.bitmap_words(1) } else { 0 };
        let each = 4 * self.row() as u64 + bitmap + self.extra_bytes;
        ((MOST_BYTES / each) as usize).clamp(1, self.most_queries)
    }

    /// Returns the spans of a call. A span has queries of one batch entry, or one query of several.
    pub fn spans(&self) -> Vec<Span> {
        let Shape { batch, q_len, .. } = self.shape;
        let most = self.most_rows();
        if q_len == 1 {
            return spans([batch, 1], most, 1);
        }
        spans_by_entry([batch, q_len], most, 1)
    }

    /// The queries of the longest span.
    pub fn longest(&self) -> usize {
        self.spans().iter().map(Span::rows).max().unwrap_or(0)
    }

    /// The shape of a span's attention: each query is a batch entry, and its keys are a list.
    pub fn attention(&self, span: Span) -> Shape {
        let kv_heads = self.call_heads();
        Shape { batch: span.rows(), kv_heads, q_len: 1, kv_len: self.capacity, ..self.shape }
    }

    /// The bytes of the lists of the longest span.
    pub fn list_bytes(&self, device: &DeviceFacts) -> Result<u64, Error> {
        fits(self.list_words(self.longest()), 4, device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(batch: usize, q_len: usize, count: usize) -> SelectedPlan {
        let shape = Shape { batch, q_len, kv_len: 1 << 20, kv_heads: 2, ..Shape::new(1, 8, 1, 64) };
        SelectedPlan::new(shape, [1, count], [1, 128], &DeviceFacts::LEAST)
    }

    #[test]
    fn spans_have_every_query_once() {
        for (batch, q_len, count) in
            [(1, 1, 64), (3, 1, 9_000_000), (2, 40_000, 2048), (5, 7, 3), (70_000, 1, 1), (1, 70_000, 1)]
        {
            let plan = plan(batch, q_len, count);
            let mut seen = vec![0; batch * q_len];
            for span in plan.spans() {
                assert!(span.queries[1] == 1 || span.batch[1] == 1);
                assert!((1..=65_535).contains(&span.rows()));
                let fits = 4 * plan.list_words(span.rows()) <= MOST_BYTES + 4 * 8;
                assert!(fits || span.rows() == 1, "{span:?}");
                for b in span.batch[0]..span.batch[0] + span.batch[1] {
                    for i in span.queries[0]..span.queries[0] + span.queries[1] {
                        seen[b * q_len + i] += 1;
                    }
                }
            }
            assert!(seen.iter().all(|n| *n == 1));
        }
    }

    #[test]
    fn lists_have_room_for_every_key() {
        let shape = Shape { kv_len: 100, ..Shape::new(1, 4, 10, 8) };
        let capacity = |count, block, window| {
            SelectedPlan::new(shape, [1, count], [block, window], &DeviceFacts::LEAST).capacity
        };
        assert_eq!(
            [capacity(5, 1, 3), capacity(5, 16, 3), capacity(7, 16, 0), capacity(usize::MAX, 2, 1)],
            [8, 83, 100, 100]
        );
    }
}
