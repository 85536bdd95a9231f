//! The keys of a query in a list: the host side of `keys/lists.wgsl`.

use crate::cache::kernels::cache::EVERY_KEY;
use crate::kernel::shader;

/// The places of the lists in the tensor of the lengths rule.
///
/// A call attends to listed keys if each of its batch entries is one query. The words of a
/// batch entry are a length for each query head, then a list for each key/value head.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct KeyLists {
    /// Words of a batch entry.
    pub row: u32,
    /// Words in front of its first list.
    pub start: u32,
    /// Words between the lists of key/value heads, 0 if all of them share one list.
    pub step: u32,
    /// Key/value heads of the call that read the same head of the tensors or the cache.
    pub share: u32,
    /// The batch entry of the tensors or the cache that the first batch entry of the call reads.
    pub batch: u32,
    /// Batch entries of the call that read the same one.
    pub queries: u32,
}

impl KeyLists {
    /// Returns the numbers of the kernels.
    pub fn numbers(lists: Option<Self>) -> [[u32; 4]; 2] {
        let Self { row, start, step, share, batch, queries } = lists.unwrap_or_default();
        [[row, start, step, share], [batch, queries, 0, 0]]
    }
}

/// Returns the WGSL that finds the key of a list's element.
pub(crate) fn text(listed: bool) -> &'static str {
    if listed { shader!("attention/keys/lists") } else { EVERY_KEY }
}
