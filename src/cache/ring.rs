//! The history of a ring: the tokens that it may have overwritten.

/// The sizes of a ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ring {
    /// The number of first tokens that are never overwritten.
    pub sinks: usize,
    /// The number of all stored tokens, sinks included.
    pub capacity: usize,
    /// The number of tokens that it can go back by when it is full.
    pub spare: usize,
}

impl Ring {
    /// Returns the largest length that a sequence may have had, if its length is now at most
    /// `most`. A ring that has overwritten tokens goes back by at most the spare tokens, or to its
    /// sinks.
    pub fn high(&self, high: usize, most: usize) -> usize {
        high.min(self.capacity.max(most.saturating_add(self.spare)))
    }

    /// Returns the largest length of a sequence after it goes back from `high` to `len` tokens.
    /// `None` if the ring has overwritten a token that `len` needs.
    pub fn high_after(&self, high: usize, len: usize) -> Option<usize> {
        if high <= self.capacity || len <= self.sinks {
            return Some(len);
        }
        // At length `high` the last `capacity − sinks` tokens are stored. Length `len` needs the
        // same number, less the spare tokens.
        (len.saturating_add(self.spare) >= high).then_some(high)
    }
}
