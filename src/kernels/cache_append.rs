//! Twin of `cache_append.wgsl`.

use super::cache::{CacheParams, CacheVariant};
use super::row_positions::{self, PositionParams};
use super::{rotation_table, shader};
use crate::kernel::{BF16, Binding, Constant, Kernel, View, Width, params};
use crate::tensor::{Access, DType};

/// Where the rows go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RowsAt {
    /// To the positions of the last advance.
    LastAdvance,
    /// From a position on that is there already.
    Start,
    /// To positions that a tensor says, there already.
    Positions,
}

/// What changes the text of the append.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheAppend {
    pub cache: CacheVariant,
    /// Type of k and v.
    pub kv: DType,
    /// Whether keys are rotated by their positions.
    pub rotates: bool,
    pub rows_at: RowsAt,
}

/// In place of the sequence table's store where nothing is refused.
const NO_COUNT: &str = "fn sequence_table_store(o: u32, x: u32) {}\n";

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        k: View,
        v: View,
        cache: CacheParams,
        rotation: rotation_table::RotationParams,
        at: PositionParams,
        head_dim: u32,
        value_dim: u32,
        k_units: u32,
        v_units: u32,
        rows: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl CacheAppend {
    /// Channels that one invocation writes, of a key and of a value.
    pub fn units(cache: &CacheVariant) -> [u32; 2] {
        if cache.storage.is_scaled() { cache.groups } else { [32; 2] }
    }

    pub fn describe(&self) -> Kernel {
        let mut bindings = ["k", "v"].map(|name| Binding::read(name, self.kv, Width::One)).to_vec();
        bindings.extend(["cache_k", "cache_v"].map(|name| Binding::write(name, DType::U32, Width::One)));
        // Rows that are refused are counted there.
        let overwrites = self.rows_at != RowsAt::LastAdvance;
        let access = if overwrites { Access::Write } else { Access::Read };
        bindings.push(Binding { access, ..CacheVariant::sequence_table() });
        let no_table = if self.rotates {
            bindings.push(rotation_table::binding());
            ""
        } else {
            rotation_table::NONE
        };
        let (positions, at) = row_positions::declare(self.rows_at == RowsAt::Positions, &mut bindings);
        let [k_unit, v_unit] = Self::units(&self.cache);
        let constants = [
            self.cache.placed(),
            Constant::U32("STORAGE_KIND", self.cache.storage as u32),
            Constant::U32("K_UNIT", k_unit),
            Constant::U32("V_UNIT", v_unit),
            Constant::Bool("ROTATES", self.rotates),
            Constant::Bool("OVERWRITES", overwrites),
            positions,
        ];
        let parts = [
            shader!("tensor/view"),
            shader!("cache/params"),
            shader!("cache/sequence_table"),
            shader!("cache/is_kept"),
            shader!("keys/storage"),
            BF16,
            row_positions::SHADER,
            rotation_table::SHADER,
            shader!("cache_append"),
            no_table,
            at,
            if overwrites { "" } else { NO_COUNT },
        ];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        CacheVariant::all().flat_map(|cache| {
            let of = move |kv, rotates, rows_at| CacheAppend { cache, kv, rotates, rows_at };
            let appends = super::FLOATS
                .into_iter()
                .flat_map(move |kv| [false, true].map(move |rotates| of(kv, rotates, RowsAt::LastAdvance)));
            let overwrites = [of(DType::F32, false, RowsAt::Start), of(DType::F32, true, RowsAt::Positions)];
            appends.chain(overwrites)
        })
    }
}
