//! Generation with caches against one call for all tokens.

use wgpu_attention::CacheConfig;
use wgpu_attention::cache::{CacheLayout, CacheStorage, ScaleGroup};
use wgpu_attention_burn::{Attend, Cache, Error, Mask};

use crate::support::{assert_close, device, tensor};

#[test]
fn steps_match_one_call() {
    let device = device();
    let [q, k, v] =
        [(1, 4), (2, 2), (3, 2)].map(|(seed, heads)| tensor::<4>(seed, [2, heads, 20, 32], &device));
    let all = Attend::new(q.clone(), k.clone(), v.clone()).mask(Mask::causal()).scale(0.2).forward().unwrap();
    let plain = CacheConfig::new(2, 32, 64).batch(2).layers(2);
    let paged = plain.layout(CacheLayout::Paged { page: 16, pages: 8 });
    let bits8 = plain.storage(CacheStorage::Q8(ScaleGroup::Of(32)));
    for (config, tolerance) in [(plain, 2e-5), (paged, 2e-5), (bits8, 3e-2)] {
        let mut cache = Cache::new(&device, config).unwrap();
        let mut start = 0;
        for rows in [13, 1, 1, 4, 1] {
            cache.advance(rows).unwrap();
            let part = [&q, &k, &v].map(|t| t.clone().narrow(2, start, rows));
            for layer in 0..2 {
                let [q, k, v] = part.clone();
                let out = Attend::new(q, k, v).mask(Mask::causal()).scale(0.2).step(&cache, layer).unwrap();
                assert_close(out, all.clone().narrow(2, start, rows), tolerance);
            }
            start += rows;
        }
        assert_eq!(cache.inner().len(0), Some(20));
    }
}

#[test]
fn wrong_steps_are_errors() {
    let device = device();
    let mut cache = Cache::new(&device, CacheConfig::new(2, 16, 8)).unwrap();
    let q = tensor::<4>(1, [1, 2, 1, 16], &device);
    let step = |q| Attend::new(q, tensor(2, [1, 2, 1, 16], &device), tensor(3, [1, 2, 1, 16], &device));
    let error = step(q.clone()).step(&cache, 0).unwrap_err();
    assert!(error.to_string().contains("advance"), "{error}");
    cache.advance(1).unwrap();
    assert!(step(q.clone()).step(&cache, 1).is_err());
    let tracked = tensor::<4>(1, [1, 2, 1, 16], &device.clone().autodiff()).require_grad();
    assert!(matches!(step(tracked).step(&cache, 0), Err(Error::Unsupported { .. })));
    assert!(matches!(step(q.clone()).dropout(0.1, 1).step(&cache, 0), Err(Error::Unsupported { .. })));
    step(q).step(&cache, 0).unwrap();
    assert!(cache.advance(8).is_err());
}
