//! A device is lost while operators, caches and scratch live on it. Every call that needs the
//! device returns an error, none panics, and none waits forever.

use wgpu_attention::attention::{Merge, MergeForward, Partial};
use wgpu_attention::cache::{Append, CacheRead, Tokens};
use wgpu_attention::mask::Blocks;
use wgpu_attention::position::{
    AddPositions, PositionTable, Positions, Rope, RopeConfig, Rotate, Rotation, RowPositions, Sinusoid,
};
use wgpu_attention::reference::Attended;
use wgpu_attention::{Cache, CacheConfig, Forward, KernelOptions};

use super::*;

const CACHED: Shape = Shape { kv_len: 8, ..SHAPE };

/// Every kind of object on a device, made before the loss.
struct Bed {
    gpu: Gpu,
    attention: Attention,
    layer: MultiHeadAttention,
    cache: Cache,
    paged: Cache,
    rope: Rope,
    sinusoid: Sinusoid,
    buffers: [wgpu::Buffer; 4],
    scratch: Scratch,
}

fn layer_config() -> MultiHeadConfig {
    MultiHeadConfig::new(8, 2)
}

fn linear(buffer: &wgpu::Buffer) -> Linear<'_> {
    Linear { weight: TensorView::matrix(buffer, DType::F32, [8, 8]), bias: None }
}

fn weights(buffer: &wgpu::Buffer) -> MultiHeadWeights<'_> {
    let linear = linear(buffer);
    MultiHeadWeights {
        query: linear,
        key: linear,
        value: linear,
        out: linear,
        bias_kv: None,
        qk_norm: None,
        gate: None,
    }
}

fn cache_config() -> CacheConfig {
    CacheConfig::new(CACHED.kv_heads, CACHED.head_dim, CACHED.kv_len)
        .batch(CACHED.batch)
        .value_dim(CACHED.value_dim)
}

impl Bed {
    fn new() -> Self {
        let gpu = device(|_| ());
        let config = Config::of(&SHAPE);
        let attention = Attention::with_pipelines(
            gpu.pipelines(),
            config.kernel_options(KernelOptions::new().algorithm(Algorithm::Staged)),
        )
        .expect("an operator");
        let buffers = [0.3, 0.5, 0.7, 0.9].map(|seed| gpu.upload(&noise(1024, seed)).expect("an upload"));
        let layer =
            MultiHeadAttention::with_pipelines(gpu.pipelines(), layer_config(), &weights(&buffers[1]));
        let mut cache = Cache::with_pipelines(gpu.pipelines(), cache_config()).expect("a cache");
        let layout = wgpu_attention::cache::CacheLayout::Paged { page: 16, pages: 4 };
        let mut paged =
            Cache::with_pipelines(gpu.pipelines(), cache_config().layout(layout)).expect("a cache");
        gpu.submit(|e| cache.advance(e, Tokens::All(SHAPE.q_len))).expect("room");
        gpu.submit(|e| paged.advance(e, Tokens::All(SHAPE.q_len))).expect("room");
        let rope = Rope::new(gpu.device(), RopeConfig::new(4)).expect("a rope");
        let sinusoid = Sinusoid::new(gpu.device(), 8, 10000.0).expect("a sinusoid");
        let layer = layer.expect("a layer");
        let size = attention.scratch_size(&parts(buffers.each_ref()).forward()).expect("a size");
        let size = size.max(layer.scratch_size(&layer_call(&buffers)).expect("a size"));
        let scratch = Scratch::new(gpu.device(), size).expect("scratch");
        Bed { gpu, attention, layer, cache, paged, rope, sinusoid, buffers, scratch }
    }
}

fn layer_call(buffers: &[wgpu::Buffer; 4]) -> MultiHeadForward<'_> {
    let view = |n: usize| TensorView::sequence(&buffers[n], DType::F32, [1, 3, 8]);
    MultiHeadForward::self_attention(view(0), view(3))
}

/// Requires an error that reports the lost device.
fn says<T>(context: &str, result: Result<T, Error>) {
    match result {
        Err(error) => {
            assert_eq!(read(context, &error, &["lost"]), "DeviceLost", "{context}");
        }
        Ok(_) => panic!("{context}: accepted on a device that is lost"),
    }
}

#[test]
fn every_call_on_a_lost_device_is_refused() {
    let bed = Bed::new();
    let Bed { gpu, attention, layer, mut cache, mut paged, rope, sinusoid, buffers, mut scratch } = bed;
    let scratch = &mut scratch;
    let (device, pipelines) = (gpu.device().clone(), gpu.pipelines().clone());
    let mut encoder = device.create_command_encoder(&Default::default());
    device.destroy();

    let config = Config::of(&SHAPE);
    let good = parts(buffers.each_ref());
    let call = good.forward();
    let fused = Attention::with_pipelines(&pipelines, config).expect("nothing is made yet");
    says("fused", fused.forward(&mut encoder, &call, scratch));
    says("staged", attention.forward(&mut encoder, &call, scratch));
    says("prepare", attention.prepare(&call, scratch));
    says(
        "in a pass",
        attention.forward(&mut encoder.begin_compute_pass(&Default::default()), &call, scratch),
    );
    let size = attention.scratch_size(&call).expect("a matter of numbers");
    says("scratch", Scratch::new(&device, size));
    says("layer", layer.forward(&mut encoder, &layer_call(&buffers), scratch));
    says("prepare", layer.prepare(&layer_call(&buffers), scratch));
    let map = TensorView::new(&buffers[3], DType::U32, [1, 1, 1, 1]);
    let blocks = Blocks::new(map, [8, 8]);
    says("classify", attention.classify(&mut encoder, &Mask::causal(), [2, 3, 5], &blocks));

    let heads = |n: usize| TensorView::new(&buffers[n], DType::F32, [1, 2, 3, 8]);
    let product = wgpu_attention::matmul::ProjectionForward::new(
        TensorView::sequence(&buffers[0], DType::F32, [1, 3, 8]),
        Linear { weight: TensorView::matrix(&buffers[1], DType::F32, [16, 8]), bias: None },
        heads(3),
    );
    says("projection", Projection::with_pipelines(&pipelines).forward(&mut encoder, &[product]));
    let lse = |n: usize| TensorView::new(&buffers[n], DType::F32, [1, 2, 3, 1]);
    let (part, whole) = (Partial { out: heads(0), lse: lse(1) }, Partial { out: heads(3), lse: lse(2) });
    says(
        "merge",
        Merge::with_pipelines(&pipelines).forward(&mut encoder, &MergeForward::new(&[part], whole)),
    );
    let positions = Positions::with_pipelines(&pipelines);
    let rotation = Rotate::new(heads(0), Rotation::Rope(&rope), RowPositions::Start(0)).out(heads(3));
    says("rotate", positions.rotate(&mut encoder, &rotation));
    let table = PositionTable::Sinusoid(&sinusoid);
    let sum = AddPositions::new(heads(0), table, RowPositions::Start(0)).out(heads(3));
    says("add", positions.add(&mut encoder, &sum));
    says("a rope", Rope::new(&device, RopeConfig::new(4)));
    says("a sinusoid", Sinusoid::new(&device, 8, 10000.0));

    says("a cache", Cache::with_pipelines(&pipelines, cache_config()));
    let rows = Shape { kv_len: SHAPE.q_len, ..SHAPE };
    let k = TensorView::new(&buffers[0], DType::F32, rows.k());
    let v = TensorView::new(&buffers[1], DType::F32, rows.v());
    says("append", cache.append(&mut encoder, 0, &Append::new(k, v)));
    says("read", cache.read(&mut encoder, 0, &CacheRead::new(k, v)));
    let at = RowPositions::Start(0);
    says("overwrite", cache.overwrite(&mut encoder, 0, &Append::new(k, v), at));
    let cached = Forward::with_cache(good.q, &cache, good.out);
    says("cached", fused.forward(&mut encoder, &cached, scratch));
    says("prepare", fused.prepare(&cached, scratch));
    let before = cache.len_bounds(0);
    says("advance", cache.advance(&mut encoder, Tokens::All(1)));
    says("advance", cache.advance(&mut encoder, Tokens::Each(&[1, 2])));
    says("rewind", cache.rewind(&mut encoder, Tokens::All(1)));
    assert_eq!(cache.len_bounds(0), before, "a refusal moves nothing");
    // Changes that only the host makes still work. They are not recorded.
    paged.fork(0, 1).expect("pages are the host's");
    paged.truncate(0, 1).expect("lengths are the host's");
    says("flush", paged.flush(&mut encoder));
    says("advance", paged.advance(&mut encoder, Tokens::All(1)));

    says("buffer", gpu.buffer(64));
    says("upload", gpu.upload(&[1.0f32; 4]));
    says("upload", gpu.upload_bools(&[true; 4]));
    says("download", gpu.download::<f32>(&buffers[0], 4));
    let [q, k, v] = [SHAPE.q(), SHAPE.k(), SHAPE.v()].map(|s| noise(count(s), 0.3));
    says("attend", gpu.attend(&q, &k, &v, SHAPE, Mask::none()));
    says::<Attended<f32>>("attention", gpu.attention(&q, &k, &v, SHAPE, &Options::default()));
    let x = noise(64, 0.3);
    let host = HostLinear { weight: &x[..], bias: None };
    let host = HostWeights {
        query: host,
        key: host,
        value: host,
        out: host,
        bias_kv: None,
        qk_norm: None,
        gate: None,
    };
    let shape = MultiHeadShape { batch: 1, q_len: 3, kv_len: 3 };
    let inputs = [&x[..24]; 3];
    says("multi_head", gpu.multi_head(inputs, shape, &layer_config(), &host, &Options::default()));
    says("submit", gpu.submit(|_| Ok(())));
    // The encoder can still be finished.
    gpu.queue().submit([encoder.finish()]);
    drop((cache, paged, layer));
}

/// An encoder that began before the loss can still be finished, like wgpu's own. New calls are
/// refused.
#[test]
fn recording_survives_device_loss() {
    let Bed { gpu, attention, mut cache, buffers, mut scratch, .. } = Bed::new();
    let good = parts(buffers.each_ref());
    let call = good.forward();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    attention.forward(&mut encoder, &call, &mut scratch).expect("the device is there");
    cache.advance(&mut encoder, Tokens::All(1)).expect("the device is there");
    gpu.device().destroy();
    attention.forward(&mut encoder, &call, &mut scratch).expect("it makes nothing new");
    let short = Parts { k: good.k.slice(2, 0, 2), v: good.v.slice(2, 0, 2), ..good }.forward();
    says("another call", attention.forward(&mut encoder, &short, &mut scratch));
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        says("in a pass", attention.forward(&mut pass, &short, &mut scratch));
    }
    let scope = gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
    gpu.queue().submit([encoder.finish()]);
    let _ = pollster::block_on(scope.pop());
    let _ = gpu.device().poll(wgpu::PollType::wait_indefinitely());
    says("a read-back", gpu.download::<f32>(&buffers[3], 4));
    says("scratch", Scratch::new(gpu.device(), scratch.size()));

    // The loss does not affect another device.
    Bench::on(&device(|_| ()), Config::new(SHAPE.heads, SHAPE.head_dim)).works("a separate device");
}
