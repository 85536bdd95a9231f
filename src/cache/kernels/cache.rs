//! The common part of kernels that read a cache: twin of `cache/sequence_table.wgsl` and
//! `keys/cache.wgsl`.

use crate::cache::storage::{LayoutKind, StorageKind};
use crate::device::Family;
use crate::kernel::{Constant, Width, params, shared};

/// The properties of a cache that change the text of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheVariant {
    /// The storage of keys, and of values.
    pub storages: [StorageKind; 2],
    pub layout_kind: LayoutKind,
    /// Channels of a key, and of a value, that share a scale.
    pub groups: [u32; 2],
    /// True if positions are stored with keys, so that tokens can be removed.
    pub compacts: bool,
}

/// Words of the sequence table for each sequence, as in the shader.
pub(crate) const WORDS: usize = 8;
pub(crate) const START: usize = 0;
pub(crate) const LENGTH: usize = 1;
pub(crate) const HIGH: usize = 2;
/// The number of removed tokens, in caches that can remove tokens.
pub(crate) const REMOVED: usize = HIGH;
pub(crate) const LIMIT: usize = 3;
pub(crate) const REFUSED: usize = 4;
pub(crate) const COUNT: usize = 5;
pub(crate) const MOVE_TO: usize = 6;
pub(crate) const MOVE_FROM: usize = 7;
/// In a compaction: the number of stored tokens before it.
pub(crate) const STORED: usize = MOVE_FROM;
/// In `MOVE_FROM`: both sequences exchange their rows.
pub(crate) const EXCHANGE: u32 = 1 << 31;

params! {
    /// The WGSL `CacheParams`.
    #[derive(Default)]
    pub(crate) struct CacheParams {
        batch: u32,
        kv_heads: u32,
        page_len: u32,
        page_bits: u32,
        table: u32,
        pages_each: u32,
        sinks: u32,
        window: u32,
        ragged: u32,
        k_words: u32,
        v_words: u32,
        k_groups: u32,
        v_groups: u32,
        k_scales: u32,
        v_scales: u32,
        longest: u32,
        pages: u32,
        spare: u32,
        pad0: u32,
        pad1: u32,
    }
}
shared! { CacheParams = "CacheParams" }

/// The replacement of `cache/stored_positions.wgsl` if no token can be removed.
pub(crate) const EVERY_POSITION: &str = "fn cached_position(b: u32, kv_head: u32, t: u32) -> u32 {
    return t;
}
fn token_at(b: u32, kv_head: u32, j: u32) -> u32 {
    return j;
}
";

/// The replacement of `attention/keys/lists.wgsl` if every key has a score.
pub(crate) const EVERY_KEY: &str = "fn key_batch(b: u32) -> u32 {
    return b;
}
fn key_head(kv_head: u32) -> u32 {
    return kv_head;
}
fn list_of(b: u32, kv_head: u32) -> u32 {
    return 0u;
}
fn listed(list: u32, n: u32) -> u32 {
    return n;
}
";

/// The type of the words that a kernel moves.
pub(super) fn word_of(width: Width) -> &'static str {
    match width {
        Width::Four => "alias Word = vec4<u32>;\n",
        Width::One => "alias Word = u32;\n",
    }
}

impl CacheVariant {
    /// True if neighbouring tokens may lie apart in memory.
    pub fn is_ring(&self) -> bool {
        self.layout_kind == LayoutKind::Ring
    }

    /// The constants of `keys/cache.wgsl`.
    pub fn constants(&self) -> Vec<Constant> {
        let [k, v] = self.groups;
        let [layout, compacts] = sequence_table(self.layout_kind, self.compacts);
        let groups = [layout, compacts, Constant::U32("K_GROUP", k), Constant::U32("V_GROUP", v)];
        groups.into_iter().chain(packed_words(self.storages)).collect()
    }

    /// The families of the kernels that read this storage.
    pub fn families(&self) -> [Option<Family>; 2] {
        self.storages.map(|storage| Some(storage.family()))
    }

    /// Returns the variant with the groups that tests and tools compile.
    pub fn of(storages: [StorageKind; 2], layout_kind: LayoutKind) -> Self {
        let [k, v] = storages.map(StorageKind::is_scaled);
        let groups = [if k { 32 } else { 1 }, if v { 64 } else { 1 }];
        CacheVariant { storages, layout_kind, groups, compacts: false }
    }

    /// Every storage in a contiguous cache, every layout with Q8, and caches that can remove
    /// tokens.
    pub fn all() -> impl Iterator<Item = Self> {
        let of = |storage, layout_kind| Self::of([storage; 2], layout_kind);
        let storages = StorageKind::ALL.into_iter().map(move |storage| of(storage, LayoutKind::Contiguous));
        let compacts = [of(StorageKind::F16, LayoutKind::Contiguous), of(StorageKind::Q8, LayoutKind::Paged)];
        let compacts = compacts.map(|cache| CacheVariant { compacts: true, ..cache });
        storages
            .chain(LayoutKind::ALL.into_iter().map(move |layout_kind| of(StorageKind::Q8, layout_kind)))
            .chain(compacts)
    }
}

/// The constants of `cache/sequence_table.wgsl`.
pub(crate) fn sequence_table(layout_kind: LayoutKind, compacts: bool) -> [Constant; 2] {
    [Constant::U32("LAYOUT_KIND", layout_kind as u32), Constant::Bool("COMPACTS", compacts)]
}

/// The constants of `keys/packed_words.wgsl`, for the storage of keys and of values.
pub(crate) fn packed_words([k, v]: [StorageKind; 2]) -> [Constant; 4] {
    [
        Constant::U32("K_STORAGE", k as u32),
        Constant::U32("V_STORAGE", v as u32),
        Constant::U32("K_VECTORS", k.per_word() as u32),
        Constant::U32("V_VECTORS", v.per_word() as u32),
    ]
}
