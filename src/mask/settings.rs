//! What the rules of a mask have beside tensors.

use crate::pattern::Pattern;

/// Where the diagonal of a mask lies when there are more keys than queries, or fewer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Alignment {
    /// The last query stands at the last key: query `i` is at key `i + kv_len − q_len`.
    /// What decoding with a full view of the cache needs; the default.
    #[default]
    BottomRight,
    /// The first query stands at the first key: query `i` is at key `i`.
    TopLeft,
}

impl Alignment {
    /// Key position of query 0.
    pub(crate) fn diagonal(self, q_len: usize, kv_len: usize) -> i64 {
        match self {
            Alignment::BottomRight => kv_len as i64 - q_len as i64,
            Alignment::TopLeft => 0,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Settings {
    pub alignment: Alignment,
    /// Keys more than this many positions before the query are not seen.
    pub left: Option<usize>,
    /// Keys more than this many positions after the query are not seen.
    pub right: Option<usize>,
    pub pattern: Option<Pattern>,
    /// Queries and keys of a block of the map.
    pub block_size: [usize; 2],
    /// ALiBi by how far the key is, before or after, instead of by how far it is after.
    pub symmetric: bool,
}
