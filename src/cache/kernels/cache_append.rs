//! Twin of `cache_append.wgsl`.

use super::cache::{CacheParams, CacheVariant, EVERY_POSITION, sequence_table};
use crate::cache::storage::{LayoutKind, StorageKind};
use crate::device::{Families, Family};
use crate::kernel::{BF16, FLOATS, Kernel, Untyped, Variant, families, kernel, shader};
use crate::position::kernels::rotation_table::{self, RotationParams};
use crate::position::kernels::row_positions::{self, PositionParams};
use crate::tensor::{Access, DType};

kernel! {
    /// The kernel that appends or overwrites rows.
    CacheAppend, CacheAppendCall
    tensors {
        k: One Read F32 one view,
        v: One Read F32 one view,
        cache_k: Raw Write U32 one,
        // Latent values are in the rows of keys.
        cache_v: OptRaw Write U32 one,
        // The kernel writes the table if rows may be refused, to count refusals.
        sequence_table: Raw Read U32 one,
        // The table that rotates keys by their positions.
        rotation_table: Opt Read F32 one,
        positions: Opt Read U32 one,
        // Queries, which the kernel rotates in place.
        q: Opt Write F32 one view,
    }
    numbers {
        cache: CacheParams,
        rotation: RotationParams,
        at: PositionParams,
        head_dim: u32,
        value_dim: u32,
        /// Units of a row of keys.
        k_units: u32,
        v_units: u32,
        rows: u32,
        q_heads: u32,
        /// Channels of a block that is multiplied by a Walsh–Hadamard matrix, and 1 / √ of them.
        hadamard_block: u32,
        hadamard_scale: f32,
        /// 1 if the dispatch counts refused rows.
        counts_refused: u32,
    }
    variant {
        /// The storage of the sides that the dispatch writes.
        storage: StorageKind,
        layout_kind: LayoutKind,
        compacts: bool,
        /// Channels of a key, and of a value, that share a scale.
        groups: [u32; 2],
        /// True if rows overwrite existing positions, false if they are the tokens of the last
        /// advance.
        overwrites: bool,
        /// True if blocks are multiplied by a Walsh–Hadamard matrix.
        hadamard: bool,
        /// True for scales and rounding as in ggml.
        ggml: bool,
        /// True if there are no values.
        latent: bool,
    }
}

/// The words that `cache/stored_positions.wgsl` reads.
const KEY_EXTRAS: &str = "fn key_extra(o: u32) -> u32 {
    return cache_k_at(o);
}
";

/// Replaces the store to the sequence table if no row can be refused.
const NO_COUNT: &str = "fn sequence_table_store(o: u32, x: u32) {}\n";

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for CacheAppend {
    const LABEL: &'static str = "attention.cache_append";

    fn describe(&self) -> Kernel {
        let [k_unit, v_unit] = Self::units(self.storage, self.groups);
        let (access, no_count) = if self.overwrites { (Access::Write, "") } else { (Access::Read, NO_COUNT) };
        let parts = [
            shader!("tensor/view"),
            shader!("cache/params"),
            shader!("cache/sequence_table"),
            shader!("cache/is_kept"),
            if self.compacts { shader!("cache/stored_positions") } else { EVERY_POSITION },
            KEY_EXTRAS,
            shader!("attention/keys/storage"),
            BF16,
            row_positions::SHADER,
            rotation_table::SHADER,
            shader!("cache/hadamard"),
            shader!("cache/cache_append"),
            no_count,
        ];
        self.declare()
            .access("sequence_table", access)
            .with(sequence_table(self.layout_kind, self.compacts))
            .u32("STORAGE", self.storage as u32)
            .u32("PER_WORD", self.storage.per_word() as u32)
            .u32("K_UNIT", k_unit)
            .u32("V_UNIT", v_unit)
            .bool("OVERWRITES", self.overwrites)
            .bool("HADAMARD", self.hadamard)
            .bool("GGML", self.ggml)
            .kernel(&parts, WORKGROUP as u32, 0)
    }

    fn families(&self) -> Families {
        families(&[Some(self.storage.family()), self.hadamard.then_some(Family::Hadamard)], &[])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        CacheVariant::all().flat_map(
            |CacheVariant { storages: [storage, _], layout_kind, groups, compacts }| {
                let of = move |kv, rotates: bool, overwrites, positions: bool| CacheAppend {
                    k: kv,
                    v: kv,
                    cache_k: Untyped,
                    cache_v: Some(Untyped),
                    sequence_table: Untyped,
                    rotation_table: rotates.then_some(DType::F32),
                    positions: positions.then_some(DType::U32),
                    q: None,
                    storage,
                    layout_kind,
                    compacts,
                    groups,
                    overwrites,
                    hadamard: false,
                    ggml: false,
                    latent: false,
                };
                let appends = FLOATS
                    .into_iter()
                    .flat_map(move |kv| [false, true].map(move |rotates| of(kv, rotates, false, false)));
                let queries = FLOATS.map(|kv| CacheAppend { q: Some(kv), ..of(kv, true, false, false) });
                let hadamard = CacheAppend { hadamard: true, ..of(DType::F32, true, false, false) };
                let latent = CacheAppend { cache_v: None, latent: true, ..of(DType::F32, false, true, true) };
                let ggml = [false, true].map(|hadamard| CacheAppend {
                    ggml: true,
                    hadamard,
                    ..of(DType::F16, false, false, false)
                });
                let has_ggml = matches!(storage, StorageKind::Q8 | StorageKind::Q4);
                let ggml = ggml.into_iter().filter(move |_| has_ggml);
                appends
                    .chain(queries)
                    .chain([
                        CacheAppend { q: Some(DType::F32), ..hadamard },
                        of(DType::F32, false, true, false),
                        of(DType::F32, true, true, true),
                        hadamard,
                    ])
                    .chain([latent])
                    .chain(ggml)
            },
        )
    }
}

impl CacheAppend {
    /// Channels that one invocation writes, of a key and of a value.
    pub fn units(storage: StorageKind, groups: [u32; 2]) -> [u32; 2] {
        if storage.is_scaled() { groups } else { [32; 2] }
    }
}
