//! Twin of `cache_read.wgsl`.

use super::cache::{CacheParams, CacheVariant};
use super::row_positions::{self, PositionParams};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the way back out of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheRead {
    pub cache: CacheVariant,
    /// Type of k and v.
    pub kv: DType,
    /// Whether a tensor says which positions.
    pub positions: bool,
}

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;
/// Channels that one invocation has.
pub(crate) const UNIT: usize = 4;

params! {
    pub(crate) struct Params {
        k: View,
        v: View,
        cache: CacheParams,
        at: PositionParams,
        head_dim: u32,
        value_dim: u32,
        k_units: u32,
        v_units: u32,
    }
}

impl CacheRead {
    pub fn describe(&self) -> Kernel {
        let mut bindings = ["k", "v"].map(|name| Binding::write(name, self.kv, Width::One)).to_vec();
        bindings.extend(CacheVariant::bindings());
        let (positions, at) = row_positions::declare(self.positions, &mut bindings);
        let mut constants = Vec::from(self.cache.constants());
        constants.extend([
            Constant::U32("VECTORS", self.cache.storage.per_word() as u32),
            Constant::Bool("WIDE", true),
            positions,
        ]);
        let parts = [
            shader!("tensor/view"),
            shader!("cache/params"),
            shader!("cache/sequence_table"),
            shader!("cache/is_kept"),
            shader!("keys/cache"),
            shader!("keys/packed_words"),
            shader!("keys/storage"),
            row_positions::SHADER,
            shader!("cache_read"),
            at,
        ];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        CacheVariant::all().flat_map(|cache| {
            super::FLOATS
                .into_iter()
                .flat_map(move |kv| [false, true].map(move |positions| CacheRead { cache, kv, positions }))
        })
    }
}
