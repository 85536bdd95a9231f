//! Rows in steps, with a cache of their keys and values.

use wgpu_attention::cache::CacheStorage;
use wgpu_attention::{Cache, CacheConfig, DType, Error};

use crate::harness::{Profile, Rng};

/// Returns steps that add up to `length`.
pub fn steps_of(length: usize, rng: &mut Rng) -> Vec<usize> {
    let mut steps = Vec::new();
    let mut left = length;
    while left > 0 {
        let step = rng.between(1, left.min(5));
        steps.push(step);
        left -= step;
    }
    steps
}

/// Makes a cache for `[batch, kv_heads, head_dim, length]` of each of `layers`, with room for a few
/// more rows.
pub fn cache_of(
    profile: &Profile,
    layers: usize,
    [batch, kv_heads, head_dim, length]: [usize; 4],
    dtype: DType,
) -> Result<Cache, Error> {
    let storage = match dtype {
        DType::F16 => CacheStorage::F16,
        _ => CacheStorage::F32,
    };
    let config = CacheConfig::new(kv_heads, head_dim, length + 3);
    Cache::with_pipelines(profile.gpu.pipelines(), config.batch(batch).layers(layers).storage(storage))
}
