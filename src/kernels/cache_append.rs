//! Twin of `cache_append.wgsl`.

use super::cache::{CacheParams, CacheVariant};
use super::{rotation_table, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the append.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheAppend {
    pub cache: CacheVariant,
    /// Type of k and v.
    pub kv: DType,
    /// Whether keys are rotated by their positions.
    pub rotates: bool,
}

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        k: View,
        v: View,
        cache: CacheParams,
        rotation: rotation_table::RotationParams,
        head_dim: u32,
        value_dim: u32,
        k_units: u32,
        v_units: u32,
        first: u32,
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
        bindings.push(CacheVariant::sequence_table());
        let no_table = if self.rotates {
            bindings.push(rotation_table::binding());
            ""
        } else {
            rotation_table::NONE
        };
        let [k_unit, v_unit] = Self::units(&self.cache);
        let constants = [
            self.cache.placed(),
            Constant::U32("STORAGE_KIND", self.cache.storage as u32),
            Constant::U32("K_UNIT", k_unit),
            Constant::U32("V_UNIT", v_unit),
            Constant::Bool("ROTATES", self.rotates),
        ];
        let parts = [
            shader!("tensor/view"),
            shader!("cache/params"),
            shader!("cache/sequence_table"),
            shader!("keys/storage"),
            rotation_table::SHADER,
            shader!("cache_append"),
            no_table,
        ];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        CacheVariant::all().flat_map(|cache| {
            super::FLOATS
                .into_iter()
                .flat_map(move |kv| [false, true].map(move |rotates| CacheAppend { cache, kv, rotates }))
        })
    }
}
