//! Caches that get more room: new buffers, with copies of the stored rows.

use super::config::SideSize;
use super::kernels::cache::WORDS;
use super::sequences::Run;
use super::{Cache, CacheConfig, CacheLayout, new_layers, sequence_table};
use crate::kernel::BindingCache;
use crate::tensor::Error;

impl Cache {
    /// Records that the cache gets a larger capacity, or more pages. `config` may differ from
    /// [`config`](Self::config) only in [`CacheConfig::capacity`] and the number of pages. So a
    /// cache can begin small. If its capacity doubles each time, a token is copied at most twice on
    /// average.
    ///
    /// The cache gets new buffers. The device copies the rows that are in use, buffer to buffer,
    /// and compiles nothing. Lengths, shared pages and unrecorded changes stay. Calls that are
    /// already recorded, before or after their submission, keep the old buffers. The device frees
    /// these after the last such call. A [`Prepared`](crate::Prepared) call has the old buffers
    /// too: prepare it again. Operators that attended to the cache hold bindings of the old buffers
    /// until they drop or [`forget`](crate::Attention::forget) them.
    ///
    /// ```no_run
    /// # fn f(encoder: &mut wgpu::CommandEncoder, cache: &mut wgpu_attention::Cache, tokens: usize)
    /// # -> Result<(), wgpu_attention::Error> {
    /// // Room for the next tokens of a contiguous cache with one sequence.
    /// let needed = cache.len(0).unwrap_or(0) + tokens;
    /// if needed > cache.config().token_capacity() {
    ///     let capacity = needed.next_power_of_two();
    ///     cache.grow(encoder, cache.config().capacity(capacity))?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - [`Error::Unsupported`] for a ring, and if `config` differs in anything else.
    /// - [`Error::Option`] if the capacity or the number of pages is smaller than before.
    /// - The errors of [`new`](Self::new).
    ///
    /// On an error nothing is recorded and the cache does not change.
    #[doc(alias = "resize")]
    pub fn grow(&mut self, encoder: &mut wgpu::CommandEncoder, config: CacheConfig) -> Result<(), Error> {
        self.config.check_growth(&config)?;
        config.check(&self.pipelines.facts())?;
        let device = self.pipelines.device();
        let layers = new_layers(device, &config)?;
        let table = sequence_table::empty(device, &config)?;
        let (sequences, edits) = self.sequences.grown(&config);
        let before = self.bind_edits(self.sequences.edits())?;
        let after = self.bind_words(&table, &edits)?;
        // Nothing can fail after this line.
        before.record(encoder);
        let runs = self.sequences.runs(&self.config, &config);
        let sizes = || self.config.sides().into_iter().zip(config.sides());
        for (old, new) in self.layers.iter().zip(&layers) {
            for ((old, new), sizes) in self.buffers(old).iter().zip(new).zip(sizes()) {
                copy_rows(encoder, [old, new], sizes, &runs);
            }
        }
        copy_table(encoder, [&self.sequence_table, &table], &self.config, &config);
        after.record(encoder);
        self.layers = layers;
        self.sequence_table = table;
        self.sequences = sequences;
        self.config = config;
        self.bindings = BindingCache::default();
        Ok(())
    }

    /// Bytes of device memory that the cache's buffers take. [`CacheConfig::token_bytes`] is the
    /// share of a token.
    pub fn bytes(&self) -> u64 {
        let rows = self.layers.iter().flat_map(|layer| self.buffers(layer));
        let others = [Some(&self.sequence_table), self.table_copy.as_ref()];
        rows.chain(others.into_iter().flatten()).map(wgpu::Buffer::size).sum()
    }
}

impl CacheConfig {
    /// Refuses a configuration into which a cache cannot grow.
    fn check_growth(&self, to: &CacheConfig) -> Result<(), Error> {
        let grown = |why| Err(Error::Unsupported { what: "a cache that grows", why });
        let pages = match (self.layout, to.layout) {
            (CacheLayout::Ring { .. }, _) => {
                return grown("the place of a ring's token depends on its capacity; make a new cache");
            }
            (CacheLayout::Paged { pages, .. }, CacheLayout::Paged { pages: more, .. }) => [pages, more],
            _ => [0; 2],
        };
        let layout = match to.layout {
            CacheLayout::Paged { page, .. } => CacheLayout::Paged { page, pages: pages[0] },
            other => other,
        };
        if (CacheConfig { capacity: self.capacity, layout, ..*to }) != *self {
            return grown("its new configuration may differ only in the capacity and the number of pages");
        }
        for (option, [old, new]) in [("capacity", [self.capacity, to.capacity]), ("pages", pages)] {
            if new < old {
                let expected = "at least what the cache has; caches do not become smaller";
                return Err(Error::Option { option, value: new as f64, expected });
            }
        }
        Ok(())
    }
}

/// Copies the channels of rows, then their scales and positions.
fn copy_rows(
    encoder: &mut wgpu::CommandEncoder,
    [old, new]: [&wgpu::Buffer; 2],
    (from, to): (SideSize, SideSize),
    runs: &[Run],
) {
    for ([from, to], words) in [([0, 0], from.words), ([from.scales, to.scales], from.groups)] {
        for run in runs.iter().filter(|run| run.rows * words > 0) {
            let [source, target, size] =
                [from + run.from * words, to + run.to * words, run.rows * words].map(|n| 4 * n as u64);
            encoder.copy_buffer_to_buffer(old, source, new, target, size);
        }
    }
}

/// Copies the lengths and the page tables.
fn copy_table(
    encoder: &mut wgpu::CommandEncoder,
    [old, new]: [&wgpu::Buffer; 2],
    from: &CacheConfig,
    to: &CacheConfig,
) {
    let lengths = 4 * (from.batch * WORDS) as u64;
    encoder.copy_buffer_to_buffer(old, 0, new, 0, lengths);
    let [each, more] = [from, to].map(|config| 4 * config.pages_each() as u64);
    for s in (0..from.batch as u64).filter(|_| each > 0) {
        encoder.copy_buffer_to_buffer(old, lengths + s * each, new, lengths + s * more, each);
    }
}
