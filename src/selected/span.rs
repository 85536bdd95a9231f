//! Spans of queries that are computed together, so that temporary memory is bounded.

use crate::tensor::TensorView;

/// Batch entries and queries that are computed together: the first and the count of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub batch: [usize; 2],
    pub queries: [usize; 2],
}

impl Span {
    /// The queries of all batch entries.
    pub fn rows(&self) -> usize {
        self.batch[1] * self.queries[1]
    }

    /// Returns the part of a tensor with one row for each query.
    pub fn of<'a>(&self, t: TensorView<'a>) -> TensorView<'a> {
        self.of_batch(t).slice(2, self.queries[0], self.queries[1])
    }

    /// Returns the part of a tensor of keys.
    pub fn of_batch<'a>(&self, t: TensorView<'a>) -> TensorView<'a> {
        t.slice(0, self.batch[0], self.batch[1])
    }

    pub fn first(&self) -> [u32; 2] {
        [self.batch[0] as u32, self.queries[0] as u32]
    }
}

/// Cuts all queries into spans of at most `rows` queries, in groups of `tile` if possible. Batch
/// entries that fit are computed together.
pub(crate) fn spans([batch, queries]: [usize; 2], rows: usize, tile: usize) -> Vec<Span> {
    let rows = rows.max(1);
    if rows >= queries {
        let each = rows / queries;
        let starts = (0..batch).step_by(each);
        return starts.map(|b| Span { batch: [b, each.min(batch - b)], queries: [0, queries] }).collect();
    }
    let each = if rows > tile { rows - rows % tile } else { rows };
    let of_entry = |b| {
        let starts = (0..queries).step_by(each);
        starts.map(move |i| Span { batch: [b, 1], queries: [i, each.min(queries - i)] })
    };
    (0..batch).flat_map(of_entry).collect()
}

/// Cuts queries as [`spans`] does, but never computes queries of several batch entries together.
pub(crate) fn spans_by_entry([batch, queries]: [usize; 2], rows: usize, tile: usize) -> Vec<Span> {
    let of_entry =
        |b| spans([1, queries], rows, tile).into_iter().map(move |span| Span { batch: [b, 1], ..span });
    (0..batch).flat_map(of_entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cover_all_queries_once() {
        for (batch, queries) in [(1, 1), (3, 1), (2, 100), (5, 33)] {
            for rows in [0, 1, 7, 16, 33, 40, 66, 100, 1000] {
                let spans = spans([batch, queries], rows, 16);
                let mut seen = vec![0; batch * queries];
                for span in &spans {
                    assert!(span.rows() <= rows.max(1), "{span:?}");
                    for b in span.batch[0]..span.batch[0] + span.batch[1] {
                        for i in span.queries[0]..span.queries[0] + span.queries[1] {
                            seen[b * queries + i] += 1;
                        }
                    }
                }
                assert!(seen.iter().all(|n| *n == 1), "{batch} · {queries}, {rows}: {spans:?}");
            }
        }
    }
}
