//! Twin of `cache_read.wgsl`.

use super::cache::{CacheParams, CacheVariant, EVERY_KEY, EVERY_POSITION};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Untyped, Variant, families, kernel, shader};
use crate::position::kernels::row_positions::{self, PositionParams};
use crate::tensor::DType;

kernel! {
    /// The kernel that reads rows from a cache.
    CacheRead, CacheReadCall
    tensors {
        k: One Write F32 one view,
        v: One Write F32 one view,
        cache_k: Raw Read U32 four,
        cache_v: Raw Read U32 four,
        sequence_table: Raw Read U32 one,
        positions: Opt Read U32 one,
    }
    numbers {
        cache: CacheParams,
        at: PositionParams,
        head_dim: u32,
        value_dim: u32,
        /// Vectors of four channels in a row of keys.
        k_units: u32,
        v_units: u32,
        /// Channels of a block that was multiplied by a Walsh–Hadamard matrix, and 1 / √ of them.
        hadamard_block: u32,
        hadamard_scale: f32,
    }
    variant {
        cached: CacheVariant,
        /// True if blocks were multiplied by a Walsh–Hadamard matrix.
        hadamard: bool,
    }
}

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;
/// Channels that one invocation reads.
pub(crate) const UNIT: usize = 4;

impl Variant for CacheRead {
    const LABEL: &'static str = "attention.cache_read";

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("cache/params"),
            shader!("cache/sequence_table"),
            shader!("cache/is_kept"),
            if self.cached.compacts { shader!("cache/stored_positions") } else { EVERY_POSITION },
            shader!("attention/keys/cache"),
            EVERY_KEY,
            shader!("attention/keys/packed_words"),
            shader!("attention/keys/storage"),
            row_positions::SHADER,
            shader!("cache/hadamard"),
            shader!("cache/cache_read"),
        ];
        self.declare()
            .with(self.cached.constants())
            .bool("WIDE", true)
            .bool("HADAMARD", self.hadamard)
            .kernel(&parts, WORKGROUP as u32, 0)
    }

    fn families(&self) -> Families {
        let [k, v] = self.cached.families();
        families(&[k, v, self.hadamard.then_some(Family::Hadamard)], &[])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        CacheVariant::all().flat_map(|cached| {
            FLOATS.into_iter().flat_map(move |kv| {
                [None, Some(DType::U32)].map(move |positions| CacheRead {
                    k: kv,
                    v: kv,
                    cache_k: Untyped,
                    cache_v: Untyped,
                    sequence_table: Untyped,
                    positions,
                    cached,
                    hadamard: positions.is_some(),
                })
            })
        })
    }
}
