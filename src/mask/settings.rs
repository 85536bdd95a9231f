//! The settings of a mask's rules, apart from tensors.

use super::Pattern;
use crate::tensor::{Error, LONGEST_AXIS};

/// The place of a mask's diagonal if the numbers of keys and queries differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Alignment {
    /// The default, for decoding with a full view of the cache. The last query is at the last key:
    /// query `i` is at key `i + kv_len − q_len`.
    #[default]
    BottomRight,
    /// The first query is at the first key: query `i` is at key `i`.
    TopLeft,
    /// Query `i` is at key `i + n`, for `n` past keys. `n` is below 2^29 and above −2^29.
    ///
    /// Packed sequences and caches define their own positions and exclude an offset.
    /// [`Mask::query_offsets`](crate::Mask::query_offsets) has one offset per batch entry.
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

/// The settings of a mask's rules, apart from tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Settings {
    pub alignment: Alignment,
    /// Keys more than this many positions before the query are hidden.
    pub left: Option<usize>,
    /// Keys more than this many positions after the query are hidden.
    pub right: Option<usize>,
    pub pattern: Option<Pattern>,
    /// Queries and keys of a block of the map.
    pub block_size: [usize; 2],
    /// True if ALiBi's distance is absolute; else it is key − query.
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
