//! `scripts/gpu cargo bench --bench attention`
//!
//! `kernels`: time on the device by timestamp queries, each result compared with the reference first; then the fastest run
//! beside the floors that the device's own ceilings set to what the problem must compute and move.
//! `record`: time on the host for recording a call that has been recorded before.

#[path = "common/ceilings.rs"]
mod ceilings;
#[path = "common/copy.rs"]
mod copy;
#[path = "common/device.rs"]
mod device;
#[path = "common/kernel.rs"]
mod kernel;
#[path = "common/layer.rs"]
mod layer;
#[path = "common/share.rs"]
mod share;
#[path = "common/timer.rs"]
mod timer;

use std::cell::OnceCell;
use std::time::{Duration, Instant};

use ceilings::Ceilings;
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use layer::Layer;
use share::Kind;
use timer::{Timer, noise};
use wgpu_attention::reference::{self, HostLinear, HostWeights, Options, compare::max_error, widen};
use wgpu_attention::{
    Attention, Config, DType, Forward, Gpu, HostMask, Linear, Mask, Path, Projection, ProjectionForward,
    Scratch, ScratchSize, Shape, TensorView,
};

/// A device, its clock, and its ceilings once they are asked for.
struct Bed {
    gpu: Gpu,
    fragments: Vec<u32>,
    timer: Timer,
    ceilings: OnceCell<Ceilings>,
}

/// What a kernel must do at least: compute, and move each tensor once.
#[derive(Clone, Copy)]
struct Work {
    flops: f64,
    bytes: f64,
}

impl Bed {
    fn new() -> Self {
        let (gpu, fragments) = device::open();
        let timer = Timer::new(&gpu).expect("timestamp queries");
        Bed { gpu, fragments, timer, ceilings: OnceCell::new() }
    }

    fn ceilings(&self) -> &Ceilings {
        self.ceilings.get_or_init(|| {
            let ceilings = Ceilings::measure(&self.gpu, &self.fragments, &self.timer);
            println!("\n{ceilings}");
            ceilings
        })
    }

    /// Times what `record` records on the device, and prints how far from the floors of `work` it is.
    fn bench(
        &self,
        group: &mut BenchmarkGroup<WallTime>,
        id: BenchmarkId,
        work: Work,
        mut record: impl FnMut(&mut wgpu::ComputePass),
    ) {
        let mut fastest: Option<Duration> = None;
        group.bench_function(id, |b| {
            b.iter_custom(|iterations| {
                let mut run = || {
                    let time = self.timer.time(&mut record);
                    fastest = Some(fastest.map_or(time, |fastest| fastest.min(time)));
                    time
                };
                (0..iterations).map(|_| run()).sum()
            });
        });
        // Not run: another was asked for.
        let Some(fastest) = fastest else { return };
        let share = |kind| self.ceilings().share(kind, work.flops, work.bytes, fastest.as_secs_f64() * 1e3);
        // No kernel here uses matrix units, whose floor says what they could gain.
        if let Some(share) = share(Kind::Plain) {
            println!("{:24}fastest: {share}", "");
        }
        if let Some(share) = share(Kind::Matrix) {
            println!("{:24}floor of matrix units: {:.3} ms", "", share.floor());
        }
    }
}

fn max_abs(x: &[f32]) -> f64 {
    x.iter().fold(0.0, |m, x| f64::from(x.abs()).max(m))
}

/// A wrong kernel has no time.
fn validate(what: &str, got: &[f32], want: &[f64]) {
    let error = max_error(&widen::<f64>(got), want) / max_abs(got).max(1e-30);
    assert!(error < 1e-5, "{what}: off by {error:e} of the largest element");
}

fn project(c: &mut Criterion, bed: &Bed) {
    let Bed { gpu, timer, .. } = bed;
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
            let want = reference::project::<f64>(&widen(&x), &weight, None, n, n).expect("it fits");
            validate("project", &gpu.download(&out, n * n).expect("out"), &want);
        }
        let layout = if transposed { "in,out" } else { "out,in" };
        let work = Work { flops: 2.0 * (n * n * n) as f64, bytes: 12.0 * (n * n) as f64 };
        group.throughput(Throughput::Elements(work.flops as u64));
        bed.bench(&mut group, BenchmarkId::new(layout, n), work, &mut record);
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

    /// Of those pairs that the mask shows, and of q, k, v and out.
    fn work(&self, pairs: f64) -> Work {
        let Shape { q_len, kv_len, .. } = self.shape;
        let tensors = [self.shape.q(), self.shape.k(), self.shape.v(), self.shape.out()];
        let bytes = tensors.iter().map(|s| 4 * s.iter().product::<usize>()).sum::<usize>() as f64;
        Work { flops: self.shape.flops() * pairs / (q_len * kv_len) as f64, bytes }
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

/// Pairs of queries with the last keys up to their own, of which they see `window` at most.
fn causal(length: usize, window: usize) -> f64 {
    (1..=length).map(|n| n.min(window)).sum::<usize>() as f64
}

/// Times a call on the device, once it has been compared with the reference. `elements` is what criterion counts.
fn time_call(
    group: &mut BenchmarkGroup<WallTime>,
    bed: &Bed,
    name: &str,
    bench: &Bench,
    path: Path,
    work: Work,
    elements: f64,
) {
    let Bed { gpu, timer, .. } = bed;
    let (attention, call) = (bench.operator(gpu, path), bench.call());
    let mut scratch =
        Scratch::new(gpu.device(), attention.scratch_size(&call).expect("size")).expect("scratch");
    let mut record = |pass: &mut wgpu::ComputePass| {
        attention.forward_in_pass(pass, &call, &mut scratch).expect("forward");
    };
    timer.time(&mut record);
    bench.validate(gpu, name);
    group.throughput(Throughput::Elements(elements as u64));
    bed.bench(group, BenchmarkId::from_parameter(name), work, &mut record);
}

fn attend(c: &mut Criterion, bed: &Bed) {
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
        for (name, shape, is_causal) in cases {
            let Shape { q_len, kv_len, .. } = shape;
            let (mask, pairs) = if is_causal {
                (Mask::causal(), causal(q_len, q_len))
            } else {
                (Mask::none(), (q_len * kv_len) as f64)
            };
            let bench = Bench::new(&bed.gpu, shape, mask);
            let work = bench.work(pairs);
            time_call(&mut group, bed, name, &bench, path, work, work.flops);
        }
    }
}

/// How time grows with length: one head, queries counted as elements, so that criterion prints queries per second.
fn scaling(c: &mut Criterion, bed: &Bed) {
    let gpu = &bed.gpu;
    let mut group = c.benchmark_group("scaling/fused");
    group.sample_size(10).measurement_time(Duration::from_secs(2));
    let full = Mask::none();
    let cases = [
        ("full", full, &[1024, 4096][..], (|n| (n * n) as f64) as fn(usize) -> f64),
        ("causal", Mask::causal(), &[1024, 4096], |n| causal(n, n)),
        ("window 256", Mask::causal().window(255, 0), &[1024, 4096, 16384], |n| causal(n, 256)),
    ];
    for (name, mask, lengths, pairs) in cases {
        for length in lengths {
            let bench = Bench::new(gpu, Shape::new(1, 1, *length, 64), mask);
            let (name, work) = (format!("{name} {length}"), bench.work(pairs(*length)));
            time_call(&mut group, bed, &name, &bench, Path::Fused, work, *length as f64);
        }
    }
    // No memory but q, k, v, out and the sums of a few splits.
    let long = Bench::new(gpu, Shape { q_len: 64, ..Shape::new(1, 1, 65536, 64) }, full);
    let size = long.operator(gpu, Path::Fused).scratch_size(&long.call()).expect("size").total();
    assert!(size <= 128 * 64 * (64 + 4) * 4, "{size} bytes");
    let work = long.work(64.0 * 65536.0);
    time_call(&mut group, bed, "64 queries, 65536 keys", &long, Path::Fused, work, 64.0);
}

fn layer(c: &mut Criterion, bed: &Bed) {
    let Bed { gpu, timer, .. } = bed;
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
    let bytes = 4.0 * (2 * x.len() + in_proj.len() + out_proj.len()) as f64;
    bed.bench(&mut group, BenchmarkId::from_parameter("512x512x8"), Work { flops, bytes }, |pass| {
        operator.forward_in_pass(pass, &call, &mut scratch).expect("forward");
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
    let bed = Bed::new();
    println!("device: {}", bed.gpu.device().adapter_info().name);
    project(c, &bed);
    attend(c, &bed);
    scaling(c, &bed);
    layer(c, &bed);
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1));
    targets = all
}
criterion_main!(benches);
