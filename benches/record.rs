//! `scripts/gpu cargo bench -p benches --bench record [-- [FILTER] [--quick]]`
//!
//! Measures the host's cost of recording a call that was recorded before: time and allocations. It
//! compares the cost with wgpu alone, for as many passes and dispatches. Each call is submitted
//! once, and its result is compared with the reference first.

use std::time::Instant;

use common::bed::{Bed, median};
use common::kernel::{Kernel, uniform};
use common::layer::Layer;
use common::problem::{Case, Problem, Rule, Way, compare_attention, read};
use common::product::Product;
use common::rows::{append, dtype_name, of_attention, row};
use common::settings;
use common::timer::noise;
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main};
use rows::Row;
use support::allocations::{Counting, allocations};
use wgpu_attention::cache::{Append, Tokens};
use wgpu_attention::reference::Options;
use wgpu_attention::reference::compare::{Difference, Mismatch};
use wgpu_attention::tuning::MatrixUnits;
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Forward, Gpu, Mask, Recorder, Scratch, Shape, TensorView,
    wgpu,
};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Records a call. If it must be undone before the next recording, it undoes it, which is not
/// timed.
trait Call {
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder);

    fn undo(&mut self, _encoder: &mut wgpu::CommandEncoder) {}

    /// Checks the device's result of one recording.
    fn judge(&self, gpu: &Gpu) -> Result<Difference, Mismatch>;
}

/// The passes and dispatches of a recording.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Parts {
    passes: usize,
    dispatches: usize,
}

/// The cost of a recording, in steady state.
#[derive(Clone, Copy)]
struct Cost {
    us: f64,
    /// The time of `encoder.finish()`, in which wgpu validates the recording.
    finish_us: f64,
    allocations: usize,
}

impl Cost {
    fn row(&self, row: Row) -> Row {
        Row { host_us: Some(self.us), allocations: Some(self.allocations as f64), ..row }
    }
}

fn encoder(gpu: &Gpu) -> wgpu::CommandEncoder {
    gpu.device().create_command_encoder(&Default::default())
}

fn cost(
    bed: &Bed,
    group: &mut BenchmarkGroup<WallTime>,
    id: &str,
    call: &mut dyn FnMut(&mut wgpu::CommandEncoder),
    undo: &mut dyn FnMut(&mut wgpu::CommandEncoder),
) -> Option<Cost> {
    let (mut times, mut finished) = (Vec::new(), Vec::new());
    group.bench_function(id, |b| {
        b.iter_custom(|iterations| {
            let mut run = || {
                let mut encoder = self::encoder(&bed.gpu);
                let start = Instant::now();
                call(&mut encoder);
                let time = start.elapsed();
                let start = Instant::now();
                drop(encoder.finish());
                finished.push(start.elapsed().as_secs_f64() * 1e6);
                undo(&mut self::encoder(&bed.gpu));
                times.push(time.as_secs_f64() * 1e6);
                time
            };
            (0..iterations).map(|_| run()).sum()
        });
    });
    let (us, finish_us) = (median(times)?, median(finished)?);
    // Lists sometimes grow.
    let allocations = (0..9).map(|_| {
        let mut encoder = self::encoder(&bed.gpu);
        let count = allocations(|| call(&mut encoder));
        undo(&mut encoder);
        count
    });
    Some(Cost { us, finish_us, allocations: allocations.min()? })
}

/// Dispatches of an empty kernel with as many bindings as attention: parameters, q, k, v and out.
struct Bare {
    kernel: Kernel,
    known: Vec<(Parts, Cost)>,
}

impl Bare {
    fn new(gpu: &Gpu) -> Self {
        let text = "@group(0) @binding(0) var<uniform> p: vec4<f32>;
            @group(0) @binding(1) var<storage, read> q: array<f32>;
            @group(0) @binding(2) var<storage, read> k: array<f32>;
            @group(0) @binding(3) var<storage, read> v: array<f32>;
            @group(0) @binding(4) var<storage, read_write> out: array<f32>;
            @compute @workgroup_size(1) fn main() { out[0] = p.x + q[0] + k[0] + v[0]; }";
        let [q, k, v, out] = [0; 4].map(|_| gpu.buffer(16).expect("a buffer"));
        Bare { kernel: Kernel::new(gpu, text, &[&uniform(gpu), &q, &k, &v, &out]), known: Vec::new() }
    }

    fn cost(&mut self, bed: &Bed, group: &mut BenchmarkGroup<WallTime>, parts: Parts) -> Option<Cost> {
        if let Some((_, cost)) = self.known.iter().find(|(known, _)| *known == parts) {
            return Some(*cost);
        }
        let Parts { passes, dispatches } = parts;
        let kernel = &self.kernel;
        let mut record = |encoder: &mut wgpu::CommandEncoder| {
            for n in 0..passes {
                let mut pass = encoder.begin_compute_pass(&Default::default());
                // The last pass has the remaining dispatches.
                let more = if n + 1 == passes { dispatches % passes } else { 0 };
                (0..dispatches / passes + more).for_each(|_| kernel.dispatch(&mut pass, [1, 1]));
            }
        };
        let name = format!("wgpu alone, passes {passes}, dispatches {dispatches}");
        let cost = cost(bed, group, &name, &mut record, &mut |_| ())?;
        append(&cost.row(row(&bed.gpu, "record", &name)));
        self.known.push((parts, cost));
        Some(cost)
    }
}

/// Submits one recording and checks its result, then measures later recordings. `make` returns the
/// call, which records `passes`, and its row.
fn bench<C: Call>(
    bed: &Bed,
    group: &mut BenchmarkGroup<WallTime>,
    bare: &mut Bare,
    id: &str,
    passes: usize,
    row: Row,
    make: impl FnOnce() -> C,
) {
    let mut call = make();
    // The first recording binds every dispatch.
    let bind_groups =
        || bed.instance.generate_report().map(|report| report.hub.bind_groups.num_kept_from_user);
    let before = bind_groups();
    let submit = |record: &mut dyn FnMut(&mut wgpu::CommandEncoder)| {
        let mut encoder = self::encoder(&bed.gpu);
        record(&mut encoder);
        bed.gpu.queue().submit([encoder.finish()]);
    };
    submit(&mut |encoder| call.record(encoder));
    let dispatches = before.zip(bind_groups()).map(|(before, after)| after - before);
    call.judge(&bed.gpu).unwrap_or_else(|wrong| panic!("{id} computes something else: {wrong}"));
    submit(&mut |encoder| call.undo(encoder));

    let call = std::cell::RefCell::new(call);
    let mut record = |encoder: &mut wgpu::CommandEncoder| call.borrow_mut().record(encoder);
    let mut undo = |encoder: &mut wgpu::CommandEncoder| call.borrow_mut().undo(encoder);
    let Some(cost) = cost(bed, group, id, &mut record, &mut undo) else { return };
    append(&cost.row(row));
    let Cost { us, finish_us, allocations } = cost;
    println!("{:24}{us:.2} µs and {allocations} allocations; {finish_us:.2} µs to finish the encoder", "");
    let Some(dispatches) = dispatches else {
        return println!("{:24}dispatches are not known: not compared with wgpu alone", "");
    };
    if let Some(alone) = bare.cost(bed, group, Parts { passes, dispatches }) {
        println!(
            "{:24}{id}: {:.2} µs and {} allocations are not wgpu's, which takes {:.2} µs and {} for {passes} passes \
             and {dispatches} dispatches, {:.2} µs to finish",
            "",
            us - alone.us,
            allocations as i64 - alone.allocations as i64,
            alone.us,
            alone.allocations,
            alone.finish_us,
        );
    }
}

struct Attend {
    problem: Problem,
    attention: Attention,
    scratch: Scratch,
}

impl Call for Attend {
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder) {
        self.attention.forward(encoder, &self.problem.call(), &mut self.scratch).expect("a recording");
    }

    fn judge(&self, gpu: &Gpu) -> Result<Difference, Mismatch> {
        self.problem.judge(gpu)
    }
}

struct Project {
    product: Product,
    projection: wgpu_attention::Projection,
}

impl Call for Project {
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder) {
        let products = [self.product.call()];
        self.projection.forward(encoder, &products).expect("a recording");
    }

    fn judge(&self, gpu: &Gpu) -> Result<Difference, Mismatch> {
        self.product.judge(gpu)
    }
}

struct WholeLayer {
    layer: Layer,
    operator: wgpu_attention::MultiHeadAttention,
    scratch: Scratch,
}

impl Call for WholeLayer {
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder) {
        self.operator.forward(encoder, &self.layer.call(), &mut self.scratch).expect("a recording");
    }

    fn judge(&self, gpu: &Gpu) -> Result<Difference, Mismatch> {
        self.layer.judge(gpu)
    }
}

/// One token at the end of a cache. The cache makes room and appends the key and value, and the
/// query attends to all keys.
struct Step {
    shape: Shape,
    data: [Vec<f32>; 3],
    /// Query, key and value of the token, and its output.
    buffers: [wgpu::Buffer; 4],
    cache: Cache,
    attention: Attention,
    scratch: Scratch,
    /// True if one pass has the whole step.
    is_one_pass: bool,
}

impl Step {
    fn new(gpu: &Gpu, shape: Shape, is_one_pass: bool) -> Self {
        let Shape { heads, kv_heads, kv_len, head_dim, .. } = shape;
        let [q, k, v] = [(heads, 1), (kv_heads * kv_len, 2), (kv_heads * kv_len, 3)]
            .map(|(rows, seed)| noise(rows * head_dim, seed));
        let config = CacheConfig::new(kv_heads, head_dim, kv_len);
        let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
        let attention =
            Attention::with_pipelines(gpu.pipelines(), Config::new(heads, head_dim).kv_heads(kv_heads))
                .expect("an operator");
        let upload = |x: &[f32]| gpu.upload(x).expect("an upload");
        let last = |x: &[f32]| -> Vec<f32> {
            let heads = x.chunks_exact(kv_len * head_dim);
            heads.flat_map(|head| &head[(kv_len - 1) * head_dim..]).copied().collect()
        };
        let (old_k, old_v) = (upload(&k), upload(&v));
        let out = upload(&vec![f32::NAN; heads * head_dim]);
        let buffers = [upload(&q), upload(&last(&k)), upload(&last(&v)), out];

        let one = |buffer| TensorView::new(buffer, DType::F32, [1, heads, 1, head_dim]);
        let size = Forward::with_cache(one(&buffers[0]), &cache, one(&buffers[3])).at_end();
        let size = attention.scratch_size(&size.mask(Mask::causal())).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        gpu.submit(|encoder| {
            let old = |buffer| TensorView::new(buffer, DType::F32, [1, kv_heads, kv_len, head_dim]);
            let append =
                Append::new(old(&old_k).slice(2, 0, kv_len - 1), old(&old_v).slice(2, 0, kv_len - 1));
            cache.advance(encoder, Tokens::All(kv_len - 1))?;
            cache.append(encoder, 0, &append)
        })
        .expect("a prefill");
        // Now only the bindings of the steps count.
        scratch.forget();
        Step { shape, data: [q, k, v], buffers, cache, attention, scratch, is_one_pass }
    }

    fn generate(&mut self, into: &mut impl Recorder) {
        let Step { shape: Shape { heads, kv_heads, head_dim, .. }, cache, scratch, .. } = self;
        let [q, k, v, out] = &self.buffers;
        let view = |buffer, heads| TensorView::new(buffer, DType::F32, [1, heads, 1, *head_dim]);
        cache.advance(into, Tokens::All(1)).expect("room");
        cache.append(into, 0, &Append::new(view(k, *kv_heads), view(v, *kv_heads))).expect("a recording");
        let call = Forward::with_cache(view(q, *heads), cache, view(out, *heads)).mask(Mask::causal());
        self.attention.forward(into, &call, scratch).expect("a recording");
    }
}

impl Call for Step {
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder) {
        if self.is_one_pass {
            self.generate(&mut encoder.begin_compute_pass(&Default::default()));
        } else {
            self.generate(encoder);
        }
    }

    fn undo(&mut self, encoder: &mut wgpu::CommandEncoder) {
        self.cache.rewind(encoder, Tokens::All(1)).expect("a recording");
    }

    fn judge(&self, gpu: &Gpu) -> Result<Difference, Mismatch> {
        let Shape { heads, head_dim, .. } = self.shape;
        let got = read(gpu, &self.buffers[3], heads * head_dim, DType::F32);
        let [q, k, v] = &self.data;
        compare_attention(&got, [q, k, v], self.shape, &Options::default(), DType::F32)
    }
}

fn all(c: &mut Criterion) {
    let Some(bed) = Bed::open() else { return };
    let gpu = &bed.gpu;
    let mut bare = Bare::new(gpu);
    let mut group = c.benchmark_group("record");
    let row = |what| row(gpu, "record", what);

    let shape = Shape::new(1, 8, 512, 64);
    let case = Case::new(shape, Rule::Causal, DType::F32);
    for way in [Way::Fused, Way::Staged] {
        let row = of_attention(row(way.name()), shape, "causal", DType::F32);
        bench(&bed, &mut group, &mut bare, &format!("{} {}", way.name(), case.id()), 1, row, || {
            let problem = Problem::new(gpu, case).expect("room");
            let attention = problem.operator(gpu, way).expect("an operator");
            let scratch = problem.scratch(gpu, way).expect("scratch");
            Attend { problem, attention, scratch }
        });
    }
    let shape = Shape { kv_heads: 8, q_len: 1, ..Shape::new(1, 32, 1024, 128) };
    for (what, passes) in [("decode step", 3), ("decode step in one pass", 1)] {
        let of_step = of_attention(row(what), shape, "causal", DType::F32);
        let id = format!("{what}, 32 heads on 8, 1024 keys");
        bench(&bed, &mut group, &mut bare, &id, passes, of_step, || Step::new(gpu, shape, passes == 1));
    }

    let of_product =
        Row {
            shape: "512×512×512".into(), dtype: Some(dtype_name(DType::F32).into()), ..row("projection")
        };
    bench(&bed, &mut group, &mut bare, "projection 512x512x512", 1, of_product, || {
        let product = Product::new(gpu, [512; 2], false, DType::F32);
        let projection = product.operator(gpu, MatrixUnits::Never);
        Project { product, projection }
    });

    let of_layer = of_attention(row("layer"), Shape::new(1, 8, 128, 64), "none", DType::F32);
    bench(&bed, &mut group, &mut bare, "layer 128x512x8", 1, of_layer, || {
        let layer = Layer::random(gpu, 128, 512, 8);
        let operator = layer.operator(gpu);
        let size = operator.scratch_size(&layer.call()).expect("a size");
        WholeLayer { layer, operator, scratch: Scratch::new(gpu.device(), size).expect("scratch") }
    });
}

criterion_group! {
    name = benches;
    config = settings::criterion();
    targets = all
}
criterion_main!(benches);
