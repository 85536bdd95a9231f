//! Caches of keys and values: what of earlier tokens is kept, sequence by sequence.

mod config;
mod pages;
mod sequences;

pub use config::{CacheConfig, CacheLayout, Group, Storage};

use crate::error::Error;
use crate::kernel::{Call, View};
use crate::kernels::Stage;
use crate::kernels::cache::{COUNT, CacheParams, LENGTH, LIMIT, REFUSED, START, WORDS};
use crate::kernels::cache_advance::{self, CacheAdvance, Counts};
use crate::kernels::cache_append::{self, CacheAppend};
use crate::kernels::cache_copy::{self, CacheCopy};
use crate::path::{CacheLayer, Calls, grid};
use crate::pipelines::guarded;
use crate::position::{MAX_POSITION, Rope};
use crate::record::{Pipelines, dispatch, pass};
use crate::scratch::{Bound, Scratch};
use crate::tensor::{Access, DType, Layout, TensorView, Window, check_aliasing, expect};
use sequences::{Edits, Move, Sequences};

/// By how many tokens each sequence moves.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// All by as many.
    All(usize),
    /// Each by its own number, one per sequence. New numbers are uploaded each time.
    Each(&'a [usize]),
    /// By numbers in device memory, U32 `[batch, 1, 1, 1]`, of which none counts for more than `most`: what an
    /// application knows only there, as how many drafts were accepted. A sequence without room for its rows gets none
    /// of them.
    Device {
        /// The numbers.
        counts: TensorView<'a>,
        /// Bound on each.
        most: usize,
    },
}

impl Rows<'_> {
    /// The largest number there may be.
    pub(crate) fn most(&self) -> usize {
        match self {
            Rows::All(n) => *n,
            Rows::Each(counts) => counts.iter().copied().max().unwrap_or(0),
            Rows::Device { most, .. } => *most,
        }
    }

    /// Bounds on the number of a sequence.
    fn of(&self, sequence: usize) -> Move {
        match self {
            Rows::All(n) => Move { least: *n, most: *n },
            Rows::Each(counts) => {
                let n = counts.get(sequence).copied().unwrap_or(0);
                Move { least: n, most: n }
            }
            Rows::Device { most, .. } => Move { least: 0, most: *most },
        }
    }
}

/// New keys and values of one layer.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Append<'a> {
    /// `[batch, kv_heads, rows, head_dim]`, F32 or F16, whatever the cache stores.
    pub k: TensorView<'a>,
    /// `[batch, kv_heads, rows, value_dim]`, of the same type.
    pub v: TensorView<'a>,
    /// Rotates keys by their positions in the cache, on the way. From 2²⁴ on, which only rings reach, as by the last
    /// position before.
    pub rope: Option<&'a Rope>,
}

impl<'a> Append<'a> {
    /// Keys and values as they are.
    pub fn new(k: TensorView<'a>, v: TensorView<'a>) -> Self {
        Append { k, v, rope: None }
    }

    /// With keys rotated.
    pub fn rope(mut self, rope: &'a Rope) -> Self {
        self.rope = Some(rope);
        self
    }
}

/// Keys and values of earlier tokens on one device, for generation token by token.
///
/// A step of a model is [`advance`](Self::advance), which makes room for new tokens of every sequence, then for
/// each layer [`append`](Self::append) and [`Attention::forward_cached`](crate::Attention::forward_cached). All only
/// record. Rows are written in place; nothing that is there already is copied, but for a page that is shared and
/// written into. Lengths live on the device: recording the next step needs nothing read back, creates nothing, and
/// costs the same at any length.
///
/// The cache also knows the lengths on the host, as far as it can ([`len`](Self::len)): a step recorded is taken to be
/// submitted, once and in order. Where recorded work was dropped, say [`truncate`](Self::truncate) for every sequence.
///
/// ```no_run
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, k: wgpu_attention::TensorView,
/// #      v: wgpu_attention::TensorView, q: wgpu_attention::TensorView, out: wgpu_attention::TensorView)
/// # -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::{Append, Attention, Cache, CacheConfig, CachedForward, Config, Group, Mask, Rows, Scratch,
///     Storage};
///
/// let attention = Attention::new(device, Config::new(32, 128).kv_heads(8))?;
/// let config = CacheConfig::new(8, 128, 4096).storage(Storage::Q8(Group::Of(32)));
/// let mut cache = Cache::with_pipelines(attention.pipelines(), config)?;
/// let call = CachedForward::new(q, &cache, out).not_advanced().mask(Mask::causal());
/// let mut scratch = Scratch::new(device, attention.scratch_size_cached(&call)?)?;
///
/// // Each token: q [1, 32, 1, 128], k and v [1, 8, 1, 128].
/// cache.advance(encoder, Rows::All(1), &mut scratch)?;
/// cache.append(encoder, 0, &Append::new(k, v), &mut scratch)?;
/// let call = CachedForward::new(q, &cache, out).mask(Mask::causal());
/// attention.forward_cached(encoder, &call, &mut scratch)?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Cache {
    pipelines: Pipelines,
    config: CacheConfig,
    /// Keys and values of every layer.
    layers: Vec<[wgpu::Buffer; 2]>,
    book: wgpu::Buffer,
    sequences: Sequences,
    /// Rows of the last advance.
    advanced: usize,
}

impl Cache {
    /// An empty cache with pipelines of its own.
    ///
    /// # Errors
    /// Sizes of zero, groups or pages that are none, [`Error::BindingLimit`] if the keys or the values of a layer are
    /// more than the device binds, [`Error::OutOfMemory`].
    pub fn new(device: &wgpu::Device, config: CacheConfig) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// An empty cache that shares pipelines with other operators on the device.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: CacheConfig) -> Result<Self, Error> {
        config.check(pipelines.facts())?;
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
            layers: (0..config.layers).map(layer).collect::<Result<_, Error>>()?,
            book: guarded(device, "a cache", || book(device, &config))?,
            sequences: Sequences::new(&config),
            config,
            advanced: 0,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Tokens of a sequence, where the host knows: not after [`Rows::Device`], until [`learn`](Self::learn) says.
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

    /// Tokens of every sequence before the last advance, on the device: U32 `[batch, 1, 1, 1]`, the positions of the
    /// first new tokens, for [`At::Tensor`](crate::At::Tensor). Not to be written.
    pub fn starts(&self) -> TensorView<'_> {
        self.word(START)
    }

    /// How often the device has refused to move a sequence, for want of room or because a ring could not go back: U32
    /// `[batch, 1, 1, 1]`. Only lengths that the host does not know are refused there. Not to be written.
    pub fn refusals(&self) -> TensorView<'_> {
        self.word(REFUSED)
    }

    fn word(&self, word: usize) -> TensorView<'_> {
        let layout =
            Layout { shape: [self.config.batch, 1, 1, 1], strides: [WORDS, WORDS, WORDS, 1], offset: word };
        TensorView { buffer: &self.book, dtype: DType::U32, layout }
    }

    /// Says how long a sequence is, after its length was read back. On the device nothing changes.
    ///
    /// # Errors
    /// [`Error::Option`] if it cannot be that long, or is none.
    pub fn learn(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.sequences.learn(sequence, len)
    }

    /// Gives up the tokens of a sequence from `len` on: undo, or drafts that were refused. With the next
    /// recording.
    ///
    /// # Errors
    /// [`Error::Option`] if the sequence may be shorter, if a ring has overwritten what it would have to keep, or if
    /// there is no such sequence.
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

    /// Makes `to` a copy of `from` that shares its pages, with the next recording. Whichever writes into a shared page
    /// first gets a copy of it. What `to` held is given up.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the cache is not paged or the host does not know the length,
    /// [`Error::Option`] if there is no such sequence.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.sequences.fork(from, to)
    }

    /// Takes pages for `tokens` in all, so that a sequence grows to there without further ones. Does nothing where
    /// the cache is not paged. They stay with the sequence until it is truncated, cleared, or made a copy of another;
    /// a copy shares them, and takes new ones when it grows.
    ///
    /// # Errors
    /// [`Error::OutOfPages`], [`Error::CacheFull`]; then nothing has changed.
    pub fn reserve(&mut self, sequence: usize, tokens: usize) -> Result<(), Error> {
        self.sequences.reserve(sequence, tokens)
    }

    /// Records room for new tokens of every sequence, and whatever was said since the last recording. The tokens' keys
    /// and values are written by [`append`](Self::append), layer by layer.
    ///
    /// # Errors
    /// [`Error::CacheFull`], [`Error::OutOfPages`], and what [`Error`] lists for tensors; then nothing has been
    /// recorded and the cache is as it was.
    pub fn advance(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        rows: Rows,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.check_rows(&rows)?;
        let taken = self.sequences.take(|s| rows.of(s))?;
        let mut calls = self.copies(&taken.copies);
        calls.push(self.moves(&rows, false));
        let bound = self.pipelines.bind(&calls, scratch)?;
        let mut edits = taken.edits;
        self.add_counts(&rows, &mut edits);
        let upload = self.upload(&edits)?;
        // Nothing can fail from here on.
        self.sequences.put(taken.after);
        self.advanced = rows.most();
        self.record(encoder, upload, &edits, &bound);
        Ok(())
    }

    /// Records that the last tokens of every sequence are given up: what drafts an application found refused on the
    /// device. A sequence is left as it is where a ring has overwritten what it would have to keep.
    ///
    /// # Errors
    /// [`Error::Option`] if a sequence is shorter than that, and what [`Error`] lists for tensors; then nothing has
    /// been recorded and the cache is as it was.
    pub fn rewind(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        rows: Rows,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.check_rows(&rows)?;
        let (after, mut edits) = self.sequences.give_back(|s| rows.of(s))?;
        let bound = self.pipelines.bind(&[self.moves(&rows, true)], scratch)?;
        self.add_counts(&rows, &mut edits);
        let upload = self.upload(&edits)?;
        self.sequences.put(after);
        self.advanced = 0;
        self.record(encoder, upload, &edits, &bound);
        Ok(())
    }

    /// Records whatever was said since the last recording, for calls that only read the cache.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; then nothing has been recorded.
    pub fn flush(&mut self, encoder: &mut wgpu::CommandEncoder) -> Result<(), Error> {
        let edits = self.sequences.edits().clone();
        let upload = self.upload(&edits)?;
        self.sequences.flushed();
        self.record(encoder, upload, &edits, &[]);
        Ok(())
    }

    /// Records what writes the keys and values of the last advance into a layer: `rows` of each sequence, as many as
    /// the most that one advanced by. Rows past a sequence's own number are not read.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors; then nothing has been recorded.
    pub fn append(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layer: usize,
        append: &Append,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let bound = self.bind_append(layer, append, scratch)?;
        dispatch(&mut pass(encoder, "cache append"), &bound);
        Ok(())
    }

    /// [`append`](Self::append) into a compute pass of the caller's, which is left with another pipeline and bind
    /// group 0.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn append_in_pass(
        &self,
        pass: &mut wgpu::ComputePass,
        layer: usize,
        append: &Append,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        dispatch(pass, &self.bind_append(layer, append, scratch)?);
        Ok(())
    }

    fn bind_append(
        &self,
        layer: usize,
        append: &Append,
        scratch: &mut Scratch,
    ) -> Result<Vec<(Bound, [u32; 3])>, Error> {
        self.check_recorded()?;
        let [cache_k, cache_v] = self.layer(layer)?;
        let device = self.pipelines.facts();
        let CacheConfig { batch, kv_heads, head_dim, value_dim, .. } = self.config;
        let Append { k, v, rope } = *append;
        for (tensor, view, dim) in [("k", k, head_dim), ("v", v, value_dim)] {
            if !k.dtype().is_float() || view.dtype() != k.dtype() {
                let expected =
                    if tensor == "k" { "F32 or F16".into() } else { format!("{:?}, as k", k.dtype()) };
                return Err(Error::Type { tensor, expected, got: view.dtype() });
            }
            let wanted = [batch, kv_heads, self.advanced, dim];
            (0..4).try_for_each(|axis| expect(tensor, view.shape(), axis, wanted[axis]))?;
            view.check(tensor, Access::Read, device)?;
            for (other, buffer) in [("cache", cache_k), ("cache", cache_v), ("cache", &self.book)] {
                if view.buffer() == buffer {
                    return Err(Error::Alias { tensor: other, other: tensor });
                }
            }
        }
        if let Some(rope) = rope {
            rope.check_width("k", k.shape())?;
            let last = self.config.longest() - 1;
            if !matches!(self.config.layout, CacheLayout::Ring { .. }) && last > MAX_POSITION as usize {
                let expected = "at most 2^24 where keys are rotated: further positions have no rotation";
                return Err(Error::Option {
                    option: "capacity",
                    value: self.config.capacity as f64,
                    expected,
                });
            }
        }
        let cached = self.config.cached();
        let units = CacheAppend::units(&cached);
        let count = |dim: usize, side: usize| dim.div_ceil(units[side] as usize);
        let units = [count(head_dim, 0), count(value_dim, 1)];
        let mut params = cache_append::Params {
            k: View::from(k.window(device).layout),
            v: View::from(v.window(device).layout),
            cache: self.params(false),
            turns: rope.map_or(bytemuck::Zeroable::zeroed(), Rope::turns),
            head_dim: head_dim as u32,
            value_dim: value_dim as u32,
            k_units: units[0] as u32,
            v_units: units[1] as u32,
            first: 0,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let mut tensors =
            vec![k.window(device), v.window(device), whole(cache_k), whole(cache_v), whole(&self.book)];
        tensors.extend(rope.map(|rope| rope.view().window(device)));
        let groups = (kv_heads * (units[0] + units[1])).div_ceil(cache_append::WORKGROUP);
        let most = device.max_workgroups as usize;
        let call = |first: usize| {
            params.first = first as u32;
            Call {
                variant: Stage::CacheAppend(CacheAppend {
                    cache: cached,
                    kv: k.dtype(),
                    rotates: rope.is_some(),
                }),
                params: bytemuck::bytes_of(&params).to_vec(),
                tensors: tensors.clone(),
                grid: grid([groups, most.min(self.advanced - first), batch]),
            }
        };
        let calls: Calls = (0..self.advanced).step_by(most).map(call).collect();
        self.pipelines.bind(&calls, scratch)
    }

    /// Keys and values of a layer.
    fn layer(&self, layer: usize) -> Result<&[wgpu::Buffer; 2], Error> {
        let expected = "one of the cache's";
        self.layers.get(layer).ok_or(Error::Option { option: "layer", value: layer as f64, expected })
    }

    /// A layer as attention reads it. ragged: queries are those of the last advance.
    pub(crate) fn source(&self, layer: usize, ragged: bool) -> Result<CacheLayer<'_>, Error> {
        let [k, v] = self.layer(layer)?;
        Ok(CacheLayer {
            k: whole(k),
            v: whole(v),
            book: whole(&self.book),
            cached: self.config.cached(),
            params: self.params(ragged),
            kept: self.config.capacity,
        })
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
        let why = "truncate, clear, fork and reserve take effect with the next advance, rewind or flush: record one first";
        Err(Error::Unsupported { what: "a cache with changes that are not recorded", why })
    }

    fn check_rows(&self, rows: &Rows) -> Result<(), Error> {
        if rows.most() == 0 {
            return Err(Error::ZeroSize { tensor: "cache", axis: "rows" });
        }
        if let Rows::Device { most, .. } = rows
            && *most > self.config.longest()
        {
            let expected = "at most what a sequence may have";
            return Err(Error::Option { option: "most", value: *most as f64, expected });
        }
        match rows {
            Rows::Each(counts) if counts.len() != self.config.batch => {
                Err(Error::Length { tensor: "rows", expected: self.config.batch, got: counts.len() })
            }
            Rows::Device { counts, .. } => {
                if counts.dtype() != DType::U32 {
                    return Err(Error::Type {
                        tensor: "counts",
                        expected: "U32".into(),
                        got: counts.dtype(),
                    });
                }
                let wanted = [self.config.batch, 1, 1, 1];
                (0..4).try_for_each(|axis| expect("counts", counts.shape(), axis, wanted[axis]))?;
                counts.check("counts", Access::Read, self.pipelines.facts())?;
                check_aliasing(&[("cache", self.lengths())], &[("counts", *counts)])
            }
            _ => Ok(()),
        }
    }

    fn params(&self, ragged: bool) -> CacheParams {
        let (_, page_len) = self.config.pages();
        let CacheConfig { batch, kv_heads, head_dim, value_dim, capacity, layout, .. } = self.config;
        let [k, v] = [head_dim, value_dim].map(|dim| self.config.side(dim));
        let sinks = if let CacheLayout::Ring { sinks } = layout { sinks } else { 0 };
        CacheParams {
            batch: batch as u32,
            kv_heads: kv_heads as u32,
            page_len: page_len as u32,
            page_bits: page_len.ilog2(),
            table: (batch * WORDS) as u32,
            pages_each: self.config.pages_each() as u32,
            sinks: sinks as u32,
            window: (capacity - sinks) as u32,
            ragged: u32::from(ragged),
            k_words: k.words as u32,
            v_words: v.words as u32,
            k_groups: k.groups as u32,
            v_groups: v.groups as u32,
            k_scales: k.scales as u32,
            v_scales: v.scales as u32,
            longest: self.config.longest() as u32,
            pages: self.config.pages().0 as u32,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        }
    }

    fn moves<'a>(&'a self, rows: &Rows<'a>, back: bool) -> Call<'a, Stage> {
        let device = self.pipelines.facts();
        let mut tensors = vec![whole(&self.book)];
        let (counts, view) = match rows {
            Rows::All(_) => (Counts::All, View::default()),
            Rows::Each(_) => (Counts::Each, View::default()),
            Rows::Device { counts, .. } => {
                tensors.push(counts.window(device));
                (Counts::Device, View::from(counts.window(device).layout))
            }
        };
        let params = cache_advance::Params {
            counts: view,
            cache: self.params(false),
            rows: rows.most() as u32,
            back: u32::from(back),
            pad0: 0,
            pad1: 0,
        };
        Call {
            variant: Stage::CacheAdvance(CacheAdvance { counts, placement: self.config.placement() }),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors,
            grid: [1; 3],
        }
    }

    /// Copies of pages, in every layer.
    fn copies(&self, pages: &[sequences::PageCopy]) -> Calls<'_> {
        let CacheConfig { kv_heads, head_dim, value_dim, .. } = self.config;
        let (_, page_len) = self.config.pages();
        let mut calls = Vec::new();
        for copy in pages {
            for buffers in &self.layers {
                for (buffer, dim) in buffers.iter().zip([head_dim, value_dim]) {
                    let side = self.config.side(dim);
                    let row = |page: u32| page * (kv_heads * page_len) as u32;
                    let params = cache_copy::Params {
                        src: row(copy.from),
                        dst: row(copy.to),
                        slots: copy.slots as u32,
                        page_len: page_len as u32,
                        kv_heads: kv_heads as u32,
                        words: side.words as u32,
                        groups: side.groups as u32,
                        scales: side.scales as u32,
                    };
                    calls.push(Call {
                        variant: Stage::CacheCopy(CacheCopy),
                        params: bytemuck::bytes_of(&params).to_vec(),
                        tensors: vec![whole(buffer)],
                        grid: grid([copy.slots, kv_heads, 1]),
                    });
                }
            }
        }
        calls
    }

    fn add_counts(&self, rows: &Rows, edits: &mut Edits) {
        if let Rows::Each(counts) = rows {
            edits.extend(counts.iter().enumerate().map(|(s, n)| (s * WORDS + COUNT, *n as u32)));
        }
    }

    /// What changes in the book, ready to be copied there.
    fn upload(&self, edits: &Edits) -> Result<Option<wgpu::Buffer>, Error> {
        if edits.is_empty() {
            return Ok(None);
        }
        let words: Vec<u32> = edits.values().copied().collect();
        let device = self.pipelines.device();
        guarded(device, "changes of a cache", || {
            let upload = device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("attention.cache.changes"),
                size: 4 * words.len() as u64,
                usage: wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: true,
            });
            fill(&upload, &words);
            Some(upload)
        })
    }

    fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        upload: Option<wgpu::Buffer>,
        edits: &Edits,
        bound: &[(Bound, [u32; 3])],
    ) {
        if let Some(upload) = upload {
            let mut from = 0;
            for (word, count) in sequences::runs(edits) {
                encoder.copy_buffer_to_buffer(
                    &upload,
                    4 * from,
                    &self.book,
                    4 * word as u64,
                    4 * count as u64,
                );
                from += count as u64;
            }
        }
        if !bound.is_empty() {
            dispatch(&mut pass(encoder, "cache"), bound);
        }
    }
}

/// The book of an empty cache: without pages there is room from the start.
fn book(device: &wgpu::Device, config: &CacheConfig) -> wgpu::Buffer {
    let mut words = vec![0; config.book_words()];
    if config.pages_each() == 0 {
        (0..config.batch).for_each(|s| words[s * WORDS + LIMIT] = config.longest() as u32);
    }
    let book = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("attention.cache.book"),
        size: 4 * words.len() as u64,
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: true,
    });
    fill(&book, &words);
    book
}

/// Writes the whole of a buffer that was mapped when it was made.
fn fill(buffer: &wgpu::Buffer, words: &[u32]) {
    if let Ok(mut mapped) = buffer.slice(..).get_mapped_range_mut() {
        mapped.slice(..).copy_from_slice(bytemuck::cast_slice(words));
    }
    buffer.unmap();
}

/// All of a buffer.
fn whole(buffer: &wgpu::Buffer) -> Window<'_> {
    Window { buffer, start: 0, size: buffer.size(), layout: Layout::dense([1; 4]) }
}
