//! Caches of keys and values: what of earlier tokens is kept, sequence by sequence.

mod append;
mod config;
pub(crate) mod dispatch;
pub(crate) mod kernels;
mod pages;
mod read;
pub mod reference;
mod sequence_table;
mod sequences;
pub(crate) mod storage;
mod tokens;

pub use append::Append;
pub use config::{CacheConfig, CacheLayout, CacheStorage, ScaleGroup};
use dispatch::CacheLayer;
use kernels::cache::{COUNT, LENGTH, REFUSED, START, WORDS};
pub use read::CacheRead;
use sequences::{Change, Edits, PageCopy, Reorder, Sequences};
pub use tokens::Tokens;

use crate::kernel::guard::guarded;
use crate::kernel::{BindingCache, Dispatches, Pipelines, Prepared};
use crate::tensor::{DType, Error, Layout, TensorView, Window};

/// Keys and values of earlier tokens on one device, for generation token by token.
///
/// A step of a model is [`advance`](Self::advance), which makes room for new tokens of every
/// sequence, then for each layer [`append`](Self::append) and
/// [`Attention::forward`](crate::Attention::forward). All only record. Rows are written in place;
/// nothing that is there already is copied, but for a page that is shared and written into. Lengths
/// live on the device: recording the next step needs nothing read back, creates nothing, and costs
/// the same at any length.
///
/// The cache also knows the lengths on the host, as far as it can ([`len`](Self::len)): a step
/// recorded is taken to be submitted, once and in order. Where recorded work was dropped, say
/// [`truncate`](Self::truncate) for every sequence; a full ring must be cleared then, unless it has
/// spare tokens.
///
/// It keeps the bindings of recent calls, so that the same call again creates nothing. They keep
/// some buffers alive: see
/// [`forget`](Self::forget).
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
#[derive(Debug)]
pub struct Cache {
    pipelines: Pipelines,
    /// Of what moves lengths, copies pages and appends.
    bindings: BindingCache,
    config: CacheConfig,
    /// Keys and values of every layer.
    layers: Vec<[wgpu::Buffer; 2]>,
    sequence_table: wgpu::Buffer,
    /// Room for a copy of the sequence table, once sequences were reordered.
    table_copy: Option<wgpu::Buffer>,
    sequences: Sequences,
    /// Rows of the last advance.
    advanced: usize,
}

impl Cache {
    /// An empty cache with pipelines of its own.
    ///
    /// # Errors
    /// Sizes of zero, groups or pages that are none, [`Error::CacheBindingLimit`] if the device cannot bind the keys or the
    /// values of a layer ([`CacheConfig::split_by_heads`] makes configurations that it can bind), [`Error::OutOfMemory`].
    pub fn new(device: &wgpu::Device, config: CacheConfig) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// An empty cache that shares pipelines with other operators on the device.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: CacheConfig) -> Result<Self, Error> {
        config.check(&pipelines.facts())?;
        let device = pipelines.device();
        let side = |label, dim| {
            guarded(device, "a cache", || {
                device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some(label),
                    size: 4 * config.side(dim).total as u64,
                    usage: wgpu::BufferUsages::STORAGE,
                    mapped_at_creation: false,
                })
            })
        };
        let layer = |_| {
            Ok([side("attention.cache.k", config.head_dim)?, side("attention.cache.v", config.value_dim)?])
        };
        Ok(Cache {
            pipelines: pipelines.clone(),
            bindings: BindingCache::default(),
            layers: (0..config.layers).map(layer).collect::<Result<_, Error>>()?,
            sequence_table: sequence_table::empty(device, &config)?,
            table_copy: None,
            sequences: Sequences::new(&config),
            config,
            advanced: 0,
        })
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of its calls, and with them the references to their buffers.
    ///
    /// Without this, bindings that are not used any more go after a few calls, at most 64. Until
    /// then, the buffers that only they keep alive have at most twice the bytes of the last call's,
    /// or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// The configuration.
    pub(crate) fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Tokens of a sequence, where the host knows: not after [`Tokens::Device`], until
    /// [`set_known_len`](Self::set_known_len) says.
    pub fn len(&self, sequence: usize) -> Option<usize> {
        let [least, most] = self.len_bounds(sequence)?;
        (least == most).then_some(least)
    }

    /// Whether every sequence is known to be empty.
    pub fn is_empty(&self) -> bool {
        (0..self.config.batch).all(|s| self.len(s) == Some(0))
    }

    /// Least and most tokens that a sequence may have; `None` if there is no such sequence.
    pub fn len_bounds(&self, sequence: usize) -> Option<[usize; 2]> {
        self.sequences.bounds(sequence)
    }

    /// Pages that no sequence has; 0 where the cache is not paged.
    pub fn free_pages(&self) -> usize {
        self.sequences.free_pages()
    }

    /// Tokens of every sequence, on the device: U32 `[batch, 1, 1, 1]`. Not to be written.
    pub fn lengths(&self) -> TensorView<'_> {
        self.word(LENGTH)
    }

    /// Tokens of every sequence before the last advance, on the device: U32 `[batch, 1, 1, 1]`, the
    /// positions of the first new tokens, for
    /// [`RowPositions::Tensor`](crate::position::RowPositions::Tensor). Not to be written.
    pub fn starts(&self) -> TensorView<'_> {
        self.word(START)
    }

    /// How often the device has refused to move a sequence, for want of room or because a ring
    /// could not go back, or to
    /// [`overwrite`](Self::overwrite) positions that are not there: U32 `[batch, 1, 1, 1]`. Not to be written.
    pub fn refusals(&self) -> TensorView<'_> {
        self.word(REFUSED)
    }

    fn word(&self, word: usize) -> TensorView<'_> {
        let layout =
            Layout { shape: [self.config.batch, 1, 1, 1], strides: [WORDS, WORDS, WORDS, 1], offset: word };
        TensorView::with_layout(&self.sequence_table, DType::U32, layout)
    }

    /// Says how long a sequence is, after its length was read back. On the device nothing changes.
    ///
    /// # Errors
    /// [`Error::Option`] if it cannot be that long, or is none.
    pub fn set_known_len(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.sequences.set_known_len(sequence, len)
    }

    /// Gives up the tokens of a sequence from `len` on: undo, or drafts that were refused. With the
    /// next recording.
    ///
    /// A ring that is longer than its capacity has overwritten the tokens that a shorter one must
    /// keep. The cache shortens it only to its sinks, or by [`CacheConfig::spare_tokens`].
    ///
    /// # Errors
    /// [`Error::Option`] if the sequence may be shorter, if a ring may have overwritten a token that it would have to
    /// keep, or if there is no such sequence.
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

    /// Makes `to` a copy of `from` that shares its pages, with the next recording. Whichever writes
    /// into a shared page first gets a copy of it. What `to` held is given up.
    ///
    /// Forks take effect one after the other: a fork copies what earlier forks made of `from`. For
    /// the beams of a beam search use [`reorder`](Self::reorder), which gives all sequences their
    /// parents at once.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the cache is not paged or the host does not know the length,
    /// [`Error::Option`] if there is no such sequence.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.sequences.fork(from, to)
    }

    /// Records that each sequence goes on from its parent: sequence `s` gets the tokens that
    /// `parents[s]` had before the call. Use it after each step of a beam search. All sequences
    /// change at once, so parents may be exchanged, and several sequences may have the same parent.
    /// Changes that are not recorded are recorded first.
    ///
    /// Pages are shared as by [`fork`](Self::fork), and no row is copied. In other layouts the
    /// device copies the rows of sequences that change. The lengths may be known only to the
    /// device. Refusals are still counted by the place in the batch. Appends and queries of the
    /// last advance must be recorded before: [`advance`](Self::advance) comes next.
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
    /// [`Error::Length`] unless there is one parent for each sequence, [`Error::Option`] for a parent that is not a
    /// sequence of the cache, [`Error::OutOfMemory`]; then nothing has been recorded and the cache is as it was.
    #[doc(alias = "reorder_cache")]
    #[doc(alias = "beam")]
    pub fn reorder(&mut self, encoder: &mut wgpu::CommandEncoder, parents: &[usize]) -> Result<(), Error> {
        let Reorder { after, edits, slots } = self.sequences.reorder(parents)?;
        let layers = self.layers.iter().map(|buffers| self.layer(buffers, false));
        let device = &self.pipelines.facts();
        let dispatches: Dispatches =
            layers.flat_map(|layer| dispatch::reorder(&layer, slots, device)).collect();
        let call = self.pipelines.bind("cache", &dispatches, &self.bindings)?;
        let copy = match &self.table_copy {
            Some(copy) => copy.clone(),
            None => sequence_table::room_for_copy(self.pipelines.device(), self.config.batch)?,
        };
        let upload = sequence_table::upload(self.pipelines.device(), &edits)?;
        // Nothing can fail from here on.
        self.sequences.commit(after);
        self.advanced = 0;
        self.record(encoder, upload, &edits, Some(&call));
        sequence_table::reorder(encoder, &self.sequence_table, &copy, parents);
        self.table_copy = Some(copy);
        Ok(())
    }

    /// Takes pages for `tokens` in all, so that a sequence grows to there without further ones.
    /// Does nothing where the cache is not paged. They stay with the sequence until it is
    /// truncated, cleared, or made a copy of another; a copy shares them, and takes new ones when
    /// it grows.
    ///
    /// # Errors
    /// [`Error::OutOfPages`], [`Error::CacheFull`]; then nothing has changed.
    pub fn reserve(&mut self, sequence: usize, tokens: usize) -> Result<(), Error> {
        self.sequences.reserve(sequence, tokens)
    }

    /// Records room for new tokens of every sequence, and whatever was said since the last
    /// recording. The tokens' keys and values are written by [`append`](Self::append), layer by
    /// layer.
    ///
    /// # Errors
    /// [`Error::CacheFull`], [`Error::OutOfPages`], and what [`Error`] lists for tensors; then nothing has been
    /// recorded and the cache is as it was.
    pub fn advance(&mut self, encoder: &mut wgpu::CommandEncoder, rows: Tokens) -> Result<(), Error> {
        rows.check(&self.config, self.lengths(), &self.pipelines.facts())?;
        let change = self.sequences.take(|s| rows.of(s))?;
        self.move_lengths(encoder, &rows, change, false)
    }

    /// Records that the last tokens of every sequence are given up: what drafts an application
    /// found refused on the device. If only the device knows the numbers or the lengths, it leaves
    /// a ring as it is that has overwritten a token which it would have to keep
    /// ([`truncate`](Self::truncate)), and counts a refusal ([`refusals`](Self::refusals)).
    ///
    /// # Errors
    /// [`Error::Option`] if a sequence is shorter than that, or if the host knows that a ring has overwritten such a
    /// token, and what [`Error`] lists for tensors; then nothing has been recorded and the cache is as it was.
    pub fn rewind(&mut self, encoder: &mut wgpu::CommandEncoder, rows: Tokens) -> Result<(), Error> {
        rows.check(&self.config, self.lengths(), &self.pipelines.facts())?;
        let change = self.sequences.give_back(|s| rows.of(s))?;
        self.move_lengths(encoder, &rows, change, true)
    }

    /// Records `change`, and what moves the lengths on the device. back: tokens are given up.
    fn move_lengths(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        rows: &Tokens,
        change: Change,
        back: bool,
    ) -> Result<(), Error> {
        let Change { after, mut edits, copies } = change;
        let (layout_kind, params) = (self.config.layout_kind(), self.config.params(false));
        let device = &self.pipelines.facts();
        let mut dispatches = self.copies(&copies);
        dispatches.push(dispatch::advance(
            whole(&self.sequence_table),
            layout_kind,
            params,
            &rows.moves(back),
            device,
        ));
        let call = self.pipelines.bind("cache", &dispatches, &self.bindings)?;
        if let Tokens::Each(counts) = rows {
            edits.extend(counts.iter().enumerate().map(|(s, n)| (s * WORDS + COUNT, *n as u32)));
        }
        let upload = sequence_table::upload(self.pipelines.device(), &edits)?;
        // Nothing can fail from here on.
        self.sequences.commit(after);
        self.advanced = if back { 0 } else { rows.most() };
        self.record(encoder, upload, &edits, Some(&call));
        Ok(())
    }

    /// Records whatever was said since the last recording, for calls that only read the cache.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; then nothing has been recorded.
    pub fn flush(&mut self, encoder: &mut wgpu::CommandEncoder) -> Result<(), Error> {
        let edits = self.sequences.edits().clone();
        let upload = sequence_table::upload(self.pipelines.device(), &edits)?;
        self.sequences.flushed();
        self.record(encoder, upload, &edits, None);
        Ok(())
    }

    /// A layer as kernels read it. ragged: queries are those of the last advance.
    pub(crate) fn source(&self, layer: usize, ragged: bool) -> Result<CacheLayer<'_>, Error> {
        let expected = "one of the cache's";
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
        }
    }

    /// The buffers of a layer, for what concerns buffers only.
    pub(crate) fn tensors(&self, layer: usize) -> impl Iterator<Item = (&'static str, TensorView<'_>)> {
        let buffers = self.layers.get(layer).into_iter().flatten();
        buffers.map(|buffer| ("cache", TensorView::new(buffer, DType::U32, [1; 4])))
    }

    /// Rows of the last advance.
    pub(crate) fn advanced(&self) -> usize {
        self.advanced
    }

    /// The device that holds it.
    pub(crate) fn device(&self) -> &wgpu::Device {
        self.pipelines.device()
    }

    /// Refuses to read what the device does not know yet.
    pub(crate) fn check_recorded(&self) -> Result<(), Error> {
        if self.sequences.edits().is_empty() {
            return Ok(());
        }
        let why = "truncate, clear, fork and reserve take effect with the next advance, rewind, reorder or flush: record one first";
        Err(Error::Unsupported { what: "a cache with changes that are not recorded", why })
    }

    /// Copies of pages, in every layer.
    fn copies(&self, pages: &[PageCopy]) -> Dispatches<'_> {
        let device = &self.pipelines.facts();
        let in_layers = |copy: &PageCopy| {
            let PageCopy { from, to, slots } = *copy;
            let layers = self.layers.iter().map(|buffers| self.layer(buffers, false));
            layers.flat_map(move |layer| dispatch::copy_page(&layer, [from, to], slots, device))
        };
        pages.iter().flat_map(in_layers).collect()
    }

    fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        upload: Option<wgpu::Buffer>,
        edits: &Edits,
        call: Option<&Prepared>,
    ) {
        if let Some(upload) = upload {
            sequence_table::change(encoder, &self.sequence_table, &upload, edits);
        }
        if let Some(call) = call {
            call.record(encoder);
        }
    }
}

/// All of a buffer.
fn whole(buffer: &wgpu::Buffer) -> Window<'_> {
    Window { buffer, start: 0, size: buffer.size(), layout: Layout::dense([1; 4]) }
}
