//! Caches whose values are the first channels of the keys.

use wgpu_attention::cache::{Append, Cache, CacheLayout, CacheRead, CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::position::RowPositions;
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::tuning::Target;
use wgpu_attention::{
    Attention, CacheConfig, Config, DType, Error, Forward, KernelOptions, Mask, Scratch, Shape, TensorView,
    wgpu,
};

use super::{LAYOUTS, STORAGES};
use crate::harness::case::{Judged, largest, widened};
use crate::harness::device::full;
use crate::harness::{FORMS, Report, Rng, due, rest};

const BATCH: usize = 2;
const HEADS: usize = 6;
/// Steps of all sequences: a prompt, then single tokens.
const STEPS: [usize; 4] = [9, 1, 1, 12];

fn view(buffer: &wgpu::Buffer, shape: [usize; 4]) -> TensorView<'_> {
    TensorView::new(buffer, DType::F32, shape)
}

/// Appends in steps, exchanges the sequences, overwrites rows, and attends after each step. Returns
/// the largest error over tolerance. The expected results are those of the rows that the cache
/// gives back.
fn outcome(config: CacheConfig, [head_dim, value_dim]: [usize; 2], form: Target) -> Result<f64, String> {
    let profile = full();
    profile.tidy();
    let gpu = &profile.gpu;
    let refused = |e: Error| format!("refused: {e}");
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config).map_err(refused)?;
    let options = KernelOptions::new().target(form);
    let attention = Config::new(HEADS, head_dim).kv_heads(1).value_dim(value_dim).kernel_options(options);
    let attention = Attention::with_pipelines(gpu.pipelines(), attention).map_err(refused)?;
    let mut rng = Rng::named("latent caches");
    let (mut length, mut worst) = (0, 0f64);
    for (step, rows) in STEPS.into_iter().enumerate() {
        length += rows;
        let shape = |heads, rows, dim| [BATCH, heads, rows, dim];
        let count = |shape: [usize; 4]| shape.iter().product::<usize>();
        let (k, q) =
            (rng.normals(count(shape(1, rows, head_dim))), rng.normals(count(shape(HEADS, rows, head_dim))));
        let [k_at, q_at] = [&k, &q].map(|x| gpu.upload(x).expect("room"));
        let [out_shape, k_shape, v_shape] =
            [shape(HEADS, rows, value_dim), shape(1, length, head_dim), shape(1, length, value_dim)];
        let [out_at, read_k, read_v] =
            [out_shape, k_shape, v_shape].map(|s| gpu.buffer(4 * count(s)).expect("room"));
        let appended = Append::latent(view(&k_at, shape(1, rows, head_dim)));
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        cache.advance(&mut encoder, Tokens::All(rows)).map_err(refused)?;
        cache.append(&mut encoder, 0, &appended).map_err(refused)?;
        if step == 1 {
            cache.overwrite(&mut encoder, 0, &appended, RowPositions::Start(3)).map_err(refused)?;
        }
        let call =
            Forward::with_cache(view(&q_at, shape(HEADS, rows, head_dim)), &cache, view(&out_at, out_shape));
        let call = call.mask(Mask::causal());
        let size = attention.scratch_size(&call).map_err(refused)?;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        attention.forward(&mut encoder, &call, &mut scratch).map_err(refused)?;
        cache
            .read(&mut encoder, 0, &CacheRead::new(view(&read_k, k_shape), view(&read_v, v_shape)))
            .map_err(refused)?;
        if step == 2 {
            cache.reorder(&mut encoder, &[1, 0]).map_err(refused)?;
        }
        gpu.queue().submit([encoder.finish()]);
        let read = |buffer, n| gpu.download::<f32>(buffer, n).map_err(refused);
        let (stored_k, stored_v) = (read(&read_k, count(k_shape))?, read(&read_v, count(v_shape))?);
        let got = read(&out_at, count(out_shape))?;
        for (k, v) in stored_k.chunks(head_dim).zip(stored_v.chunks(value_dim)) {
            if k[..value_dim].iter().zip(v).any(|(k, v)| (k - v).abs() > 1e-6 * k.abs().max(1.0)) {
                return Err(format!("the values {v:?} are not the first channels of {k:?}"));
            }
        }
        let shape = Shape {
            batch: BATCH,
            heads: HEADS,
            kv_heads: 1,
            q_len: rows,
            kv_len: length,
            head_dim,
            value_dim,
        };
        let options = Options::new().mask(Mask::causal());
        let exact =
            reference::attention::<f64>(&widen(&q), &widen(&stored_k), &widen(&stored_v), shape, &options);
        let naive = reference::attention::<f32>(&q, &stored_k, &stored_v, shape, &options).expect("it fits");
        let magnitude = largest(stored_v.iter().map(|x| f64::from(*x)));
        let judged = Judged::new(&widened(&naive.out, DType::F32), exact.expect("it fits").out, magnitude);
        let got: Vec<f64> = got.into_iter().map(f64::from).collect();
        worst = worst.max(judged.judge(&got).map_err(|e| format!("step {step}: {e}"))?);
    }
    Ok(worst)
}

/// Every storage, in layouts that keep all tokens. Channels that are no whole vectors, and
/// multi-head latent attention's.
#[test]
fn storages_and_layouts_match_their_rows() {
    let mut report = Report::new("latent caches");
    for (s, storage) in STORAGES.into_iter().enumerate() {
        for (l, (layout, capacity)) in LAYOUTS.into_iter().enumerate() {
            if matches!(layout, CacheLayout::Ring { .. }) {
                continue;
            }
            for (d, dims) in [[40, 22], [96, 64], [576, 512]].into_iter().enumerate() {
                let name = format!("{storage:?}, {layout:?}, {dims:?}");
                let form = FORMS[(s + l + d) % 2];
                // Every storage once, with the fewest channels.
                let always = d == 0 && l == 2 * (s % 2);
                if !(always || (s + l) % 3 == d && due(&name) || rest(&name)) {
                    continue;
                }
                let config = CacheConfig::new(1, dims[0], capacity).value_dim(dims[1]).batch(BATCH);
                let config = config.storage(storage).layout(layout).latent(true);
                // A product with a matrix too, if the channels permit it.
                let rotated = (dims[0] == 96 && l == 0).then_some(32);
                report.record(&name, &format!("{form:?}"), outcome(config.hadamard(rotated), dims, form));
            }
        }
    }
    report.finish();
}

/// Values take no memory.
#[test]
fn latent_rows_are_stored_once() {
    let config = CacheConfig::new(1, 576, 64).value_dim(512);
    for storage in [CacheStorage::F32, CacheStorage::F16, CacheStorage::Q8(ScaleGroup::Of(32))] {
        let config = config.storage(storage);
        let (apart, latent) = (config.token_bytes(), config.latent(true).token_bytes());
        assert_eq!(latent, storage.row_bytes(576));
        assert_eq!(apart, latent + storage.row_bytes(512));
    }
}

#[test]
fn wrong_calls_are_refused() {
    let gpu = &full().gpu;
    let config = CacheConfig::new(1, 40, 16).value_dim(24);
    let wrong = Cache::with_pipelines(gpu.pipelines(), config.value_dim(48).latent(true)).map(drop);
    assert!(matches!(wrong, Err(Error::Option { option: "value_dim", .. })), "{wrong:?}");
    let buffer = gpu.buffer(4 * 128).expect("room");
    let [k, v] = [40, 24].map(|dim| TensorView::new(&buffer, DType::F32, [1, 1, 1, dim]));
    for latent in [false, true] {
        let mut cache = Cache::with_pipelines(gpu.pipelines(), config.latent(latent)).expect("a cache");
        assert_eq!(*cache.config(), config.latent(latent));
        gpu.submit(|encoder| cache.advance(encoder, Tokens::All(1))).expect("room");
        for (append, right) in [(Append::new(k, v), !latent), (Append::latent(k), latent)] {
            let got = gpu.submit(|encoder| cache.append(encoder, 0, &append));
            assert_eq!(got.is_ok(), right, "{got:?}");
        }
    }
}
