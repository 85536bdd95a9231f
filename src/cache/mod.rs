//! Caches of keys and values: the stored keys and values of earlier tokens, for each sequence.

mod append;
mod compact;
mod config;
pub(crate) mod dispatch;
mod grow;
pub(crate) mod kernels;
mod pages;
mod read;
pub mod reference;
mod ring;
mod row_moves;
mod sequence_table;
mod sequences;
pub(crate) mod storage;
mod tokens;

pub use append::Append;
pub use compact::Keep;
use config::SideSize;
pub use config::{CacheConfig, CacheLayout, CacheStorage, ScaleGroup};
use dispatch::CacheLayer;
use kernels::cache::{COUNT, LENGTH, REFUSED, START, WORDS};
pub use read::CacheRead;
use sequences::{Change, Edits, PageCopy, Reorder, Sequences};
pub use tokens::Tokens;

use crate::kernel::guard::guarded;
use crate::kernel::{BindingCache, Dispatch, Dispatches, Pipelines, Prepared, Recorder};
use crate::tensor::{DType, Error, Layout, TensorView, Window};

/// Keys and values of earlier tokens on one device, for generation token by token.
///
/// A step of a model begins with [`advance`](Self::advance), which makes room for new tokens of
/// every sequence. Then each layer calls [`append`](Self::append) and
/// [`Attention::forward`](crate::Attention::forward). All three only record commands. Rows are
/// written in place. Stored rows are not copied, except the rows of a shared page that a sequence
/// writes into. The lengths are on the device. Recording the next step reads nothing back, creates
/// nothing, and costs the same at any length.
///
/// The cache also tracks the lengths on the host, if they are known there ([`len`](Self::len)). It
/// assumes that every recorded step is submitted, once and in order. If recorded work is dropped,
/// call [`truncate`](Self::truncate) for every sequence. A full ring must be cleared then, unless
/// it has spare tokens.
///
/// The cache stores the bindings of recent calls, so repeated calls create nothing. These bindings
/// keep some buffers alive: see [`forget`](Self::forget).
///
/// ```no_run
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, k: wgpu_attention::TensorView,
/// #      v: wgpu_attention::TensorView, q: wgpu_attention::TensorView, out: wgpu_attention::TensorView)
/// # -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::{Attention, Cache, CacheConfig, Config, Forward, Mask, Scratch};
/// use wgpu_attention::cache::{Append, CacheStorage, ScaleGroup, Tokens};
///
/// let attention = Attention::new(device, Config::new(32, 128).kv_heads(8))?;
/// let config = CacheConfig::new(8, 128, 4096).storage(CacheStorage::Q8(ScaleGroup::Of(32)));
/// let mut cache = Cache::with_pipelines(attention.pipelines(), config)?;
/// let call = Forward::with_cache(q, &cache, out).at_end().mask(Mask::causal());
/// let mut scratch = Scratch::new(device, attention.scratch_size(&call)?)?;
///
/// // Each token: q [1, 32, 1, 128], k and v [1, 8, 1, 128].
/// cache.advance(encoder, Tokens::All(1))?;
/// cache.append(encoder, 0, &Append::new(k, v))?;
/// let call = Forward::with_cache(q, &cache, out).mask(Mask::causal());
/// attention.forward(encoder, &call, &mut scratch)?;
/// # Ok(()) }
/// ```
#[doc(alias = "KvCache")]
#[doc(alias = "PagedAttention")]
#[doc(alias = "kv_cache")]
#[derive(Debug)]
pub struct Cache {
    pipelines: Pipelines,
    /// The bindings of the calls that move lengths, copy pages and append.
    bindings: BindingCache,
    config: CacheConfig,
    /// Keys and values of every layer.
    layers: Vec<[wgpu::Buffer; 2]>,
    sequence_table: wgpu::Buffer,
    /// A buffer for words of the sequence table, once sequences were reordered.
    table_copy: Option<wgpu::Buffer>,
    sequences: Sequences,
    /// The number of rows of the last advance.
    advanced: usize,
}

impl Cache {
    /// Makes an empty cache with its own pipelines.
    ///
    /// # Errors
    /// - Sizes of zero, and invalid groups or pages.
    /// - [`Error::CacheBindingLimit`] if the device cannot bind the keys or the values of a layer.
    ///   [`CacheConfig::split_by_heads`] makes configurations that it can bind.
    /// - [`Error::OutOfMemory`].
    pub fn new(device: &wgpu::Device, config: CacheConfig) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// Makes an empty cache that shares pipelines with other operators on the device.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: CacheConfig) -> Result<Self, Error> {
        config.check(&pipelines.facts())?;
        let device = pipelines.device();
        Ok(Cache {
            pipelines: pipelines.clone(),
            bindings: BindingCache::default(),
            layers: new_layers(device, &config)?,
            sequence_table: sequence_table::empty(device, &config)?,
            table_copy: None,
            sequences: Sequences::new(&config),
            config,
            advanced: 0,
        })
    }

    /// Returns the pipelines, to share them.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the stored bindings of calls, and with them the references to their buffers.
    ///
    /// Without this call, the cache drops unused bindings after a few calls, at most 64. Until then
    /// they may keep unused buffers alive. These take at most twice the bytes of the last call's
    /// buffers, or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// Returns the configuration.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Returns the number of tokens of a sequence, or `None` if only the device knows it. It is
    /// unknown after [`Tokens::Device`], until [`set_known_len`](Self::set_known_len).
    pub fn len(&self, sequence: usize) -> Option<usize> {
        let [least, most] = self.len_bounds(sequence)?;
        (least == most).then_some(least)
    }

    /// True if every sequence is empty and the host knows that.
    pub fn is_empty(&self) -> bool {
        (0..self.config.batch).all(|s| self.len(s) == Some(0))
    }

    /// Returns the least and the largest length that a sequence may have; `None` if there is no
    /// such sequence.
    pub fn len_bounds(&self, sequence: usize) -> Option<[usize; 2]> {
        self.sequences.bounds(sequence)
    }

    /// Returns the number of pages that no sequence has; 0 if the cache is not paged.
    pub fn free_pages(&self) -> usize {
        self.sequences.free_pages()
    }

    /// The number of tokens of every sequence, on the device: U32 `[batch, 1, 1, 1]`. Do not write
    /// to it.
    pub fn lengths(&self) -> TensorView<'_> {
        self.word(LENGTH)
    }

    /// The number of tokens of every sequence before the last advance, on the device: U32 `[batch,
    /// 1, 1, 1]`. These are the positions of the first new tokens, for
    /// [`RowPositions::Tensor`](crate::position::RowPositions::Tensor). Do not write to it.
    pub fn starts(&self) -> TensorView<'_> {
        self.word(START)
    }

    /// The number of refusals of every sequence, counted on the device: U32 `[batch, 1, 1, 1]`. Do
    /// not write to it. The device refuses moves without room, and a ring's moves back beyond its
    /// limit. It also refuses to [`overwrite`](Self::overwrite) positions that a sequence does not
    /// have, or that a ring has overwritten.
    pub fn refusals(&self) -> TensorView<'_> {
        self.word(REFUSED)
    }

    fn word(&self, word: usize) -> TensorView<'_> {
        let layout =
            Layout { shape: [self.config.batch, 1, 1, 1], strides: [WORDS, WORDS, WORDS, 1], offset: word };
        TensorView::with_layout(&self.sequence_table, DType::U32, layout)
    }

    /// Tells the host the length of a sequence, after you have read it back. It changes nothing on
    /// the device.
    ///
    /// # Errors
    /// [`Error::Option`] if the length is outside [`len_bounds`](Self::len_bounds), or if there is
    /// no such sequence.
    pub fn set_known_len(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.sequences.set_known_len(sequence, len)
    }

    /// Removes the tokens of a sequence from `len` on. Use it for undo, or for refused drafts. It
    /// takes effect with the next recording.
    ///
    /// A ring that is longer than its capacity has overwritten tokens that a shorter sequence would
    /// need. The cache shortens such a ring only to its sinks, or by [`CacheConfig::spare_tokens`].
    ///
    /// # Errors
    /// - [`Error::Option`] if the sequence may be shorter than `len`.
    /// - [`Error::Option`] if a ring may have overwritten a token that it needs.
    /// - [`Error::Option`] if `len` is below the length at the last [`compact`](Self::compact).
    /// - [`Error::Option`] if there is no such sequence.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.sequences.truncate(sequence, len)
    }

    /// Empties a sequence and frees its pages, with the next recording.
    ///
    /// # Errors
    /// [`Error::Option`] if there is no such sequence.
    pub fn clear(&mut self, sequence: usize) -> Result<(), Error> {
        self.sequences.clear(sequence)
    }

    /// Makes `to` a copy of `from` that shares its pages. The first sequence that writes into a
    /// shared page gets a copy of the page. The earlier tokens of `to` are removed. It takes effect
    /// with the next recording.
    ///
    /// Forks take effect one after the other: a fork copies the result of earlier forks. For beam
    /// search use [`reorder`](Self::reorder), which moves all sequences at once.
    ///
    /// # Errors
    /// - [`Error::Unsupported`] if the cache is not paged or the host does not know the length.
    /// - [`Error::Option`] if there is no such sequence.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.sequences.fork(from, to)
    }

    /// Records that each sequence continues from its parent: sequence `s` gets the tokens that
    /// `parents[s]` had before the call. Use it after each step of a beam search. All sequences
    /// change at once, so parents may be exchanged, and several sequences may have the same parent.
    /// Unrecorded changes are recorded first.
    ///
    /// In a paged cache the sequences share pages as after [`fork`](Self::fork), and no row is
    /// copied. In other layouts the device copies the rows of sequences that change. The lengths
    /// may be known only to the device. The device still counts refusals by the place in the batch.
    /// Record appends and queries of the last advance before this call; [`advance`](Self::advance)
    /// comes next.
    ///
    /// ```no_run
    /// # fn f(encoder: &mut wgpu::CommandEncoder, cache: &mut wgpu_attention::Cache)
    /// # -> Result<(), wgpu_attention::Error> {
    /// // Four beams: the best goes on from beam 2, two from beam 1, one from beam 0.
    /// cache.reorder(encoder, &[2, 1, 1, 0])?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - [`Error::Length`] unless there is one parent for each sequence.
    /// - [`Error::Option`] for a parent that is not a sequence of the cache.
    /// - [`Error::OutOfMemory`].
    ///
    /// On an error nothing is recorded and the cache does not change.
    #[doc(alias = "reorder_cache")]
    #[doc(alias = "beam")]
    pub fn reorder(&mut self, into: &mut impl Recorder, parents: &[usize]) -> Result<(), Error> {
        let Reorder { after, edits, slots } = self.sequences.reorder(parents)?;
        let device = &self.pipelines.facts();
        let copy = match &self.table_copy {
            Some(copy) => copy.clone(),
            None => sequence_table::room_for_copy(self.pipelines.device(), self.config.batch)?,
        };
        let (moves, count) = sequence_table::moves_of_reorder(self.pipelines.device(), parents)?;
        let layers = self.layers.iter().map(|buffers| self.layer(buffers, false));
        let rows: Dispatches = layers.flat_map(|layer| dispatch::reorder(&layer, slots, device)).collect();
        let rows = self.pipelines.bind("cache", &rows, &self.bindings)?;
        let [table, copied, moves] = [&self.sequence_table, &copy, &moves].map(whole);
        let lengths = [([copied, table, moves], 0), ([table, copied, moves], count)];
        let lengths = lengths.map(|(windows, first)| dispatch::words(windows, first, count, device));
        let call = self.bind_edits(&edits)?.then(rows).then(self.bind_once(&lengths)?);
        // Nothing can fail after this line.
        self.sequences.commit(after);
        self.advanced = 0;
        self.table_copy = Some(copy);
        call.record(into);
        Ok(())
    }

    /// Reserves pages for a length of `tokens`, so that the sequence can grow to it without more
    /// pages. It does nothing if the cache is not paged. The sequence has these pages until it is
    /// truncated, compacted, cleared, or replaced by a copy of another sequence. A copy shares the
    /// pages, and takes new pages when it grows.
    ///
    /// # Errors
    /// [`Error::OutOfPages`] or [`Error::CacheFull`]. On an error nothing changes.
    pub fn reserve(&mut self, sequence: usize, tokens: usize) -> Result<(), Error> {
        self.sequences.reserve(sequence, tokens)
    }

    /// Records room for new tokens of every sequence, and all changes since the last recording.
    /// [`append`](Self::append) then writes the tokens' keys and values, layer by layer.
    ///
    /// # Errors
    /// [`Error::CacheFull`], [`Error::OutOfPages`], and everything that [`Error`] lists for
    /// tensors. On an error nothing is recorded and the cache does not change.
    pub fn advance(&mut self, into: &mut impl Recorder, rows: Tokens) -> Result<(), Error> {
        rows.check(&self.config, self.lengths(), &self.pipelines.facts())?;
        let change = self.sequences.take(|s| rows.of(s))?;
        self.move_lengths(into, &rows, change, false)
    }

    /// Records that the last tokens of every sequence are removed. Use it for drafts that an
    /// application refuses on the device.
    ///
    /// A ring may have overwritten a token that it would need ([`truncate`](Self::truncate)). If
    /// only the device knows the counts or lengths, it leaves such a ring unchanged. It then counts
    /// a refusal ([`refusals`](Self::refusals)).
    ///
    /// # Errors
    /// - [`Error::Option`] if a sequence may be shorter than its count.
    /// - [`Error::Option`] if the host knows that a ring has overwritten a token that it needs.
    /// - [`Error::Option`] if a sequence may become shorter than at its last
    ///   [`compact`](Self::compact).
    /// - Everything that [`Error`] lists for tensors.
    ///
    /// On an error nothing is recorded and the cache does not change.
    pub fn rewind(&mut self, into: &mut impl Recorder, rows: Tokens) -> Result<(), Error> {
        rows.check(&self.config, self.lengths(), &self.pipelines.facts())?;
        let change = self.sequences.give_back(|s| rows.of(s))?;
        self.move_lengths(into, &rows, change, true)
    }

    /// Records `change`, and the dispatches that move the lengths on the device. `back` is true if
    /// tokens are removed.
    fn move_lengths(
        &mut self,
        into: &mut impl Recorder,
        rows: &Tokens,
        change: Change,
        back: bool,
    ) -> Result<(), Error> {
        let Change { after, mut edits, copies } = change;
        let layout = (self.config.layout_kind(), self.config.compacts);
        let params = self.config.params(false);
        let device = &self.pipelines.facts();
        let mut dispatches = self.copies(&copies);
        dispatches.push(dispatch::advance(
            whole(&self.sequence_table),
            layout,
            params,
            &rows.moves(back),
            device,
        ));
        let call = self.pipelines.bind("cache", &dispatches, &self.bindings)?;
        if let Tokens::Each(counts) = rows {
            edits.extend(counts.iter().enumerate().map(|(s, n)| (s * WORDS + COUNT, *n as u32)));
        }
        let call = self.bind_edits(&edits)?.then(call);
        // Nothing can fail after this line.
        self.sequences.commit(after);
        self.advanced = if back { 0 } else { rows.most() };
        call.record(into);
        Ok(())
    }

    /// Records all changes since the last recording. Use it before calls that only read the cache.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Disabled`] or [`Error::Refused`]. On an error nothing is
    /// recorded.
    pub fn flush(&mut self, into: &mut impl Recorder) -> Result<(), Error> {
        let call = self.bind_edits(self.sequences.edits())?;
        self.sequences.flushed();
        call.record(into);
        Ok(())
    }

    /// Returns a layer as kernels read it. `ragged` is true if queries are the tokens of the last
    /// advance.
    pub(crate) fn source(&self, layer: usize, ragged: bool) -> Result<CacheLayer<'_>, Error> {
        let expected = "the index of a layer of the cache";
        let buffers = self.layers.get(layer);
        let buffers = buffers.ok_or(Error::Option { option: "layer", value: layer as f64, expected })?;
        Ok(self.layer(buffers, ragged))
    }

    fn layer<'a>(&'a self, [k, v]: &'a [wgpu::Buffer; 2], ragged: bool) -> CacheLayer<'a> {
        CacheLayer {
            k: whole(k),
            v: whole(v),
            sequence_table: whole(&self.sequence_table),
            cached: self.config.cached(),
            params: self.config.params(ragged),
            kept: self.config.capacity,
            hadamard: self.config.hadamard,
            ggml: self.config.storages.map(CacheStorage::is_ggml),
            latent: self.config.latent,
        }
    }

    /// Returns the buffers of a layer. Only the buffers of these views are meaningful.
    pub(crate) fn tensors(&self, layer: usize) -> impl Iterator<Item = (&'static str, TensorView<'_>)> {
        let buffers = self.layers.get(layer).into_iter().flat_map(|layer| self.buffers(layer));
        buffers.map(|buffer| ("cache", TensorView::new(buffer, DType::U32, [1; 4])))
    }

    /// The buffers of keys and of values: one if values are latent.
    fn buffers<'a>(&self, layer: &'a [wgpu::Buffer; 2]) -> &'a [wgpu::Buffer] {
        if self.config.latent { &layer[..1] } else { layer }
    }

    /// The number of rows of the last advance.
    pub(crate) fn advanced(&self) -> usize {
        self.advanced
    }

    /// The device that holds the cache.
    pub(crate) fn device(&self) -> &wgpu::Device {
        self.pipelines.device()
    }

    /// Refuses a cache with changes that are not recorded.
    pub(crate) fn check_recorded(&self) -> Result<(), Error> {
        if self.sequences.edits().is_empty() {
            return Ok(());
        }
        let why = "`truncate`, `clear`, `fork` and `reserve` must be recorded; call `advance`, `rewind`, `reorder` or `flush` first";
        Err(Error::Unsupported { what: "a cache with changes that are not recorded", why })
    }

    /// The dispatches that copy pages, in every layer.
    fn copies(&self, pages: &[PageCopy]) -> Dispatches<'_> {
        let device = &self.pipelines.facts();
        let in_layers = |copy: &PageCopy| {
            let PageCopy { from, to, slots } = *copy;
            let layers = self.layers.iter().map(|buffers| self.layer(buffers, false));
            layers.flat_map(move |layer| dispatch::copy_page(&layer, [from, to], slots, device))
        };
        pages.iter().flat_map(in_layers).collect()
    }

    /// Binds the dispatch that writes the changed words, if there are any.
    fn bind_edits(&self, edits: &Edits) -> Result<Prepared, Error> {
        self.bind_words(&self.sequence_table, edits)
    }

    /// As [`bind_edits`](Self::bind_edits), for another sequence table.
    fn bind_words(&self, table: &wgpu::Buffer, edits: &Edits) -> Result<Prepared, Error> {
        if edits.is_empty() {
            return Ok(Prepared::empty("cache"));
        }
        let upload = sequence_table::upload(self.pipelines.device(), edits)?;
        let windows = [whole(table), whole(&upload), whole(&upload)];
        self.bind_once(&[dispatch::words(windows, 0, edits.len(), &self.pipelines.facts())])
    }

    /// Binds dispatches on buffers that serve one call, so their bindings are not stored.
    fn bind_once(&self, dispatches: &[Dispatch]) -> Result<Prepared, Error> {
        self.pipelines.bind("cache", dispatches, &BindingCache::default())
    }
}

/// Makes the buffers of keys and values, for every layer.
fn new_layers(device: &wgpu::Device, config: &CacheConfig) -> Result<Vec<[wgpu::Buffer; 2]>, Error> {
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

/// The whole buffer.
fn whole(buffer: &wgpu::Buffer) -> Window<'_> {
    Window { buffer, start: 0, size: buffer.size(), layout: Layout::dense([1; 4]) }
}
