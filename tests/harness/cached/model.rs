//! A model of a cache's contents, and the error that a storage may add. It has the tokens of every
//! sequence in a `Vec`.

use std::collections::HashSet;

use wgpu_attention::CacheConfig;
use wgpu_attention::cache::{CacheLayout, CacheStorage, ScaleGroup};
use wgpu_attention::reference;
use wgpu_attention::reference::cache::{hadamard, scales};

use crate::harness::random::Rng;

/// The configuration of a cache.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub capacity: usize,
    pub layers: usize,
    pub storage: CacheStorage,
    /// The storage of values, if it differs.
    pub value_storage: Option<CacheStorage>,
    pub layout: CacheLayout,
    /// Tokens by which a full ring can go back.
    pub spare: usize,
    /// Channels of a block that is multiplied by a Walsh–Hadamard matrix.
    pub hadamard: Option<usize>,
    /// True if tokens can be removed.
    pub compacts: bool,
}

impl Kind {
    /// Two sequences, two query heads for each key head, one layer.
    pub fn new(storage: CacheStorage, layout: CacheLayout, capacity: usize) -> Self {
        Kind {
            batch: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            value_dim: 8,
            capacity,
            layers: 1,
            storage,
            value_storage: None,
            layout,
            spare: 0,
            hadamard: None,
            compacts: false,
        }
    }

    /// Returns the storage of keys, and of values.
    pub fn storages(&self) -> [CacheStorage; 2] {
        [self.storage, self.value_storage.unwrap_or(self.storage)]
    }

    pub fn config(&self) -> CacheConfig {
        CacheConfig::new(self.kv_heads, self.head_dim, self.capacity)
            .batch(self.batch)
            .value_dim(self.value_dim)
            .layers(self.layers)
            .storage(self.storage)
            .value_storage(self.storages()[1])
            .layout(self.layout)
            .spare_tokens(self.spare)
            .hadamard(self.hadamard)
            .compacts(self.compacts)
    }

    /// Returns the most tokens that a sequence may have.
    pub fn longest(&self) -> usize {
        if self.ring().is_some() { usize::MAX } else { self.capacity }
    }

    /// Returns the number of first tokens that a ring retains, and of last ones.
    pub fn ring(&self) -> Option<[usize; 2]> {
        match self.layout {
            CacheLayout::Ring { sink_tokens: sinks } => Some([sinks, self.capacity - sinks]),
            _ => None,
        }
    }
}

/// The distribution of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Numbers that every storage holds exactly. They are whole levels of a power of two, the
    /// largest of a group at its maximum.
    Lossless,
    /// Normal numbers. A result is off by no more than the effect of the storage's rounding.
    Random,
}

impl Data {
    /// Returns a key or a value of one head.
    pub(super) fn row(self, rng: &mut Rng, storage: CacheStorage, dim: usize) -> Vec<f32> {
        // Gaussian4 holds no row exactly, because its scale depends on all channels.
        if self == Data::Random || matches!(storage, CacheStorage::Gaussian4(_)) {
            return rng.normals(dim);
        }
        let (most, group) = match storage {
            CacheStorage::Q4(group) => (7, group),
            CacheStorage::Q8(group) => (127, group),
            CacheStorage::E4M3(group) => (448, group),
            CacheStorage::E5M2(group) => (57344, group),
            // The channel with the largest magnitude is −8 scales.
            CacheStorage::Q4_0 => (8, ScaleGroup::Of(32)),
            _ => (127, ScaleGroup::Of(32)),
        };
        let size = match group {
            ScaleGroup::Row => dim,
            ScaleGroup::Of(n) => n,
            _ => unreachable!("{group:?} is new"),
        };
        let mut row = Vec::new();
        while row.len() < dim {
            let count = size.min(dim - row.len());
            // Keys of all storages have about the same size.
            let level = rng.pick(&[1.0, 2.0, 4.0])
                / match most {
                    7 | 8 => 4.0,
                    127 => 64.0,
                    most => most as f32,
                };
            let (most_at, others) = (rng.below(count), most.min(if most == 8 { 7 } else { most }));
            row.extend((0..count).map(|n| match n == most_at {
                true => rng.pick(&[-1.0, 1.0]) * most as f32 * level,
                // Numbers of E4M3 and of E5M2, some of them subnormal.
                false if most > 127 => {
                    let (bits, least) = if most == 448 { (3, -9) } else { (2, -16) };
                    let exponent = rng.pick(&[least, least + 1, 0, 1, 2]);
                    let mantissa = rng.between(0, (2 << bits) - 1) as f32;
                    rng.pick(&[-1.0, 1.0]) * mantissa * 2f32.powi(exponent) * level
                }
                false => (rng.between(0, 2 * others) as f32 - others as f32) * level,
            }));
        }
        row
    }

    /// Returns how far a cache with this storage may move each value of a row.
    pub(super) fn off(self, kind: &Kind, storage: CacheStorage, row: &[f32]) -> Vec<f64> {
        let Some(block) = kind.hadamard else { return self.off_stored(storage, row) };
        // A value is a sum over its block, there and back.
        let rotated = hadamard(row, block);
        let off = self.off_stored(storage, &rotated);
        let root = (block as f64).sqrt();
        let sums = off.chunks(block).zip(rotated.chunks(block)).flat_map(|(off, rotated)| {
            let size: f64 = rotated.iter().map(|x| f64::from(x.abs())).sum();
            let sum = off.iter().sum::<f64>() + size * root * f64::from(f32::EPSILON);
            vec![sum / root; block]
        });
        sums.collect()
    }

    /// Returns how far the storage may move each value of a row.
    fn off_stored(self, storage: CacheStorage, row: &[f32]) -> Vec<f64> {
        // WGSL's division, which computes the scale, may be off by 2.5 ULP, and the product with it
        // by 0.5 ULP.
        let divided = 3.0 * f64::from(f32::EPSILON);
        let size = |x: &f32| f64::from(x.abs());
        match storage {
            CacheStorage::F32 => vec![0.0; row.len()],
            // Either neighbour. Numbers below f16's normal numbers may become 0. Exact f16 numbers
            // stay.
            CacheStorage::F16 if self == Data::Random => {
                row.iter().map(|x| (size(x) / 1024.0).max(1.0 / 16384.0)).collect()
            }
            CacheStorage::F16 => vec![0.0; row.len()],
            // The nearest number, off by half a spacing at most.
            CacheStorage::BF16 if self == Data::Random => row.iter().map(|x| size(x) / 256.0).collect(),
            CacheStorage::BF16 => vec![0.0; row.len()],
            CacheStorage::Q8(group) | CacheStorage::Q4(group) => {
                let scales = scales(storage, row);
                let width = match group {
                    ScaleGroup::Row => row.len(),
                    ScaleGroup::Of(n) => n,
                    _ => unreachable!("{group:?} is new"),
                };
                let half = if self == Data::Random { 0.5 } else { 0.0 };
                let off = |(n, x): (usize, &f32)| {
                    f64::from(scales[n / width]) * half * (1.0 + divided) + divided * size(x)
                };
                row.iter().enumerate().map(off).collect()
            }
            // A device may choose the other level where two are about as near. It may compute the
            // scale of Gaussian4 a little differently.
            CacheStorage::E4M3(_) | CacheStorage::E5M2(_) | CacheStorage::Gaussian4(_) => {
                let scales = scales(storage, row);
                let width = row.len().div_ceil(scales.len().max(1));
                let more = if matches!(storage, CacheStorage::Gaussian4(_)) { 2e-5 } else { divided };
                let off = |(n, (x, kept)): (usize, (&f32, f32))| {
                    let scale = f64::from(scales[n / width.max(1)]);
                    f64::from((x - kept).abs()) + 2.0 * more * (size(x) + scale)
                };
                row.iter().zip(reference::cache::stored(storage, row)).enumerate().map(off).collect()
            }
            CacheStorage::Q8_0 | CacheStorage::Q4_0 => {
                // Half a step, and the rounding of the scale to f16: half of 2⁻¹⁰ of a value. In 4
                // bits the largest value of the other sign is a step too far.
                let steps = if storage == CacheStorage::Q8_0 { 0.5 } else { 1.0 };
                let steps = if self == Data::Random { steps } else { 0.0 };
                let scales = scales(storage, row);
                let rounded = if self == Data::Random { 2f64.powi(-10) } else { 0.0 };
                let off = |(n, x): (usize, &f32)| {
                    let scale = f64::from(scales[n / 32].abs());
                    scale * steps * 1.01 + (divided + rounded) * (size(x) + scale) + 2f64.powi(-24)
                };
                row.iter().enumerate().map(off).collect()
            }
            _ => unreachable!("{storage:?} is new"),
        }
    }
}

/// Keys and values of one token in one layer, head after head.
#[derive(Clone, Debug)]
pub struct Token {
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

/// The expected state of a sequence.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    /// Tokens by position, then layer.
    pub tokens: Vec<Vec<Token>>,
    /// The longest length so far, where it matters. A ring has overwritten the tokens that a
    /// sequence of that length leaves out.
    pub high: usize,
    /// Tokens from the last advance.
    pub fresh: usize,
    /// Moves that the device has refused.
    pub refused: u32,
    /// Tokens that were removed: layer, key/value head and position.
    pub lost: HashSet<[usize; 3]>,
    /// The number of tokens that each head has lost.
    pub removed: usize,
}

impl Sequence {
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the number of positions after the sinks that a ring has overwritten.
    pub fn shift(&self, kind: &Kind) -> usize {
        if kind.ring().is_some() { self.high.saturating_sub(kind.capacity) } else { 0 }
    }

    /// True if a head of the cache still has the token at `position`.
    pub fn holds(&self, kind: &Kind, [layer, head, position]: [usize; 3]) -> bool {
        self.keeps(kind, position) && !self.lost.contains(&[layer, head, position])
    }

    /// True if the cache has not overwritten the token at `position`.
    pub fn keeps(&self, kind: &Kind, position: usize) -> bool {
        let Some([sinks, _]) = kind.ring() else { return true };
        position < sinks || position >= sinks + self.shift(kind)
    }

    /// True if the ring still has every needed token of the first `len`. It needs the sinks, and
    /// the last tokens except the spare ones.
    pub fn can_return_to(&self, kind: &Kind, len: usize) -> bool {
        let Some([sinks, last]) = kind.ring() else { return true };
        let must = |position: usize| position < sinks || position + last - kind.spare >= len;
        (0..len).all(|position| !must(position) || self.keeps(kind, position))
    }

    /// Removes tokens. The cache must still hold them.
    pub fn return_to(&mut self, kind: &Kind, len: usize) {
        assert!(len <= self.len() && self.can_return_to(kind, len));
        if self.shift(kind) == 0 || kind.ring().is_none_or(|[sinks, _]| len <= sinks) {
            self.high = len;
        }
        self.tokens.truncate(len);
        self.fresh = 0;
        if len == 0 {
            self.lost.clear();
            self.removed = 0;
        }
    }
}

/// Like [`Tokens`], with owned data.
#[derive(Clone, Debug)]
pub enum Count {
    All(usize),
    Each(Vec<usize>),
    Device { counts: Vec<u32>, most: usize },
}

impl Count {
    pub fn most(&self) -> usize {
        match self {
            Count::All(n) | Count::Device { most: n, .. } => *n,
            Count::Each(counts) => counts.iter().copied().max().unwrap_or(0),
        }
    }

    /// Returns the requested count of a sequence.
    pub fn of(&self, sequence: usize) -> usize {
        match self {
            Count::All(n) => *n,
            Count::Each(counts) => counts[sequence],
            Count::Device { counts, most } => (counts[sequence] as usize).min(*most),
        }
    }

    /// Returns the host's bounds of that count: least and most.
    pub fn known(&self, sequence: usize) -> [usize; 2] {
        match self {
            Count::Device { most, .. } => [0, *most],
            _ => [self.of(sequence); 2],
        }
    }
}
