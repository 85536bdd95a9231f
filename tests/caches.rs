//! Attention to what a cache holds.

use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::{
    Append, Attention, Cache, CacheConfig, CacheLayout, CachedForward, Config, DType, Group, HostMask,
    HostTensor, Mask, Rows, Scratch, Shape, Storage, TensorView,
};

use crate::harness::{Rng, TILINGS, full};

#[test]
fn smoke() {
    let profile = full();
    let gpu = &profile.gpu;
    let (heads, kv_heads, dim, vdim, batch) = (4, 2, 40, 24, 2);
    for tiling in TILINGS {
        for storage in [
            Storage::F32,
            Storage::F16,
            Storage::Q8(Group::Of(32)),
            Storage::Q8(Group::Row),
            Storage::Q4(Group::Of(32)),
            Storage::Q4(Group::Row),
        ] {
            for layout in [
                CacheLayout::Contiguous,
                CacheLayout::Ring { sinks: 3 },
                CacheLayout::Paged { page: 16, pages: 20 },
            ] {
                let capacity = if matches!(layout, CacheLayout::Ring { .. }) { 24 } else { 80 };
                let config = CacheConfig::new(kv_heads, dim, capacity)
                    .value_dim(vdim)
                    .batch(batch)
                    .storage(storage)
                    .layout(layout);
                let mut cache = Cache::with_pipelines(gpu.pipelines(), config).unwrap();
                let attention = Attention::with_pipelines(
                    gpu.pipelines(),
                    Config::new(heads, dim).value_dim(vdim).kv_heads(kv_heads).tiling(tiling).splits(3),
                )
                .unwrap();
                let mut rng = Rng::new(1);
                let most = if matches!(storage, Storage::Q4(_)) { 7 } else { 127 };
                let mut level = |n: usize, dim: usize| -> Vec<f32> {
                    let mut x: Vec<f32> =
                        (0..n).map(|_| rng.between(0, 2 * most) as f32 / 16.0 - most as f32 / 16.0).collect();
                    for row in x.chunks_mut(dim) {
                        for g in row.chunks_mut(32) {
                            g[0] = most as f32 / 16.0;
                        }
                    }
                    x
                };
                let mut keys: Vec<Vec<f32>> = vec![vec![]; batch * kv_heads];
                let mut values = keys.clone();
                let mut scratch: Option<Scratch> = None;
                let mut worst = 0f64;
                for (step, n) in [5, 1, 1, 20, 1, 1, 7, 1].into_iter().enumerate() {
                    let k = level(batch * kv_heads * n * dim, dim);
                    let v = level(batch * kv_heads * n * vdim, vdim);
                    let q: Vec<f32> = level(batch * heads * n * dim, dim).iter().map(|x| x / 8.0).collect();
                    for z in 0..batch * kv_heads {
                        keys[z].extend(&k[z * n * dim..(z + 1) * n * dim]);
                        values[z].extend(&v[z * n * vdim..(z + 1) * n * vdim]);
                    }
                    let [kb, vb, qb] = [&k, &v, &q].map(|x| gpu.upload(x).unwrap());
                    let ob = gpu.buffer(4 * batch * heads * n * vdim).unwrap();
                    let view = |b, h, d| TensorView::new(b, DType::F32, [batch, h, n, d]);
                    let mut encoder = gpu.device().create_command_encoder(&Default::default());
                    let mut none = Scratch::new(gpu.device(), Default::default()).unwrap();
                    cache.advance(&mut encoder, Rows::All(n), scratch.as_mut().unwrap_or(&mut none)).unwrap();
                    cache
                        .append(
                            &mut encoder,
                            0,
                            &Append::new(view(&kb, kv_heads, dim), view(&vb, kv_heads, vdim)),
                            &mut none,
                        )
                        .unwrap();
                    let call = CachedForward::new(view(&qb, heads, dim), &cache, view(&ob, heads, vdim))
                        .mask(Mask::causal());
                    let mut s =
                        Scratch::new(gpu.device(), attention.scratch_size_cached(&call).unwrap()).unwrap();
                    attention.forward_cached(&mut encoder, &call, &mut s).unwrap();
                    gpu.queue().submit([encoder.finish()]);
                    let got: Vec<f32> = gpu.download(&ob, batch * heads * n * vdim).unwrap();
                    let len = keys[0].len() / dim;
                    let shape = Shape {
                        batch,
                        heads,
                        kv_heads,
                        q_len: n,
                        kv_len: len,
                        head_dim: dim,
                        value_dim: vdim,
                    };
                    let keep: Vec<bool> = (0..n * len)
                        .map(|x| {
                            let (i, j) = (x / len, x % len);
                            let p = len - n + i;
                            j <= p
                                && match layout {
                                    CacheLayout::Ring { sinks } => j < sinks || j + capacity >= len + sinks,
                                    _ => true,
                                }
                        })
                        .collect();
                    let mask: HostMask = Mask::none().keep(HostTensor::new(&keep, [1, 1, n, len]));
                    let options = Options { mask, ..Default::default() };
                    let [k, v] = [keys.concat(), values.concat()];
                    let want = reference::attention::<f64>(
                        &widen::<f64>(&q),
                        &widen::<f64>(&k),
                        &widen::<f64>(&v),
                        &shape,
                        &options,
                    )
                    .unwrap();
                    let error = got
                        .iter()
                        .zip(&want.out)
                        .map(|(a, b)| (f64::from(*a) - b).abs())
                        .fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a });
                    worst = worst.max(error);
                    assert!(error < 1e-4, "{tiling:?} {storage:?} {layout:?} step {step}: {error}");
                    scratch = Some(s);
                }
                crate::harness::say(&format!("{tiling:?} {storage:?} {layout:?}: {worst:e}"));
            }
        }
    }
}
