//! The configuration of a cache.

use super::kernels::cache::{CacheParams, CacheVariant, WORDS};
use super::storage::{LayoutKind, StorageKind};
use crate::device::{DeviceFacts, Family};
use crate::tensor::{Error, LONGEST_AXIS};

/// The format in which a cache stores the channels of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CacheStorage {
    /// 32-bit floats.
    F32,
    /// 16-bit floats. It needs no device feature. Finite values beyond ±65504 become ±65504.
    F16,
    /// The upper 16 bits of 32-bit floats, rounded to the nearest, ties to even. It needs no device
    /// feature.
    BF16,
    /// Signed bytes and an f32 scale per group: `scale = max|x| / 127`. The error of a value is at
    /// most half a scale.
    Q8(ScaleGroup),
    /// Floats of 8 bits with 4 bits of exponent and 3 of mantissa, and an f32 scale per group:
    /// `scale = max|x| / 448`. Rounded to the nearest, ties to even. It needs no device feature.
    /// Source: Micikevicius et al. 2022, "FP8 formats for deep learning".
    E4M3(ScaleGroup),
    /// The same with 5 bits of exponent, 2 of mantissa and `scale = max|x| / 57344`.
    E5M2(ScaleGroup),
    /// Four bits, −7 to 7, and an f32 scale per group: `scale = max|x| / 7`.
    Q4(ScaleGroup),
    /// Four bits for normally distributed channels, and an f32 scale per group: the root mean
    /// square. Number n stands for `scale · t · (0.26071 + 0.0003008·t² + 0.00002658·t⁴)` with `t =
    /// n − 7.5`. A channel becomes the nearest of these.
    ///
    /// These levels fit Lloyd and Max's optimal 16 levels for a normal distribution (Max 1960,
    /// "Quantizing for minimum distortion"). The squared error is 1.002 of theirs. Channels times a
    /// [Walsh–Hadamard matrix](CacheConfig::hadamard) are about normal. Channels beyond 2.7 times
    /// the root mean square lose the excess, so use it with the matrix.
    #[doc(alias = "Lloyd-Max")]
    #[doc(alias = "TurboQuant")]
    Gaussian4(ScaleGroup),
    /// The numbers of ggml's format of this name: signed bytes and a scale per 32 channels, `scale
    /// = max|x| / 127`. Halves round away from zero. The scale is rounded to f16 afterwards. It is
    /// stored in 32 bits.
    Q8_0,
    /// The numbers of ggml's format of this name: four bits, −8 to 7, and a scale per 32 channels.
    /// The scale is the channel with the largest magnitude, divided by −8. So this channel is
    /// stored exactly, up to the scale's rounding to f16. The scale is stored in 32 bits.
    Q4_0,
}

/// Channels of a row that share a scale. A group with an infinite or NaN value reads as NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScaleGroup {
    /// All channels of the row.
    Row,
    /// This number of channels, a multiple of 32.
    Of(usize),
}

impl CacheStorage {
    pub(crate) fn storage_kind(self) -> StorageKind {
        match self {
            CacheStorage::F32 => StorageKind::F32,
            CacheStorage::F16 => StorageKind::F16,
            CacheStorage::BF16 => StorageKind::BF16,
            CacheStorage::Q8(_) | CacheStorage::Q8_0 => StorageKind::Q8,
            CacheStorage::E4M3(_) => StorageKind::E4M3,
            CacheStorage::E5M2(_) => StorageKind::E5M2,
            CacheStorage::Q4(_) | CacheStorage::Q4_0 => StorageKind::Q4,
            CacheStorage::Gaussian4(_) => StorageKind::Gaussian4,
        }
    }

    /// The channels that share a scale, if they do.
    fn scale_group(self) -> Option<ScaleGroup> {
        match self {
            CacheStorage::F32 | CacheStorage::F16 | CacheStorage::BF16 => None,
            CacheStorage::Q8(group)
            | CacheStorage::E4M3(group)
            | CacheStorage::E5M2(group)
            | CacheStorage::Q4(group)
            | CacheStorage::Gaussian4(group) => Some(group),
            CacheStorage::Q8_0 | CacheStorage::Q4_0 => Some(ScaleGroup::Of(32)),
        }
    }

    /// True for scales and rounding as in ggml.
    pub(crate) fn is_ggml(self) -> bool {
        matches!(self, CacheStorage::Q8_0 | CacheStorage::Q4_0)
    }

    /// Channels of a row of `dim` that share a scale. A group never exceeds the padded row.
    pub(crate) fn group(self, dim: usize) -> usize {
        let padded = self.words(dim).saturating_mul(self.storage_kind().per_word());
        // The result is at least 1, also for a row without channels.
        match self.scale_group() {
            None => 1,
            Some(ScaleGroup::Row) => padded.max(1),
            Some(ScaleGroup::Of(n)) => n.clamp(1, padded.max(1)),
        }
    }

    /// Words of a row of `dim` channels, a multiple of four for vec4 loads.
    pub(crate) fn words(self, dim: usize) -> usize {
        dim.div_ceil(self.storage_kind().per_word()).checked_next_multiple_of(4).unwrap_or(usize::MAX)
    }

    /// Scales of a row.
    pub(crate) fn scales(self, dim: usize) -> usize {
        if self.storage_kind().is_scaled() { dim.div_ceil(self.group(dim)) } else { 0 }
    }

    /// Bytes of a row of `dim` channels, padding and scales included. One token takes this memory
    /// per head, for keys or for values.
    pub fn row_bytes(self, dim: usize) -> usize {
        self.words(dim).saturating_add(self.scales(dim)).saturating_mul(4)
    }
}

/// The layout of the tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CacheLayout {
    /// Every sequence has room for the whole capacity.
    Contiguous,
    /// A sliding window: a longer sequence keeps its first `sink_tokens` and its last `capacity −
    /// sink_tokens` tokens. Source: Xiao et al. 2023, "Efficient streaming language models with
    /// attention sinks". A mask's `window` and `pattern` do not hide the sinks.
    ///
    /// A step of several rows may overwrite tokens that its earlier rows would still see. To get
    /// the same results in steps of any length, set a window in the mask. The ring must then hold
    /// this window and the longest step. A ring that is longer than its capacity can go back only
    /// to its sinks, or by [`CacheConfig::spare_tokens`].
    Ring {
        /// First tokens, which the ring never overwrites.
        sink_tokens: usize,
    },
    /// Pages, which sequences take as they grow and can share (Kwon et al. 2023, "PagedAttention").
    #[doc(alias = "block_table")]
    Paged {
        /// Number of tokens of a page: a power of two from 16 to 256.
        page: usize,
        /// Number of pages of all sequences together.
        pages: usize,
    },
}

/// The dimensions of a cache, its storage and its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct CacheConfig {
    pub(crate) batch: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) capacity: usize,
    pub(crate) layers: usize,
    /// The storage of keys, and of values.
    pub(crate) storages: [CacheStorage; 2],
    pub(crate) layout: CacheLayout,
    pub(crate) spare_tokens: usize,
    pub(crate) hadamard: Option<usize>,
    pub(crate) latent: bool,
    pub(crate) compacts: bool,
}

/// The sizes of one side, keys or values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SideSize {
    pub words: usize,
    /// Scales of a row, and the position of its token if the cache stores it.
    pub groups: usize,
    /// The word at which the scales begin.
    pub scales: usize,
    /// All words of the side.
    pub total: usize,
}

impl CacheConfig {
    /// Makes the configuration of one sequence of up to `capacity` tokens: f32, contiguous, one
    /// layer. In a ring, `capacity` is the number of stored tokens; positions may exceed it.
    pub fn new(kv_heads: usize, head_dim: usize, capacity: usize) -> Self {
        CacheConfig {
            batch: 1,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            capacity,
            layers: 1,
            storages: [CacheStorage::F32; 2],
            layout: CacheLayout::Contiguous,
            spare_tokens: 0,
            hadamard: None,
            latent: false,
            compacts: false,
        }
    }

    /// The largest number of tokens of a sequence, as in [`new`](Self::new). For
    /// [`Cache::grow`](super::Cache::grow).
    pub fn capacity(mut self, capacity: usize) -> Self {
        self.capacity = capacity;
        self
    }

    /// Number of sequences. Each has a separate length.
    pub fn batch(mut self, batch: usize) -> Self {
        self.batch = batch;
        self
    }

    /// Channels of values, `head_dim` unless set.
    pub fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self
    }

    /// Number of layers of the model. Each layer has separate keys and values; lengths and pages
    /// are common to all layers.
    pub fn layers(mut self, layers: usize) -> Self {
        self.layers = layers;
        self
    }

    /// Storage of keys and values.
    pub fn storage(mut self, storage: CacheStorage) -> Self {
        self.storages = [storage; 2];
        self
    }

    /// Storage of values, if it differs from the storage of keys. Errors of keys change the results
    /// more, so keys of 8 bits and values of 4 are common. Call it after
    /// [`storage`](Self::storage).
    pub fn value_storage(mut self, storage: CacheStorage) -> Self {
        self.storages[1] = storage;
        self
    }

    /// Multiplies each `block` channels of keys and values by an orthonormal Walsh–Hadamard matrix
    /// before they are stored. `block` is a power of two, at least 32, that divides `head_dim` and
    /// `value_dim`. The default is no product.
    ///
    /// The product spreads a few large channels over all channels of the block. So 4 and 8 bits
    /// lose less of the others. Element i, j of the matrix is `(−1)^popcount(i & j) / √block`. The
    /// matrix is its own inverse.
    ///
    /// Attention multiplies the queries and its outputs too, so its results do not show the
    /// product. Both are f32 in scratch, whatever their type is, and take one dispatch each.
    /// [`Cache::read`](super::Cache::read) undoes the product. Rotary positions come before it.
    ///
    /// A product is up to √block times as large as the channels, and F16 stores ±65504 at most. An
    /// infinite or NaN channel makes its whole block NaN.
    #[doc(alias = "rotated cache")]
    #[doc(alias = "QuaRot")]
    pub fn hadamard(mut self, block: impl Into<Option<usize>>) -> Self {
        self.hadamard = block.into();
        self
    }

    /// Stores no values: they are the first `value_dim` channels of the keys, as in multi-head
    /// latent attention (DeepSeek-AI 2024, "DeepSeek-V2"). Append with
    /// [`Append::latent`](super::Append::latent). With 512 latent and 64 rotary channels, use
    /// `CacheConfig::new(1, 576, capacity).value_dim(512).latent(true)`.
    #[doc(alias = "MLA")]
    pub fn latent(mut self, latent: bool) -> Self {
        self.latent = latent;
        self
    }

    /// Stores the position of each token with its keys, so that
    /// [`Cache::compact`](super::Cache::compact) can remove tokens. It takes 4 bytes for each token
    /// and key/value head. The cache is contiguous or paged. `capacity` is then the number of
    /// stored tokens; positions may exceed it.
    ///
    /// With a mask, kernels read the position of each key and evaluate the mask for each pair.
    pub fn compacts(mut self, compacts: bool) -> Self {
        self.compacts = compacts;
        self
    }

    /// Layout of the tokens of a sequence.
    pub fn layout(mut self, layout: CacheLayout) -> Self {
        self.layout = layout;
        self
    }

    /// Number of tokens that a full ring can go back by, 0 unless set. If drafts may be refused,
    /// set the longest draft.
    ///
    /// A ring that is longer than its capacity has overwritten its older tokens. With spare tokens
    /// it must hold the first `sink_tokens` and the last `capacity − sink_tokens − spare_tokens`
    /// tokens. So [`Cache::truncate`](super::Cache::truncate) and
    /// [`Cache::rewind`](super::Cache::rewind) can shorten it by `spare_tokens`, counted from its
    /// longest length. Attention sees the spare tokens as long as the ring has them. To make steps
    /// back invisible, use a mask whose window reaches back by at most `capacity − sink_tokens −
    /// spare_tokens`. The results are then the same as in a ring that never went back.
    pub fn spare_tokens(mut self, spare_tokens: usize) -> Self {
        self.spare_tokens = spare_tokens;
        self
    }

    /// The number of tokens of a sequence that the cache can store.
    pub fn token_capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of keys and values that one token takes in one layer.
    pub fn token_bytes(&self) -> usize {
        let [keys, values] = self.storages;
        let values = if self.latent { 0 } else { values.row_bytes(self.value_dim) };
        let position = if self.compacts { 4 } else { 0 };
        let keys = keys.row_bytes(self.head_dim).saturating_add(position);
        self.kv_heads.saturating_mul(keys.saturating_add(values))
    }

    /// Makes configurations of caches for groups of consecutive key/value heads. Use them if the
    /// device cannot bind the keys or the values of all heads. All groups have the same number of
    /// heads. There are as few groups as possible: one if the device can bind this cache.
    ///
    /// Advance every cache by the same tokens. Append each group's slice of the keys and values to
    /// its cache. Attend with the query heads of that group. The results equal the results of one
    /// cache bit by bit, if both calls split the keys alike.
    ///
    /// ```no_run
    /// # fn f(gpu: &wgpu_attention::Gpu, encoder: &mut wgpu::CommandEncoder, [q, k, v, out]: [wgpu_attention::TensorView; 4],
    /// #      scratch: &mut wgpu_attention::Scratch) -> Result<(), wgpu_attention::Error> {
    /// use wgpu_attention::{Attention, Cache, CacheConfig, Config, Forward, Mask};
    /// use wgpu_attention::cache::{Append, Tokens};
    ///
    /// // 8 key/value heads of 128 channels and 131072 tokens: 512 MiB of keys where a device binds 128 MiB.
    /// let configs = CacheConfig::new(8, 128, 131_072).split_by_heads(gpu.device())?;
    /// let caches = configs.iter().map(|config| Cache::with_pipelines(gpu.pipelines(), *config));
    /// let mut caches = caches.collect::<Result<Vec<_>, _>>()?;
    /// let kv_heads = 8 / caches.len();
    /// let heads = 32 / caches.len();
    /// let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(heads, 128).kv_heads(kv_heads))?;
    /// // Each token: q and out [1, 32, 1, 128], k and v [1, 8, 1, 128].
    /// for (n, cache) in caches.iter_mut().enumerate() {
    ///     let [k, v] = [k, v].map(|t| t.slice(1, n * kv_heads, kv_heads));
    ///     let [q, out] = [q, out].map(|t| t.slice(1, n * heads, heads));
    ///     cache.advance(encoder, Tokens::All(1))?;
    ///     cache.append(encoder, 0, &Append::new(k, v))?;
    ///     let call = Forward::with_cache(q, cache, out).mask(Mask::causal());
    ///     attention.forward(encoder, &call, scratch)?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Cache::new`](super::Cache::new), and [`Error::CacheBindingLimit`] if the
    /// device cannot bind one head either.
    pub fn split_by_heads(&self, device: &wgpu::Device) -> Result<Vec<CacheConfig>, Error> {
        let facts = DeviceFacts::of(device);
        let of_heads = |kv_heads| CacheConfig { kv_heads, ..*self };
        let parts = (1..=self.kv_heads.max(1)).filter(|parts| self.kv_heads.is_multiple_of(*parts));
        let mut checked = parts.map(|parts| {
            let config = of_heads(self.kv_heads / parts);
            config.check(&facts).map(|()| vec![config; parts])
        });
        let answer = checked.find(|checked| !matches!(checked, Err(Error::CacheBindingLimit { .. })));
        answer.unwrap_or_else(|| of_heads(1).check(&facts).map(|()| Vec::new()))
    }

    /// The largest length of a sequence. Where it may exceed the capacity, it is the largest number
    /// of positions.
    pub(crate) fn longest(&self) -> usize {
        match self.layout {
            _ if self.compacts => LONGEST_AXIS,
            CacheLayout::Ring { .. } => LONGEST_AXIS,
            _ => self.capacity,
        }
    }

    pub(crate) fn layout_kind(&self) -> LayoutKind {
        match self.layout {
            CacheLayout::Contiguous => LayoutKind::Contiguous,
            CacheLayout::Ring { .. } => LayoutKind::Ring,
            CacheLayout::Paged { .. } => LayoutKind::Paged,
        }
    }

    /// The number of pages, and the slots of each page.
    pub(crate) fn pages(&self) -> (usize, usize) {
        match self.layout {
            CacheLayout::Paged { page, pages } => (pages, page),
            _ => (self.batch, self.capacity),
        }
    }

    /// The entries of a sequence's page table.
    pub(crate) fn pages_each(&self) -> usize {
        match self.layout {
            CacheLayout::Paged { page, .. } => self.capacity.div_ceil(page),
            _ => 0,
        }
    }

    /// The sizes of keys, and of values. Latent values are in rows of keys.
    pub(crate) fn sides(&self) -> [SideSize; 2] {
        let [k, v] = self.storages;
        let position = usize::from(self.compacts);
        let keys = self.side(k, self.head_dim, position);
        let values = if self.latent { keys } else { self.side(v, self.value_dim, 0) };
        [keys, values]
    }

    fn side(&self, storage: CacheStorage, dim: usize, position: usize) -> SideSize {
        let (pages, page_len) = self.pages();
        let rows = pages.saturating_mul(page_len).saturating_mul(self.kv_heads);
        let (words, groups) = (storage.words(dim), storage.scales(dim) + position);
        let scales = rows.saturating_mul(words);
        let total = scales.saturating_add(rows.saturating_mul(groups)).checked_next_multiple_of(4);
        let total = total.unwrap_or(usize::MAX);
        SideSize { words, groups, scales, total }
    }

    /// The channels of a stored row of keys, and of values. Latent values are in rows of keys.
    pub(crate) fn stored_dims(&self) -> [usize; 2] {
        [self.head_dim, if self.latent { self.head_dim } else { self.value_dim }]
    }

    pub(crate) fn cached(&self) -> CacheVariant {
        let ([k, v], [k_dim, v_dim]) = (self.storages, self.stored_dims());
        let groups = [k.group(k_dim) as u32, v.group(v_dim) as u32];
        let storages = self.storages.map(CacheStorage::storage_kind);
        CacheVariant { storages, layout_kind: self.layout_kind(), groups, compacts: self.compacts }
    }

    /// The parameters of kernels. `ragged` is true if queries are the tokens of the last advance.
    pub(crate) fn params(&self, ragged: bool) -> CacheParams {
        let (_, page_len) = self.pages();
        let CacheConfig { batch, kv_heads, capacity, layout, .. } = *self;
        let [k, v] = self.sides();
        let sinks = if let CacheLayout::Ring { sink_tokens } = layout { sink_tokens } else { 0 };
        CacheParams {
            batch: batch as u32,
            kv_heads: kv_heads as u32,
            page_len: page_len as u32,
            page_bits: page_len.ilog2(),
            table: (batch * WORDS) as u32,
            pages_each: self.pages_each() as u32,
            sinks: sinks as u32,
            window: (capacity - sinks) as u32,
            ragged: u32::from(ragged),
            k_words: k.words as u32,
            v_words: v.words as u32,
            k_groups: k.groups as u32,
            v_groups: v.groups as u32,
            k_scales: k.scales as u32,
            v_scales: v.scales as u32,
            longest: self.longest() as u32,
            pages: self.pages().0 as u32,
            spare: self.spare_tokens as u32,
            pad0: 0,
            pad1: 0,
        }
    }

    pub(crate) fn sequence_table_words(&self) -> usize {
        self.batch.saturating_mul(WORDS.saturating_add(self.pages_each()))
    }

    /// Refuses sizes of zero, invalid groups and pages, and sizes that exceed the binding limit.
    pub(crate) fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        for family in self.storages.map(|storage| storage.storage_kind().family()) {
            if device.lacks(family) {
                return Err(Error::Disabled { family });
            }
        }
        let sizes = [
            ("batch", self.batch),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
            ("capacity", self.capacity),
            ("layers", self.layers),
        ];
        for (axis, n) in sizes {
            if n == 0 {
                return Err(Error::ZeroSize { tensor: "cache", axis });
            }
            if n > LONGEST_AXIS {
                return Err(Error::Option { option: axis, value: n as f64, expected: "below 2^29" });
            }
        }
        for group in self.storages.into_iter().filter_map(CacheStorage::scale_group) {
            if let ScaleGroup::Of(n) = group
                && (n == 0 || !n.is_multiple_of(32))
            {
                return Err(Error::Option { option: "group", value: n as f64, expected: "a multiple of 32" });
            }
        }
        if let Some(block) = self.hadamard {
            if device.lacks(Family::Hadamard) {
                return Err(Error::Disabled { family: Family::Hadamard });
            }
            let divides = |dim: usize| dim.is_multiple_of(block);
            if block < 32 || !block.is_power_of_two() || !divides(self.head_dim) || !divides(self.value_dim) {
                let expected = "a power of two from 32 on that divides `head_dim` and `value_dim`";
                return Err(Error::Option { option: "hadamard", value: block as f64, expected });
            }
        }
        if self.latent && self.value_dim > self.head_dim {
            let expected = "at most `head_dim` with latent values";
            return Err(Error::Option { option: "value_dim", value: self.value_dim as f64, expected });
        }
        if self.latent && self.storages[0] != self.storages[1] {
            let why = "the values are channels of the keys; leave `CacheConfig::value_storage` out";
            return Err(Error::Unsupported { what: "latent values with a separate storage", why });
        }
        if self.compacts && matches!(self.layout, CacheLayout::Ring { .. }) {
            let why = "a ring overwrites its oldest tokens by itself; use pages or a contiguous cache";
            return Err(Error::Unsupported { what: "a ring that can remove tokens", why });
        }
        match self.layout {
            CacheLayout::Ring { sink_tokens } if sink_tokens >= self.capacity => {
                return Err(Error::Option {
                    option: "sink_tokens",
                    value: sink_tokens as f64,
                    expected: "below `capacity`",
                });
            }
            CacheLayout::Ring { sink_tokens } if self.spare_tokens >= self.capacity - sink_tokens => {
                let expected = "below `capacity` minus `sink_tokens`";
                return Err(Error::Option {
                    option: "spare_tokens",
                    value: self.spare_tokens as f64,
                    expected,
                });
            }
            CacheLayout::Contiguous | CacheLayout::Paged { .. } if self.spare_tokens > 0 => {
                let expected = "0 unless the layout is `CacheLayout::Ring`; other layouts can always go back";
                return Err(Error::Option {
                    option: "spare_tokens",
                    value: self.spare_tokens as f64,
                    expected,
                });
            }
            CacheLayout::Paged { page, .. } if !(16..=256).contains(&page) || !page.is_power_of_two() => {
                let expected = "a power of two from 16 to 256";
                return Err(Error::Option { option: "page", value: page as f64, expected });
            }
            CacheLayout::Paged { pages, .. } if !(1..=LONGEST_AXIS).contains(&pages) => {
                let expected = "at least 1 and below 2^29";
                return Err(Error::Option { option: "pages", value: pages as f64, expected });
            }
            _ => {}
        }
        // Kernels count words in 30 bits.
        let limit = device.max_binding_bytes.min(1 << 32);
        let bytes = (self.sequence_table_words() as u64).saturating_mul(4);
        if bytes > limit {
            return Err(Error::BindingLimit { tensor: "cache (sequence table)", bytes, limit });
        }
        for (side, size) in ["keys", "values"].into_iter().zip(self.sides()) {
            let bytes = (size.total as u64).saturating_mul(4);
            if bytes > limit {
                return Err(Error::CacheBindingLimit { side, bytes, limit });
            }
        }
        Ok(())
    }
}
