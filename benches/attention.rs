//! `scripts/gpu cargo bench --bench attention`
//!
//! `kernels`: time on the device by timestamp queries, each result compared with the reference first.
//! `record`: time on the host for recording a call that has been recorded before.

#[path = "common/layer.rs"]
mod layer;
#[path = "common/timer.rs"]
mod timer;

use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use layer::Layer;
use timer::{Timer, noise};
use wgpu_attention::reference::{self, HostLinear, HostWeights, Options, compare::max_error, widen};
use wgpu_attention::{
    Attention, Config, DType, Forward, Gpu, HostMask, Linear, Mask, Path, Projection, ProjectionForward,
    Scratch, ScratchSize, Shape, TensorView,
};

/// Runs a pass `iterations` times and adds up what the device says.
fn device_time(timer: &Timer, iterations: u64, mut record: impl FnMut(&mut wgpu::ComputePass)) -> Duration {
    (0..iterations).map(|_| timer.time(&mut record)).sum()
}

fn max_abs(x: &[f32]) -> f64 {
    x.iter().fold(0.0, |m, x| f64::from(x.abs()).max(m))
}

/// A wrong kernel has no time.
fn validate(what: &str, got: &[f32], want: &[f64]) {
    let error = max_error(&widen::<f64>(got), want) / max_abs(got).max(1e-30);
    assert!(error < 1e-5, "{what}: off by {error:e} of the largest element");
}

fn project(c: &mut Criterion, gpu: &Gpu, timer: &Timer) {
    let mut group = c.benchmark_group("kernels/project");
    for (n, transposed) in [(512, false), (512, true), (1024, false)] {
        let (x, w) = (noise(n * n, 1), noise(n * n, 2));
        let (bx, bw) = (gpu.upload(&x).expect("x"), gpu.upload(&w).expect("w"));
        let out = gpu.buffer(n * n * 4).expect("out");
        let matrix = TensorView::matrix(&bw, DType::F32, [n, n]);
        let weight = if transposed { matrix.transposed(2, 3) } else { matrix };
        let product = ProjectionForward {
            x: TensorView::sequence(&bx, DType::F32, [1, n, n]),
            linear: Linear { weight, bias: None },
            out: TensorView::sequence(&out, DType::F32, [1, n, n]),
            narrow: false,
        };
        let projection = Projection::with_pipelines(gpu.pipelines());
        let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
        let mut record = |pass: &mut wgpu::ComputePass| {
            projection.forward_in_pass(pass, &[product], &mut scratch).expect("forward");
        };
        timer.time(&mut record);
        if n == 512 {
            let stored: Vec<f64> = widen(&w);
            let weight: Vec<f64> =
                if transposed { (0..n * n).map(|i| stored[i % n * n + i / n]).collect() } else { stored };
            let want = reference::project::<f64>(&widen(&x), &weight, None, n, n);
            validate("project", &gpu.download(&out, n * n).expect("out"), &want);
        }
        let layout = if transposed { "in,out" } else { "out,in" };
        group.throughput(Throughput::Elements(2 * (n * n * n) as u64));
        group.bench_function(BenchmarkId::new(layout, n), |b| {
            b.iter_custom(|iterations| device_time(timer, iterations, &mut record));
        });
    }
}

/// An attention call with its buffers.
struct Bench {
    shape: Shape,
    mask: HostMask<'static>,
    inputs: [Vec<f32>; 3],
    buffers: [wgpu::Buffer; 3],
    out: wgpu::Buffer,
}

impl Bench {
    fn new(gpu: &Gpu, shape: Shape, mask: HostMask<'static>) -> Self {
        let size = |s: [usize; 4]| s.iter().product::<usize>();
        let inputs = [noise(size(shape.q()), 1), noise(size(shape.k()), 2), noise(size(shape.v()), 3)];
        let buffers = inputs.each_ref().map(|x| gpu.upload(x).expect("upload"));
        let out = gpu.buffer(size(shape.out()) * 4).expect("out");
        Bench { shape, mask, inputs, buffers, out }
    }

    fn operator(&self, gpu: &Gpu, path: Path) -> Attention {
        let Shape { heads, kv_heads, head_dim, .. } = self.shape;
        let config = Config::new(heads, head_dim).kv_heads(kv_heads).path(path);
        Attention::with_pipelines(gpu.pipelines(), config).expect("config")
    }

    fn call(&self) -> Forward<'_> {
        let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
        let [q, k, v] = &self.buffers;
        let (q, k, v) = (view(q, self.shape.q()), view(k, self.shape.k()), view(v, self.shape.v()));
        let mask = self.mask.try_map(|_, _| Err(()), |_, _| Err(()), |_, _| Err(()));
        Forward::new(q, k, v, view(&self.out, self.shape.out())).mask(mask.expect("no tensors"))
    }

    /// The last queries against the reference: aligned bottom-right, they see what they see among all.
    fn validate(&self, gpu: &Gpu, name: &str) {
        let Shape { batch, heads, q_len, value_dim, head_dim, .. } = self.shape;
        let rows = q_len.min(4);
        let last = |x: &[f32], dim: usize| -> Vec<f32> {
            x.chunks_exact(q_len * dim).flat_map(|head| &head[(q_len - rows) * dim..]).copied().collect()
        };
        let [q, k, v] = &self.inputs;
        let got: Vec<f32> = gpu.download(&self.out, batch * heads * q_len * value_dim).expect("out");
        let options = Options { mask: self.mask, ..Default::default() };
        let shape = Shape { q_len: rows, ..self.shape };
        let want =
            reference::attention::<f64>(&widen(&last(q, head_dim)), &widen(k), &widen(v), &shape, &options);
        validate(name, &last(&got, value_dim), &want.expect("reference").out);
    }
}

/// Times a call on the device, once it has been compared with the reference; adds the time per pair.
fn time_call(
    group: &mut BenchmarkGroup<WallTime>,
    gpu: &Gpu,
    timer: &Timer,
    name: &str,
    bench: &Bench,
    path: Path,
    flops: f64,
) {
    let (attention, call) = (bench.operator(gpu, path), bench.call());
    let mut scratch =
        Scratch::new(gpu.device(), attention.scratch_size(&call).expect("size")).expect("scratch");
    let mut record = |pass: &mut wgpu::ComputePass| {
        attention.forward_in_pass(pass, &call, &mut scratch).expect("forward");
    };
    timer.time(&mut record);
    bench.validate(gpu, name);
    group.throughput(Throughput::Elements(flops as u64));
    group.bench_function(name, |b| {
        b.iter_custom(|iterations| device_time(timer, iterations, &mut record));
    });
}

fn attend(c: &mut Criterion, gpu: &Gpu, timer: &Timer) {
    let decode = Shape { kv_heads: 8, q_len: 1, ..Shape::new(1, 32, 4096, 128) };
    let cases = [
        ("1x8x512x64", Shape::new(1, 8, 512, 64), false),
        ("1x8x512x64 causal", Shape::new(1, 8, 512, 64), true),
        ("1x8x1024x64", Shape::new(1, 8, 1024, 64), false),
        ("1x8x1024x64 causal", Shape::new(1, 8, 1024, 64), true),
        ("1x8x1024x128 causal", Shape::new(1, 8, 1024, 128), true),
        ("8x12x128x64", Shape::new(8, 12, 128, 64), false),
        ("decode 1x32(8)x4096x128", decode, false),
    ];
    for (path, name) in [(Path::Staged, "kernels/staged"), (Path::Fused, "kernels/fused")] {
        let mut group = c.benchmark_group(name);
        for (name, shape, causal) in cases {
            let mask = if causal { Mask::causal() } else { Mask::none() };
            let flops = shape.flops() / if causal { 2.0 } else { 1.0 };
            let bench = Bench::new(gpu, shape, mask);
            time_call(&mut group, gpu, timer, name, &bench, path, flops);
        }
    }
}

/// How time grows with length: one head, queries counted as elements, so that criterion prints queries per second.
fn scaling(c: &mut Criterion, gpu: &Gpu, timer: &Timer) {
    let mut group = c.benchmark_group("scaling/fused");
    group.sample_size(10).measurement_time(Duration::from_secs(2));
    let full = Mask::none();
    let cases = [
        ("full", full, &[1024, 4096][..]),
        ("causal", Mask::causal(), &[1024, 4096]),
        ("window 256", Mask::causal().window(255, 0), &[1024, 4096, 16384]),
    ];
    for (name, mask, lengths) in cases {
        for length in lengths {
            let bench = Bench::new(gpu, Shape::new(1, 1, *length, 64), mask);
            let name = format!("{name} {length}");
            time_call(&mut group, gpu, timer, &name, &bench, Path::Fused, *length as f64);
        }
    }
    // No memory but q, k, v, out and the sums of a few splits.
    let long = Bench::new(gpu, Shape { q_len: 64, ..Shape::new(1, 1, 65536, 64) }, full);
    let size = long.operator(gpu, Path::Fused).scratch_size(&long.call()).expect("size").total();
    assert!(size <= 128 * 64 * (64 + 4) * 4, "{size} bytes");
    time_call(&mut group, gpu, timer, "64 queries, 65536 keys", &long, Path::Fused, 64.0);
}

fn layer(c: &mut Criterion, gpu: &Gpu, timer: &Timer) {
    let (length, embed, heads) = (512, 512, 8);
    let scale = |x: Vec<f32>| x.iter().map(|x| x / (embed as f32).sqrt()).collect::<Vec<f32>>();
    let x = noise(length * embed, 1);
    let (in_proj, out_proj) = (scale(noise(3 * embed * embed, 2)), scale(noise(embed * embed, 3)));
    let layer = Layer::new(gpu, heads, [&x, &in_proj, &out_proj], length, false);
    let operator = layer.operator(gpu);
    let call = layer.call();
    let mut scratch =
        Scratch::new(gpu.device(), operator.scratch_size(&call).expect("size")).expect("scratch");
    timer.time(|pass| operator.forward_in_pass(pass, &call, &mut scratch).expect("forward"));

    let (x64, in64, out64) = (widen::<f64>(&x), widen::<f64>(&in_proj), widen::<f64>(&out_proj));
    let part = |n: usize| HostLinear { weight: &in64[n * embed * embed..][..embed * embed], bias: None };
    let weights = HostWeights {
        query: part(0),
        key: part(1),
        value: part(2),
        out: HostLinear { weight: &out64, bias: None },
        appended: None,
    };
    let shape = reference::LayerShape { batch: 1, q_len: length, kv_len: length };
    let want = reference::multi_head([&x64[..]; 3], shape, &layer.config, &weights, &Options::default());
    let got: Vec<f32> = gpu.download(&layer.y, x.len()).expect("y");
    validate("layer", &got, &want.expect("reference").out);

    let flops = 8.0 * (length * embed * embed) as f64 + layer.config.shape(1, length, length, 0).flops();
    let mut group = c.benchmark_group("kernels/layer");
    group.throughput(Throughput::Elements(flops as u64));
    group.bench_function("512x512x8", |b| {
        b.iter_custom(|iterations| {
            device_time(timer, iterations, |pass| {
                operator.forward_in_pass(pass, &call, &mut scratch).expect("forward");
            })
        });
    });
    drop(group);

    let mut group = c.benchmark_group("record");
    group.bench_function("layer 512x512x8", |b| {
        b.iter_custom(|iterations| {
            let mut total = Duration::ZERO;
            for _ in 0..iterations {
                let mut encoder = gpu.device().create_command_encoder(&Default::default());
                let start = Instant::now();
                operator.forward(&mut encoder, &call, &mut scratch).expect("forward");
                total += start.elapsed();
                drop(encoder);
            }
            total
        });
    });
    let size = 8 * 512 * 64;
    let buffers = [1, 2, 3].map(|seed| gpu.upload(&noise(size, seed)).expect("upload"));
    let out = gpu.buffer(size * 4).expect("out");
    let view = |buffer| TensorView::new(buffer, DType::F32, [1, 8, 512, 64]);
    let call = Forward::new(view(&buffers[0]), view(&buffers[1]), view(&buffers[2]), view(&out));
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(8, 64)).expect("config");
    let mut scratch =
        Scratch::new(gpu.device(), attention.scratch_size(&call).expect("size")).expect("scratch");
    group.bench_function("attention 1x8x512x64", |b| {
        b.iter_custom(|iterations| {
            let mut total = Duration::ZERO;
            for _ in 0..iterations {
                let mut encoder = gpu.device().create_command_encoder(&Default::default());
                let start = Instant::now();
                attention.forward(&mut encoder, &call, &mut scratch).expect("forward");
                total += start.elapsed();
                drop(encoder);
            }
            total
        });
    });
}

fn all(c: &mut Criterion) {
    let gpu = Gpu::new().expect("a device");
    println!("device: {}", gpu.device().adapter_info().name);
    let timer = Timer::new(&gpu).expect("timestamp queries");
    project(c, &gpu, &timer);
    attend(c, &gpu, &timer);
    scaling(c, &gpu, &timer);
    layer(c, &gpu, &timer);
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1));
    targets = all
}
criterion_main!(benches);
