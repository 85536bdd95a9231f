//! The configuration of native sparse attention.

use crate::attention::Config;
use crate::rows::MAX_TOP_K;
use crate::tensor::Error;

/// The configuration of a [`NativeSparseAttention`](super::NativeSparseAttention), fixed at its
/// creation.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct NativeSparseConfig {
    pub(crate) attention: Config,
    pub(crate) length: usize,
    pub(crate) stride: usize,
    pub(crate) block: usize,
    pub(crate) count: usize,
    pub(crate) initial: usize,
    pub(crate) local: usize,
    pub(crate) window: usize,
}

impl NativeSparseConfig {
    /// Configures heads, channels, scale, softcap and types as `attention` does. The other numbers
    /// are the paper's: compressed blocks of 32 keys, one every 16 keys. Each query selects 16
    /// blocks of 64 keys: always the first, its own and the one before. The window has 512 keys.
    pub fn new(attention: Config) -> Self {
        NativeSparseConfig {
            attention,
            length: 32,
            stride: 16,
            block: 64,
            count: 16,
            initial: 1,
            local: 2,
            window: 512,
        }
    }

    /// Sets the keys of a compressed block. A block begins every `stride` keys. `stride` divides
    /// `length`.
    pub fn compression(mut self, length: usize, stride: usize) -> Self {
        (self.length, self.stride) = (length, stride);
        self
    }

    /// Sets the keys of a block, and the number of blocks that each query selects. A block is a
    /// multiple of the stride of compression. A query selects at most 2048.
    pub fn selection(mut self, block: usize, count: usize) -> Self {
        (self.block, self.count) = (block, count);
        self
    }

    /// Sets the numbers of blocks that are always selected. They are the first ones of the
    /// sequence, and the last ones up to the query's own. They count among those of
    /// [`selection`](Self::selection).
    pub fn always(mut self, initial: usize, local: usize) -> Self {
        (self.initial, self.local) = (initial, local);
        self
    }

    /// Sets the keys of the window, with the query's own.
    #[doc(alias = "sliding_window")]
    pub fn window(mut self, window: usize) -> Self {
        self.window = window;
        self
    }

    /// The number of compressed keys of `kv_len` keys: the complete blocks, but at least 1. If no
    /// block is complete, no query sees the one compressed key.
    pub fn compressed_len(&self, kv_len: usize) -> usize {
        match kv_len.checked_sub(self.length) {
            Some(rest) => (rest / self.stride.max(1)).saturating_add(1),
            None => 1,
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        self.attention
            .kernel_options
            .refuse_batch_invariant("`batch_invariant` with native sparse attention")?;
        let NativeSparseConfig { length, stride, block, count, initial, local, window, .. } = *self;
        let in_range = |option, value: usize, least, most, expected| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(Error::Option { option, value: value as f64, expected }),
        };
        in_range("compression.length", length, 1, 1 << 20, "1 to 2^20 keys")?;
        in_range("compression.stride", stride, 1, length, "1 to `length` keys")?;
        in_range("selection.block", block, 1, 1 << 20, "1 to 2^20 keys")?;
        in_range("selection.count", count, 1, MAX_TOP_K, "1 to 2048 blocks")?;
        in_range("window", window, 1, 1 << 28, "1 to 2^28 keys")?;
        let always = initial.saturating_add(local);
        in_range("always", always, 0, count, "at most the count of `selection`")?;
        for (what, value) in [("compression.length", length), ("selection.block", block)] {
            if !value.is_multiple_of(stride) {
                let (by, divisor) = ("compression.stride", stride);
                return Err(Error::NotDivisible { what, value, by, divisor });
            }
        }
        Ok(())
    }

    /// The compressed keys that a query at `position` sees.
    pub(crate) fn visible(&self, position: usize) -> usize {
        let complete = (position + 1).checked_sub(self.length);
        complete.map_or(0, |rest| rest / self.stride + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressed_blocks_are_complete() {
        let config = NativeSparseConfig::new(Config::new(1, 8)).compression(8, 4);
        let lens = [1, 7, 8, 11, 12, 16, 100].map(|kv_len| config.compressed_len(kv_len));
        assert_eq!(lens, [1, 1, 1, 1, 2, 3, 24]);
        let visible = [0, 6, 7, 10, 11, 15, 99].map(|position| config.visible(position));
        assert_eq!(visible, [0, 0, 1, 1, 2, 3, 24]);
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let own = NativeSparseConfig::new(Config::new(1, 8));
        assert!(own.check().is_ok());
        let wrong = [
            own.compression(0, 1),
            own.compression(32, 0),
            own.compression(32, 48),
            own.compression(32, 12),
            own.selection(0, 16),
            own.selection(40, 16),
            own.selection(64, 0),
            own.selection(64, 2049),
            own.selection(64, 2),
            own.always(usize::MAX, 2),
            own.window(0),
        ];
        assert!(wrong.iter().all(|config| config.check().is_err()));
    }
}
