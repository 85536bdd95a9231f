//! Memory that runs out causes an error, and every object works as before.
//!
//! Software drivers grant every allocation. In their place wgpu can refuse, from a share of the
//! machine's memory on. Here that share is a little above the memory in use. The test allocates and
//! releases the rest. It runs in a separate process.

use std::time::{Duration, Instant};

use wgpu_attention::cache::{Append, Tokens};
use wgpu_attention::position::{Positions, Rope, RopeConfig, Rotate, Rotation, RowPositions};
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Error, Forward, Gpu, KernelOptions, Mask, Scratch, Shape,
    TensorView,
};

const SHAPE: Shape = Shape::new(1, 2, 5, 4);

/// Makes a device that gets at most `share` percent of the machine's memory.
fn within(share: u8) -> Option<Gpu> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    descriptor.memory_budget_thresholds.for_resource_creation = Some(share);
    let instance = wgpu::Instance::new(descriptor);
    let adapter = pollster::block_on(instance.request_adapter(&Default::default())).ok()?;
    let limits = wgpu::Limits { max_buffer_size: adapter.limits().max_buffer_size, ..Default::default() };
    let descriptor = wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).ok()?;
    Some(Gpu::with_device(device, queue))
}

fn works(gpu: &Gpu) {
    let x: Vec<f32> = (0..40).map(|n| (n as f32).sin()).collect();
    let got = gpu.attend(&x, &x, &x, SHAPE, Mask::causal()).expect("room for forty numbers");
    let wide = widen::<f64>(&x);
    let options = Options::new().mask(Mask::causal());
    let want = reference::attention(&wide, &wide, &wide, SHAPE, &options).expect("a truth").out;
    assert!(got.iter().zip(want).all(|(g, w)| (f64::from(*g) - w).abs() < 1e-5), "{got:?}");
}

fn refused<T>(what: &str, result: Result<T, Error>) {
    match result {
        Err(Error::OutOfMemory { .. }) => {}
        Err(error) => panic!("{what}: {error}"),
        Ok(_) => panic!("{what}: there was memory"),
    }
}

const MIB: usize = 1 << 20;

#[test]
fn exhausted_memory_is_an_error() {
    // The room must be far from both ends, because other processes allocate meanwhile. It is nearer
    // to the far end, because systems count released memory late.
    let fits = |gpu: &Gpu, mib: usize| gpu.buffer(mib * MIB).is_ok();
    let devices = (1..100).filter_map(within).skip_while(|gpu| !fits(gpu, 800));
    let Some(gpu) = devices.take_while(|gpu| !fits(gpu, 2000)).last() else {
        eprintln!("memory that runs out: skipped, this driver does not tell wgpu how much of it is in use");
        return;
    };
    works(&gpu);
    let (device, pipelines) = (gpu.device(), gpu.pipelines());
    let config = Config::new(2, 4);
    let fused = Attention::with_pipelines(pipelines, config).expect("an operator");
    let staged = Attention::with_pipelines(
        pipelines,
        config.kernel_options(KernelOptions::new().algorithm(Algorithm::Staged)),
    )
    .expect("an operator");
    let buffers = [0; 4].map(|_| gpu.upload(&[0.5f32; 64]).expect("an upload"));
    let [q, k, v, out] = buffers.each_ref().map(|b| TensorView::new(b, DType::F32, SHAPE.q()));
    let call = Forward::new(q, k, v, out);
    let size = staged.scratch_size(&call).expect("a size");
    let mut scratch = Scratch::new(device, size).expect("scratch");
    let cached = CacheConfig::new(2, 4, 64).layers(2);
    let mut cache = Cache::with_pipelines(pipelines, cached).expect("a cache");
    gpu.submit(|e| cache.advance(e, Tokens::All(5))).expect("room");
    let rope = Rope::new(device, RopeConfig::new(4)).expect("a rope");
    let rotation = Rotate::new(q, Rotation::Rope(&rope), RowPositions::Start(0)).out(out);

    let ballast = std::hint::black_box(vec![1u8; 2800 * MIB]);
    let mut encoder = device.create_command_encoder(&Default::default());
    refused("a buffer", gpu.buffer(64));
    refused("an upload", gpu.upload(&[1.0f32; 4]));
    refused("a read-back", gpu.download::<f32>(&buffers[0], 4));
    refused("attend", gpu.attend(&[0.0; 40], &[0.0; 40], &[0.0; 40], SHAPE, Mask::none()));
    refused("scratch", Scratch::new(device, size));
    refused("a cache", Cache::with_pipelines(pipelines, cached));
    refused("a rope", Rope::new(device, RopeConfig::new(64)));
    refused("fused", fused.forward(&mut encoder, &call, &mut scratch));
    refused("staged", staged.forward(&mut encoder, &call, &mut scratch));
    refused("rotate", Positions::with_pipelines(pipelines).rotate(&mut encoder, &rotation));
    refused("append", cache.append(&mut encoder, 0, &Append::new(k, v)));
    refused("advance", cache.advance(&mut encoder, Tokens::Each(&[3])));
    cache.truncate(0, 2).expect("lengths are the host's");
    refused("flush", cache.flush(&mut encoder));
    refused("rewind", cache.rewind(&mut encoder, Tokens::All(1)));
    assert_eq!(cache.len(0), Some(2), "a refusal moves nothing");
    drop(ballast);
    // Systems count released memory a little later.
    let room = || gpu.buffer(800 * MIB).is_ok();
    let since = Instant::now();
    while !room() && since.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(100));
    }

    // The same calls in the same encoder, on the same objects.
    fused.forward(&mut encoder, &call, &mut scratch).expect("room");
    staged.forward(&mut encoder, &call, &mut scratch).expect("room");
    cache.advance(&mut encoder, Tokens::Each(&[5])).expect("room");
    cache.append(&mut encoder, 1, &Append::new(k, v)).expect("room");
    gpu.queue().submit([encoder.finish()]);
    assert_eq!(gpu.download::<f32>(&buffers[3], 40).expect("a read-back"), [0.5; 40]);
    assert_eq!(cache.len(0), Some(7));
    works(&gpu);
}
