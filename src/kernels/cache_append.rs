//! Twin of `cache_append.wgsl`.

use super::cache::{CacheParams, Cached};
use super::{shader, turns};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the append.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheAppend {
    pub cache: Cached,
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
        turns: turns::Turns,
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
    pub fn units(cache: &Cached) -> [u32; 2] {
        if cache.format.is_scaled() { cache.groups } else { [32; 2] }
    }

    pub fn describe(&self) -> Kernel {
        let mut bindings = ["k", "v"].map(|name| Binding::read(name, self.kv, Width::One)).to_vec();
        bindings.extend(["cache_k", "cache_v"].map(|name| Binding::write(name, DType::U32, Width::One)));
        bindings.push(Cached::book());
        let no_turns = if self.rotates {
            bindings.push(turns::binding());
            ""
        } else {
            turns::NONE
        };
        let [k_unit, v_unit] = Self::units(&self.cache);
        let constants = [
            self.cache.placed(),
            Constant::U32("FORMAT", self.cache.format as u32),
            Constant::U32("K_UNIT", k_unit),
            Constant::U32("V_UNIT", v_unit),
            Constant::Bool("ROTATES", self.rotates),
        ];
        let parts = [
            shader!("shared/view"),
            shader!("shared/cache_params"),
            shader!("shared/cache"),
            shader!("shared/formats"),
            turns::SHADER,
            shader!("cache_append"),
            no_turns,
        ];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        Cached::all().flat_map(|cache| {
            super::FLOATS
                .into_iter()
                .flat_map(move |kv| [false, true].map(move |rotates| CacheAppend { cache, kv, rotates }))
        })
    }
}
