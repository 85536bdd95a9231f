//! Rows in steps, with a cache of their keys and values.

use wgpu_attention::cache::{CacheStorage, Keep};
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
    compacts: bool,
) -> Result<Cache, Error> {
    let storage = match dtype {
        DType::F16 => CacheStorage::F16,
        _ => CacheStorage::F32,
    };
    let config = CacheConfig::new(kv_heads, head_dim, length + 3);
    let config = config.batch(batch).layers(layers).storage(storage).compacts(compacts);
    Cache::with_pipelines(profile.gpu.pipelines(), config)
}

/// Removes all tokens before the last `tokens` of every sequence. Sequences have the same length.
pub fn keep_last(profile: &Profile, cache: &mut Cache, batch: usize, tokens: usize) -> Result<(), Error> {
    let stored = cache.stored(0).expect("the host knows the length");
    let kept: Vec<usize> = (stored.saturating_sub(tokens)..stored).collect();
    profile.gpu.submit(|e| cache.compact(e, Keep::Each(&vec![&kept[..]; batch])))
}
