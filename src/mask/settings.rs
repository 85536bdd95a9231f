//! What the rules of a mask have beside tensors.

use super::Pattern;
use crate::tensor::{Error, LONGEST_AXIS};

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
    /// Query `i` is at key `i + n`, for the `n` keys that are past; below 2^29 and above −2^29. Not
    /// with packed sequences or a cache, which have positions of their own.
    /// [`Mask::query_offsets`](crate::Mask::query_offsets) has one per batch entry.
    Offset(i64),
}

impl Alignment {
    /// Key position of query 0.
    pub(crate) fn diagonal(self, q_len: usize, kv_len: usize) -> i64 {
        match self {
            Alignment::BottomRight => kv_len as i64 - q_len as i64,
            Alignment::TopLeft => 0,
            Alignment::Offset(n) => n,
        }
    }
}

/// What the rules of a mask have beside tensors.
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

impl Settings {
    pub fn check(&self) -> Result<(), Error> {
        match self.alignment {
            Alignment::Offset(n) if n.unsigned_abs() > LONGEST_AXIS as u64 => {
                let expected = "above −2^29 and below 2^29";
                Err(Error::Option { option: "alignment offset", value: n as f64, expected })
            }
            _ => Ok(()),
        }
    }
}
