//! Caches that get more room: new buffers, with copies of the stored rows.

use super::config::SideSize;
use super::kernels::cache::WORDS;
use super::{Cache, CacheConfig, CacheLayout, dispatch, sequence_table, whole};
use crate::kernel::BindingCache;
use crate::kernel::guard::guarded;
use crate::tensor::{Error, TensorView};

/// Rows that are neighbours before and after a copy: their first rows, and their number.
pub(super) struct Run {
    pub from: usize,
    pub to: usize,
    pub rows: usize,
}

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
        let recorded = self.bind_edits(self.sequences.edits())?;
        let upload = sequence_table::upload(device, &edits)?;
        let words = [whole(&table), whole(&upload), whole(&upload)];
        let words = dispatch::words(words, 0, edits.len(), &self.pipelines.facts());
        let words = self.bind_once(&[words])?;
        // Nothing can fail after this line.
        recorded.record(encoder);
        let runs = self.sequences.runs(&self.config, &config);
        let sides = || self.config.sides().into_iter().zip(config.sides());
        for (old, new) in self.layers.iter().zip(&layers) {
            let latent = usize::from(self.config.latent);
            for ((old, new), sizes) in old.iter().zip(new).zip(sides()).take(2 - latent) {
                copy_rows(encoder, [old, new], sizes, &runs);
            }
        }
        copy_table(encoder, [&self.sequence_table, &table], &self.config, &config);
        words.record(encoder);
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
        let sides = if self.config.latent { 1 } else { 2 };
        let rows = self.layers.iter().flat_map(|layer| &layer[..sides]);
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

/// Makes the buffers of keys and values, for every layer.
pub(super) fn new_layers(
    device: &wgpu::Device,
    config: &CacheConfig,
) -> Result<Vec<[wgpu::Buffer; 2]>, Error> {
    let [k_size, v_size] = config.sides();
    let side = |label, size: SideSize| {
        guarded(device, "a cache", || {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size: 4 * size.total as u64,
                usage: TensorView::USAGES | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        })
    };
    let layer = |_| {
        let k = side("attention.cache.k", k_size)?;
        let v = if config.latent { k.clone() } else { side("attention.cache.v", v_size)? };
        Ok([k, v])
    };
    (0..config.layers).map(layer).collect()
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
