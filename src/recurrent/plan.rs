//! The chunks, spans and memory of a call.

use crate::linear_attention::plan::HeadGroup;
use crate::tensor::Shape;

/// Rows of a chunk: with one decay for each head, and with one for each channel.
const CHUNK: usize = 64;
pub(crate) const CHANNEL_CHUNK: usize = 16;
/// The most bytes of the arrays of a span of chunks.
const SPAN_BYTES: u64 = 96 << 20;
/// The most bytes of the states of the sequences of a group of heads.
const STATE_BYTES: u64 = 64 << 20;
/// The most chunks of a span: workgroups along an axis of a dispatch.
const MOST_SPAN: usize = 16384;
/// Rows of a chunk and features of a row are padded to a multiple of this number. The rows of every
/// tile divide it. Values are padded to a vec4.
const BLOCK: usize = 16;

/// The sizes that the plan depends on. In `shape`, `heads` are value heads, and `kv_heads` are
/// heads of queries and keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outline {
    pub shape: Shape,
    pub delta: bool,
    pub by_channel: bool,
    pub unit: bool,
    pub backward: bool,
    /// The number of packed sequences.
    pub packed: Option<usize>,
}

/// The first element of each array in the memory of a span. Arrays that a call does not need have
/// the place 0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Places {
    pub queries: usize,
    pub keys: usize,
    pub prefix_queries: usize,
    pub prefix_keys: usize,
    pub suffix_keys: usize,
    pub factors: usize,
    pub solved_keys: usize,
    pub solved_suffix: usize,
    pub errors: usize,
    pub d_out: usize,
    pub d_errors: usize,
    pub rates: usize,
    pub norms: usize,
    pub ends: usize,
    pub d_ends: usize,
    pub scores: usize,
    pub d_scores: usize,
    pub states: usize,
    pub d_states: usize,
    pub d_queries: usize,
    pub d_keys: usize,
    pub d_suffix_keys: usize,
    /// The elements of all arrays.
    pub total: usize,
}

/// The plan of a call, or of a group of its heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub outline: Outline,
    /// Elements of a row of features and of a row of values.
    pub features: usize,
    pub values: usize,
    pub chunk_len: usize,
    /// Chunks of a batch entry, and of a span.
    pub slots: usize,
    pub span: usize,
    pub sequences: usize,
}

impl Plan {
    pub fn new(outline: Outline) -> Self {
        let Shape { batch, q_len, head_dim, value_dim, .. } = outline.shape;
        let most = if outline.by_channel { CHANNEL_CHUNK } else { CHUNK };
        let chunk_len = most.min(q_len.next_multiple_of(BLOCK));
        // Every sequence may end in a partly filled chunk, and so may the rows before and after all
        // sequences.
        let more = outline.packed.map_or(0, |n| n.saturating_add(2));
        let slots = q_len.div_ceil(chunk_len).saturating_add(more);
        let mut plan = Plan {
            outline,
            features: head_dim.next_multiple_of(BLOCK),
            values: value_dim.next_multiple_of(4),
            chunk_len,
            slots,
            span: 1,
            sequences: outline.packed.unwrap_or(batch),
        };
        let fitting = usize::try_from(SPAN_BYTES / plan.bytes().max(1)).unwrap_or(1);
        plan.span = fitting.clamp(1, slots.clamp(1, MOST_SPAN));
        plan
    }

    /// Returns the elements of a state.
    pub fn state(&self) -> usize {
        self.features.saturating_mul(self.values)
    }

    /// Returns the places of the arrays of a span.
    pub fn places(&self) -> Places {
        let Outline { shape, delta, by_channel, unit, backward, .. } = self.outline;
        let chunks = shape.batch.saturating_mul(shape.heads).saturating_mul(self.span);
        let rows = chunks.saturating_mul(self.chunk_len);
        let mut total = 0usize;
        let mut place = |is: bool, count: usize, width: usize| {
            let at = if is { total } else { 0 };
            total = total.saturating_add(if is { count.saturating_mul(width) } else { 0 });
            at
        };
        let (f, v) = (self.features, self.values);
        let pairs = self.chunk_len * if delta { 2 } else { 1 };
        let places = Places {
            queries: place(true, rows, f),
            keys: place(true, rows, f),
            prefix_queries: place(true, rows, f),
            prefix_keys: place(delta, rows, f),
            suffix_keys: place(true, rows, f),
            factors: place(by_channel, rows, f),
            solved_keys: place(delta, rows, f),
            solved_suffix: place(delta && backward, rows, f),
            errors: place(true, rows, v),
            d_out: place(backward, rows, v),
            d_errors: place(backward, rows, v),
            rates: place(true, rows, 4),
            norms: place(unit, rows, 4),
            ends: place(true, chunks, f),
            d_ends: place(backward, chunks, f),
            scores: place(true, rows, pairs),
            d_scores: place(backward, rows, pairs),
            states: place(true, chunks, self.state()),
            d_states: place(backward, chunks, self.state()),
            d_queries: place(backward, rows, f),
            d_keys: place(backward && delta, rows, f),
            d_suffix_keys: place(backward, rows, f),
            total: 0,
        };
        Places { total, ..places }
    }

    /// Returns the distance between the two arrays of scores.
    pub fn second_scores(&self) -> usize {
        let Shape { batch, heads, .. } = self.outline.shape;
        batch * heads * self.span * self.chunk_len * self.chunk_len
    }

    /// Returns the bytes of the arrays of a span.
    pub fn bytes(&self) -> u64 {
        (self.places().total as u64).saturating_mul(4)
    }

    /// Returns the elements of the states of sequences, one after the other.
    pub fn carry(&self) -> usize {
        self.sequences.saturating_mul(self.outline.shape.heads).saturating_mul(self.state())
    }

    /// Returns the spans: the first chunk of each and its number of chunks.
    pub fn spans(&self) -> Vec<(usize, usize)> {
        (0..self.slots).step_by(self.span.max(1)).map(|n| (n, self.span.min(self.slots - n))).collect()
    }

    /// Returns the elements of the states at the beginning of spans.
    pub fn checkpoints(&self) -> usize {
        let Shape { batch, heads, .. } = self.outline.shape;
        let spans = self.slots.div_ceil(self.span.max(1));
        if spans < 2 {
            0
        } else {
            [batch, heads, self.state()].into_iter().fold(spans, usize::saturating_mul)
        }
    }

    /// Returns the groups of heads that are computed one after the other.
    pub fn groups(outline: Outline, most_heads: usize) -> Vec<HeadGroup> {
        let Shape { batch, heads, kv_heads, .. } = outline.shape;
        let one = Shape { batch: 1, heads: heads / kv_heads.max(1), kv_heads: 1, ..outline.shape };
        let mut plan = Plan::new(Outline { shape: one, ..outline });
        plan.span = 1;
        let states = (plan.carry() as u64).saturating_mul(4);
        HeadGroup::of(batch, kv_heads, heads, [(SPAN_BYTES, plan.bytes()), (STATE_BYTES, states)], most_heads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outline(heads: usize, length: usize, dim: usize, packed: Option<usize>) -> Outline {
        let shape = Shape::new(1, heads, length, dim);
        Outline { shape, delta: true, by_channel: false, unit: true, backward: true, packed }
    }

    #[test]
    fn spans_cover_every_chunk_once() {
        for (length, packed) in [(1, None), (64, None), (65, Some(3)), (100_000, None), (70_000, Some(500))] {
            for by_channel in [false, true] {
                let plan = Plan::new(Outline { by_channel, ..outline(4, length, 64, packed) });
                let mut next = 0;
                for (first, count) in plan.spans() {
                    assert!(first == next && count > 0 && count <= plan.span, "{plan:?}");
                    next += count;
                }
                assert_eq!(next, plan.slots);
                assert!(plan.slots * plan.chunk_len >= length && plan.bytes() <= SPAN_BYTES, "{plan:?}");
                assert_eq!(plan.checkpoints() > 0, plan.spans().len() > 1);
            }
        }
    }

    #[test]
    fn arrays_do_not_overlap() {
        for (delta, by_channel, backward) in [(true, true, true), (true, false, true), (false, false, false)]
        {
            let plan = Plan::new(Outline { delta, by_channel, backward, ..outline(2, 1000, 24, None) });
            let places = plan.places();
            let mut all = vec![places.queries, places.keys, places.errors, places.scores, places.states];
            all.extend([places.rates, places.ends, places.norms, places.suffix_keys, places.prefix_queries]);
            all.extend(backward.then_some(places.d_states));
            all.extend(by_channel.then_some(places.factors));
            all.sort_unstable();
            assert!(all.windows(2).all(|pair| pair[0] < pair[1]) && all[all.len() - 1] < places.total);
        }
    }

    /// The figures of docs/guide/recurrent.md.
    #[test]
    fn guide_has_right_sizes() {
        let plan = Plan::new(outline(8, 100_000, 128, None));
        assert_eq!((plan.span * plan.chunk_len, 8 * 4 * plan.state()), (1280, 512 << 10));
    }
}
