//! `scripts/gpu cargo bench --bench kernels [-- FILTER] [--quick]`
//!
//! Time on the device by timestamp queries, of each kernel once its result has been compared with the reference; then the
//! median beside the floors that the device's own ceilings set to what the problem must compute and move.

mod common;

use common::bed::{Bed, Checked};
use common::layer::Layer;
use common::problem::{Case, Problem, Rule, Way, halves, read, rounded, tolerance};
use common::rows::{Row, dtype_name};
use common::settings;
use common::share::{Kind, Work};
use common::timer::noise;
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use wgpu_attention::reference::compare::compare;
use wgpu_attention::reference::{self, HostLinear, HostWeights, Options, Real, widen};
use wgpu_attention::{
    DType, Linear, MatrixUnits, Projection, ProjectionForward, Scratch, ScratchSize, Shape, TensorView, wgpu,
};

/// Times a pass, and puts its median beside its floors.
fn bench<'a>(
    bed: &Bed,
    group: &mut BenchmarkGroup<WallTime>,
    id: &str,
    work: Work,
    kind: Kind,
    row: Row,
    prepare: impl FnOnce() -> Checked<'a>,
) {
    group.throughput(Throughput::Elements(work.flops as u64));
    // Not run: another was asked for.
    let Some(ms) = bed.measure(group, id, prepare) else { return };
    let share = |kind| bed.ceilings().share(kind, work, ms);
    let Some(own) = share(kind) else { return };
    println!("{:24}median: {own}", "");
    row.share(&own).append();
    // What they could gain.
    if let (Kind::Plain, Some(matrix)) = (kind, share(Kind::Matrix)) {
        println!("{:24}floor of matrix units: {:.3} ms", "", matrix.floor());
    }
}

fn attend(c: &mut Criterion, bed: &Bed) {
    let decode = |q_len, kv_len| Shape { kv_heads: 8, q_len, ..Shape::new(1, 32, kv_len, 128) };
    let (none, causal) = (Rule::None, Rule::Causal);
    let mut cases = if settings::quick() {
        let decode = Shape { kv_heads: 2, q_len: 1, ..Shape::new(1, 4, 512, 64) };
        vec![(Shape::new(1, 2, 128, 64), causal), (decode, none)]
    } else {
        vec![
            (Shape::new(1, 8, 512, 64), none),
            (Shape::new(1, 8, 512, 64), causal),
            (Shape::new(1, 8, 1024, 64), none),
            (Shape::new(1, 8, 1024, 64), causal),
            (Shape::new(1, 8, 1024, 128), none),
            (Shape::new(1, 8, 1024, 128), causal),
            (Shape::new(8, 12, 128, 64), none),
            (decode(1, 4096), none),
            (decode(16, 4096), causal),
            (Shape { q_len: 64, ..Shape::new(1, 1, 65536, 64) }, causal),
        ]
    };
    if !settings::quick() && !bed.software() {
        cases.extend([
            (Shape::new(1, 16, 4096, 64), none),
            (Shape::new(1, 16, 4096, 64), causal),
            (Shape::new(1, 16, 4096, 128), none),
            (Shape::new(1, 16, 4096, 128), causal),
            (Shape::new(1, 16, 16384, 128), causal),
            (decode(1, 65536), none),
        ]);
    }
    for way in [Way::Fused, Way::Staged, Way::Matrix] {
        let mut group = c.benchmark_group(format!("kernels/{}", way.name()));
        for dtype in [DType::F32, DType::F16] {
            for (shape, rule) in &cases {
                let case = Case { shape: *shape, rule: *rule, dtype };
                // Matrix units multiply f16, and fill their fragments with queries.
                let unfit = way == Way::Matrix && (dtype == DType::F32 || shape.q_len == 1);
                if unfit || (dtype == DType::F16 && !bed.f16()) {
                    continue;
                }
                if way == Way::Matrix && bed.fragments.is_empty() {
                    continue;
                }
                attend_one(bed, &mut group, case, way);
            }
        }
    }
}

fn attend_one(bed: &Bed, group: &mut BenchmarkGroup<WallTime>, case: Case, way: Way) {
    let Case { shape, rule, dtype } = case;
    let kind = if way == Way::Matrix { Kind::Matrix } else { Kind::Plain };
    let row = Row::new(&bed.gpu, "kernels", way.name()).attention(&shape, &rule.name(), dtype);
    bench(bed, group, &case.id(), case.work(), kind, row, || {
        Problem::new(&bed.gpu, case).and_then(|problem| problem.check(bed, way)).expect("room").0
    });
}

/// The product of two square matrices.
#[derive(Clone, Copy)]
struct Product {
    n: usize,
    /// The weight is `[in, out]`.
    transposed: bool,
    dtype: DType,
    units: MatrixUnits,
}

fn project(c: &mut Criterion, bed: &Bed) {
    let mut group = c.benchmark_group("kernels/project");
    let sizes = if settings::quick() {
        &[(64, false), (64, true)][..]
    } else {
        &[(512, false), (512, true), (1024, false), (4096, false)][..if bed.software() { 3 } else { 4 }]
    };
    let mut kinds = vec![(DType::F32, MatrixUnits::Never)];
    if bed.f16() {
        kinds.push((DType::F16, MatrixUnits::Never));
    }
    if !bed.fragments.is_empty() {
        kinds.push((DType::F16, MatrixUnits::Always));
    }
    for (dtype, units) in kinds {
        for &(n, transposed) in sizes {
            project_one(bed, &mut group, Product { n, transposed, dtype, units });
        }
    }
}

fn project_one(bed: &Bed, group: &mut BenchmarkGroup<WallTime>, product: Product) {
    let Product { n, transposed, dtype, units } = product;
    let layout = if transposed { "in,out" } else { "out,in" };
    let (kind, what) = match units {
        MatrixUnits::Always => (Kind::Matrix, "project, matrix"),
        _ => (Kind::Plain, "project"),
    };
    let work = Work { flops: 2.0 * (n * n * n) as f64, bytes: (3 * n * n * dtype.bytes()) as f64 };
    let row = Row::new(&bed.gpu, "kernels", what).with("shape", format!("{n}×{n}×{n} {layout}")).dtype(dtype);
    let units = if kind == Kind::Matrix { " matrix" } else { "" };
    let id = format!("{n} {layout} {}{units}", dtype_name(dtype));
    bench(bed, group, &id, work, kind, row, || product.check(bed, &id));
}

impl Product {
    fn check(self, bed: &Bed, id: &str) -> Checked<'static> {
        let Product { n, transposed, dtype, units } = self;
        let gpu = &bed.gpu;
        let [x, w] = [1, 2].map(|seed| rounded(noise(n * n, seed), dtype));
        let upload = |x: &[f32]| if dtype == DType::F16 { gpu.upload(&halves(x)) } else { gpu.upload(x) };
        let (bx, bw) = (upload(&x).expect("x"), upload(&w).expect("w"));
        let out = gpu.upload(&vec![0xffu8; n * n * dtype.bytes()]).expect("out");
        let result = out.clone();
        let projection = Projection::with_pipelines(gpu.pipelines()).matrix_units(units);
        let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
        let record = move |pass: &mut wgpu::ComputePass| {
            let matrix = TensorView::matrix(&bw, dtype, [n, n]);
            let weight = if transposed { matrix.transposed(2, 3) } else { matrix };
            let product = ProjectionForward {
                x: TensorView::sequence(&bx, dtype, [1, n, n]),
                linear: Linear { weight, bias: None },
                out: TensorView::sequence(&out, dtype, [1, n, n]),
                narrow: false,
            };
            projection.forward_in_pass(pass, &[product], &mut scratch).expect("forward");
        };
        bed.check(id, record, || {
            // Rows of the result, of as many rows of x.
            let rows = [0, n / 3, 2 * n / 3, n - 1];
            let take =
                |x: &[f32]| rows.iter().flat_map(|row| &x[row * n..][..n]).copied().collect::<Vec<f32>>();
            let stored: Vec<f32> =
                if transposed { (0..n * n).map(|i| w[i % n * n + i / n]).collect() } else { w.clone() };
            let x = take(&x);
            let want = reference::project::<f64>(&widen(&x), &widen(&stored), None, n, n);
            let naive = rounded(reference::project::<f32>(&x, &stored, None, n, n), dtype);
            compare(&take(&read(gpu, &result, n * n, dtype)), &want, tolerance(&naive, &want, dtype))
        })
    }
}

fn layer(c: &mut Criterion, bed: &Bed) {
    let (length, embed, heads) = if settings::quick() { (64, 64, 2) } else { (512, 512, 8) };
    let scale = |x: Vec<f32>| x.iter().map(|x| x / (embed as f32).sqrt()).collect::<Vec<f32>>();
    let x = noise(length * embed, 1);
    let (in_proj, out_proj) = (scale(noise(3 * embed * embed, 2)), scale(noise(embed * embed, 3)));
    let layer = Layer::new(&bed.gpu, heads, [&x, &in_proj, &out_proj], length, false);
    let operator = layer.operator(&bed.gpu);
    let call = layer.call();

    let shape = layer.config.shape(1, length, length, 0);
    let case = Case { shape, rule: Rule::None, dtype: DType::F32 };
    let work = Work {
        flops: 8.0 * (length * embed * embed) as f64 + case.work().flops,
        bytes: 4.0 * (2 * x.len() + in_proj.len() + out_proj.len()) as f64,
    };
    let mut group = c.benchmark_group("kernels/layer");
    let row = Row::new(&bed.gpu, "kernels", "layer").attention(&shape, "none", DType::F32);
    bench(bed, &mut group, &format!("{length}x{embed}x{heads} f32"), work, Kind::Plain, row, || {
        let size = operator.scratch_size(&call).expect("size");
        let mut scratch = Scratch::new(bed.gpu.device(), size).expect("scratch");
        let (operator, call) = (&operator, &call);
        let record = move |pass: &mut wgpu::ComputePass| {
            operator.forward_in_pass(pass, call, &mut scratch).expect("forward");
        };
        bed.check("the layer", record, || {
            let want = truth::<f64>(&layer, length, [&x, &in_proj, &out_proj]);
            let naive = truth::<f32>(&layer, length, [&x, &in_proj, &out_proj]);
            let got = read(&bed.gpu, &layer.y, x.len(), DType::F32);
            compare(&got, &want, tolerance(&naive, &want, DType::F32))
        })
    });
}

fn truth<R: Real>(layer: &Layer, length: usize, tensors: [&[f32]; 3]) -> Vec<R> {
    let [x, in_proj, out_proj] = tensors.map(widen::<R>);
    let embed = x.len() / length;
    let part = |n: usize| HostLinear { weight: &in_proj[n * embed * embed..][..embed * embed], bias: None };
    let out = HostLinear { weight: &out_proj, bias: None };
    let weights = HostWeights { query: part(0), key: part(1), value: part(2), out, appended: None };
    let shape = reference::LayerShape { batch: 1, q_len: length, kv_len: length };
    reference::multi_head([&x[..]; 3], shape, &layer.config, &weights, &Options::default())
        .expect("the reference knows the layer")
        .out
}

fn all(c: &mut Criterion) {
    let Some(bed) = Bed::open() else { return };
    attend(c, &bed);
    project(c, &bed);
    layer(c, &bed);
}

criterion_group! {
    name = benches;
    config = settings::criterion();
    targets = all
}
criterion_main!(benches);
