//! Twin of `fused.wgsl`.

mod all;
mod form;

use form::Form;

use super::key_lists;
use crate::attention::plan::FusedTiles;
use crate::cache::kernels::cache::{CacheParams, CacheVariant, packed_words};
use crate::cache::storage::StorageKind;
use crate::device::{Families, Family};
use crate::kernel::{Constant, Declared, Kernel, Untyped, Variant, Width, families, kernel, shader};
use crate::mask::Id;
use crate::mask::kernels::dropout::{DropoutKind, Dropped};
use crate::mask::kernels::{MaskVariant, Masked};
use crate::tensor::DType;

kernel! {
    /// The kernel of attention in one pass.
    Fused, FusedCall
    tensors {
        q: One Read F32 width view,
        // Present if keys and values are tensors.
        k: Opt Read F32 width view,
        v: Opt Read F32 width view,
        // Present if keys and values are in a cache.
        cache_k: OptRaw Read U32 four,
        cache_v: OptRaw Read U32 four,
        sequence_table: OptRaw Read U32 one,
        // The vector of additive scores.
        score_vector: Opt Read F32 one repeating,
        // The partial results of splits. Without splits, the kernel writes out and lse.
        partial: OptRaw Write F32 four,
        out: Opt Write F32 store view,
        lse: Opt Write F32 one view,
    }
    groups {
        mask: Masked MaskVariant,
        drop: Dropped DropoutKind,
    }
    numbers {
        cache: CacheParams,
        /// Workgroups before those of this dispatch. The host cuts long work into several
        /// dispatches.
        first: [u32; 4],
        /// The places of lists of keys (`keys/lists.wgsl`).
        key_lists: [u32; 4],
        key_batches: [u32; 4],
        heads: u32,
        kv_heads: u32,
        group: u32,
        head_dim: u32,
        value_dim: u32,
        scale: f32,
        splits: u32,
        /// The keys of a split that begins at a multiple of them. 0 if the rows' keys are shared
        /// evenly.
        fixed_split: u32,
        /// The start of the maxima and totals in `partial`.
        stats: u32,
    }
    variant {
        tiles: FusedTiles,
        cached: Option<CacheVariant>,
        /// True if tensors are loaded as vectors of words.
        words: bool,
        width: Width,
        store: Width,
        /// True if element indices of k or v reach 2^28, or a side of the cache 2^30 bytes. Only
        /// the CPU variants use it.
        wide: bool,
        /// True if k and v are contiguous along their channels. Only the CPU variant uses it, when
        /// it does not load vec4.
        contiguous: bool,
        /// True if each query has a list of keys.
        listed: bool,
    }
}

/// The replacement of `fused/tile_state.wgsl` if the mask has no block map.
pub(crate) const NO_BLOCKS: &str = "const HIDDEN: u32 = 0u;
const FULL: u32 = 2u;
fn tile_state(b: u32, kv_head: u32, first: u32, last: u32, from_key: u32, to_key: u32) -> u32 {
    return 1u;
}
fn map_row(i: u32) -> u32 {
    return 0u;
}
fn block_of_row(q: Query, row: u32, col: u32) -> u32 {
    return 1u;
}
fn tile_column_state(b: u32, kv_head: u32, rows: vec2<u32>, col: u32, to_key: u32) -> u32 {
    return 1u;
}
";

/// The replacement of `keys/by_channel.wgsl` if keys and values load as vectors.
const IN_VECTORS: &str = "fn k_whole(s: Source, row: u32, d: u32) -> vec4<f32> {
    return k_four(s, row, d);
}
fn v_whole(s: Source, row: u32, d: u32) -> vec4<f32> {
    return v_four(s, row, d);
}
fn k_last(s: Source, row: u32, d: u32, n: u32, exist: vec4<bool>) -> vec4<f32> {
    return k_four(s, row, d);
}
fn v_last(s: Source, row: u32, d: u32, n: u32, exist: vec4<bool>) -> vec4<f32> {
    return v_four(s, row, d);
}
";

impl Variant for Fused {
    const LABEL: &'static str = "attention.fused";

    fn describe(&self) -> Kernel {
        let form = Form::of(&self.tiles);
        let mut declared = self.declared().with(form.constants).with(self.keys_constants());
        let mut parts = vec![
            shader!("tensor/view"),
            shader!("attention/softmax/online"),
            shader!("attention/fused"),
            shader!("tensor/out"),
        ];
        parts.extend(form.text);
        parts.extend(match self.score_vector {
            Some(_) => [shader!("additive/score"), shader!("additive/tanh")].as_slice(),
            None => &[shader!("attention/fused/dot")],
        });
        parts.push(shader!("cache/params"));
        parts.push(key_lists::text(self.listed));
        parts.extend(self.keys_text());
        if self.loads_by_channel() {
            declared = declared.bool("CONTIGUOUS", self.contiguous);
            parts.push(shader!("attention/keys/by_channel"));
        } else if matches!(self.tiles, FusedTiles::Cpu { .. }) {
            parts.push(IN_VECTORS);
        }
        parts.push(if self.mask.has(Id::Blocks) { shader!("attention/fused/tile_state") } else { NO_BLOCKS });
        let knows_blocks = self.tiles.is_cpu() && !self.tiles.is_additive();
        let mask = if knows_blocks { self.mask.knowing_blocks() } else { self.mask };
        let mask = mask.wgsl();
        parts.push(&mask);
        declared.kernel(&parts, form.invocations, self.tiles.workgroup_memory())
    }

    fn families(&self) -> Families {
        let family = match self.tiles {
            FusedTiles::Gpu { .. } | FusedTiles::AdditiveGpu { .. } => Family::FusedGpu,
            FusedTiles::Cpu { .. } | FusedTiles::AdditiveCpu { .. } => Family::FusedCpu,
            FusedTiles::DecodeGpu(_) => Family::DecodeGpu,
            FusedTiles::DecodeCpu(_) => Family::DecodeCpu,
            FusedTiles::Matrix(_) => Family::MatrixAttention,
        };
        let shuffles = matches!(self.tiles, FusedTiles::DecodeGpu(decode) if decode.subgroups);
        let [keys, values] = self.cached.map_or([None; 2], |cache| cache.families());
        let found = [
            Some(family),
            shuffles.then_some(Family::SubgroupReductions),
            self.partial.map(|_| Family::SplitKeys),
            keys,
            values,
        ];
        families(&found, &[self.q])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        all::all()
    }
}

impl Fused {
    /// True if the CPU variant loads keys and values one channel at a time.
    fn loads_by_channel(&self) -> bool {
        Self::by_channel(self.tiles, self.width) && self.cached.is_none() && !self.words
    }

    /// True if these tiles load tensors of this width one channel at a time.
    pub fn by_channel(tiles: FusedTiles, width: Width) -> bool {
        matches!(tiles, FusedTiles::Cpu { .. }) && width == Width::One
    }

    /// Returns the declarations that all variants share.
    fn declared(&self) -> Declared {
        let declared = self.declare();
        let declared = if self.words { declared.words("k").words("v") } else { declared };
        declared
            .bool("IN_FOURS", self.width == Width::Four)
            .bool("OUT_IN_FOURS", self.store == Width::Four)
            .bool("SPLITS", self.partial.is_some())
            .u32("SPLIT_LEAST", self.tiles.split_least())
            .u32("SPLIT_STEP", self.tiles.split_step())
            .bool("PER_PAIR_MASK", self.mask.is_per_pair())
            .bool("NATURAL_SCORES", self.mask.is_per_pair())
            .bool("LISTED", self.listed)
            .bool("IN_RUNS", !self.listed && !self.cached.is_some_and(|cache| cache.is_ring()))
            .bool("HAS_BLOCKS", self.mask.has(Id::Blocks))
            // Appended keys lie past the interval in which a full block is valid.
            .bool("FULL_IS_PLAIN", !self.mask.mods_full_blocks() && !self.mask.appended)
            // GPUs have no bounds checks that narrow indices would avoid.
            .bool("WIDE", self.wide || !self.tiles.is_cpu())
    }

    /// Returns the constants of the storage of keys and values.
    fn keys_constants(&self) -> Vec<Constant> {
        match self.cached {
            Some(cache) => cache.constants(),
            None if self.words => packed_words([StorageKind::of(self.q); 2]).into(),
            None => vec![Constant::U32("K_VECTORS", 1), Constant::U32("V_VECTORS", 1)],
        }
    }

    /// Returns the WGSL that loads keys and values.
    fn keys_text(&self) -> Vec<&'static str> {
        match self.cached {
            Some(cache) => vec![
                shader!("cache/sequence_table"),
                if cache.compacts { shader!("cache/stored_positions") } else { "" },
                shader!("attention/keys/cache"),
                shader!("attention/keys/packed_words"),
                shader!("attention/keys/storage"),
            ],
            None if self.words => {
                vec![
                    shader!("attention/keys/tensor_words"),
                    shader!("attention/keys/packed_words"),
                    shader!("attention/keys/storage"),
                ]
            }
            None => vec![shader!("attention/keys/tensors")],
        }
    }

    /// Returns the same kernel with tensors of another type.
    fn with_tensors(self, dtype: DType) -> Self {
        let other = |tensor: Option<DType>| tensor.map(|_| dtype);
        Fused { q: dtype, k: other(self.k), v: other(self.v), out: other(self.out), ..self }
    }

    /// Returns the same kernel with keys and values in a cache.
    fn in_cache(self, cache: CacheVariant) -> Self {
        let raw = Some(Untyped);
        let bound = Fused { k: None, v: None, cache_k: raw, cache_v: raw, sequence_table: raw, ..self };
        Fused { cached: Some(cache), mask: self.mask.in_cache(&cache), ..bound }
    }

    /// Returns the same kernel with keys that are split among workgroups.
    fn split(self) -> Self {
        Fused { partial: Some(Untyped), out: None, lse: None, ..self }
    }

    /// Returns the same kernel for far elements, if they change its text.
    fn widened(&self) -> Option<Self> {
        self.tiles.is_cpu().then_some(Fused { wide: true, ..*self })
    }
}
