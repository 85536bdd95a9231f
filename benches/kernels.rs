//! `scripts/gpu cargo bench -p benches --bench kernels [-- [FILTER] [--quick]]`
//!
//! Measures each kernel on the device with timestamp queries, after its result has been compared
//! with the reference. Then it prints the median next to the floors. The floors follow from the
//! device's ceilings and the problem's least work.

use std::cell::OnceCell;

use common::bed::{Bed, Checked};
use common::gradients::{Gradients, Wanted};
use common::layer::Layer;
use common::problem::{Case, Problem, Rule, Way};
use common::product::Product;
use common::rows::{append, dtype_name, of_attention, of_share, row};
use common::settings;
use common::share::{Kind, Work};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use rows::Row;
use wgpu_attention::tuning::MatrixUnits;
use wgpu_attention::{DType, Scratch, Shape, wgpu};

/// Times a pass, and prints its median with its floors.
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
    // The filter selects another bench, so this one was not run.
    let Some(ms) = bed.measure(group, id, prepare) else { return };
    let share = |kind| bed.ceilings().share(kind, work, ms);
    let Some(own) = share(kind) else { return };
    println!("{:24}median: {own}", "");
    append(&of_share(row, &own));
    // The floor that matrix units would have.
    if let (Kind::Plain, false, Some(matrix)) = (kind, bed.software(), share(Kind::Matrix)) {
        println!("{:24}floor of matrix units: {:.3} ms", "", matrix.floor());
    }
}

fn attend(c: &mut Criterion, bed: &Bed) {
    let decode = |q_len, kv_len| Shape { kv_heads: 8, q_len, ..Shape::new(1, 32, kv_len, 128) };
    let (none, causal) = (Rule::None, Rule::Causal);
    let mut cases = if settings::quick() {
        let decode = Shape { kv_heads: 2, q_len: 1, ..Shape::new(1, 4, 512, 64) };
        vec![
            (Shape::new(1, 2, 128, 64), causal, 0),
            (decode, none, 0),
            (Shape::new(1, 2, 64, 63), Rule::Bias, 1),
        ]
    } else {
        vec![
            (Shape::new(1, 8, 512, 64), none, 0),
            (Shape::new(1, 8, 512, 64), causal, 0),
            (Shape::new(1, 8, 512, 64), Rule::Alibi, 0),
            (Shape::new(1, 8, 512, 64), Rule::Softcap, 0),
            (Shape::new(1, 8, 512, 64), Rule::Bias, 0),
            (Shape::new(1, 8, 512, 64), Rule::Keep, 0),
            (Shape::new(1, 8, 512, 64), none, 1),
            (Shape::new(1, 8, 512, 63), none, 0),
            (Shape::new(1, 8, 1024, 64), none, 0),
            (Shape::new(1, 8, 1024, 64), causal, 0),
            (Shape::new(1, 8, 1024, 128), none, 0),
            (Shape::new(1, 8, 1024, 128), causal, 0),
            (Shape::new(8, 12, 128, 64), none, 0),
            (decode(1, 4096), none, 0),
            (decode(16, 4096), causal, 0),
            (Shape { q_len: 64, ..Shape::new(1, 1, 65536, 64) }, causal, 0),
        ]
    };
    if !settings::quick() && !bed.software() {
        cases.extend([
            (Shape::new(1, 16, 4096, 64), none, 0),
            (Shape::new(1, 16, 4096, 64), causal, 0),
            (Shape::new(1, 16, 4096, 128), none, 0),
            (Shape::new(1, 16, 4096, 128), causal, 0),
            (Shape::new(1, 16, 16384, 128), causal, 0),
            (decode(1, 65536), none, 0),
        ]);
    }
    if bed.fragments.is_empty() {
        println!("kernels/matrix: skipped, the device has no matrix units");
    } else if bed.software() {
        println!(
            "kernels/matrix: small cases only, a software driver has no matrix units as far as speed goes"
        );
    }
    for way in [Way::Fused, Way::Staged, Way::Matrix] {
        let mut group = c.benchmark_group(format!("kernels/{}", way.name()));
        for dtype in [DType::F32, DType::F16] {
            for &(shape, rule, first) in &cases {
                let case = Case { shape, rule, dtype, first };
                // Matrix units multiply f16, and fill their fragments with queries.
                let unfit = way == Way::Matrix && (dtype == DType::F32 || shape.q_len == 1);
                if unfit || (dtype == DType::F16 && !bed.f16()) {
                    continue;
                }
                let large = bed.software() && case.work().flops > 3e8;
                if way == Way::Matrix && (bed.fragments.is_empty() || large) {
                    continue;
                }
                let scores = 4 * (shape.batch * shape.heads * shape.q_len * shape.kv_len) as u64;
                if way == Way::Staged && scores > bed.gpu.device().limits().max_storage_buffer_binding_size {
                    println!("kernels/staged/{}: skipped, the device binds no such score matrix", case.id());
                    continue;
                }
                attend_one(bed, &mut group, case, way);
            }
        }
    }
}

fn attend_one(bed: &Bed, group: &mut BenchmarkGroup<WallTime>, case: Case, way: Way) {
    let Case { shape, rule, dtype, first } = case;
    let kind = if way == Way::Matrix { Kind::Matrix } else { Kind::Plain };
    let what = if first == 0 { way.name().into() } else { format!("{} from {first}", way.name()) };
    let row = of_attention(row(&bed.gpu, "kernels", &what), shape, &rule.name(), dtype);
    let problem = OnceCell::new();
    bench(bed, group, &case.id(), case.work(), kind, row, || {
        let problem = problem.get_or_init(|| Problem::new(&bed.gpu, case).expect("room for the problem"));
        problem.check(bed, way, problem.scratch(&bed.gpu, way).expect("room for the scratch"))
    });
}

fn backward(c: &mut Criterion, bed: &Bed) {
    let mut shapes = if settings::quick() {
        vec![(Shape::new(1, 2, 128, 64), true)]
    } else {
        vec![
            (Shape::new(1, 8, 512, 64), false),
            (Shape::new(1, 8, 512, 64), true),
            (Shape::new(1, 8, 1024, 64), true),
            (Shape::new(1, 8, 512, 128), true),
            (Shape::new(8, 12, 128, 64), false),
        ]
    };
    if !settings::quick() && !bed.software() {
        shapes.extend([(Shape::new(1, 16, 4096, 64), true), (Shape::new(1, 16, 4096, 128), true)]);
    }
    let mut group = c.benchmark_group("kernels/backward");
    for dtype in [DType::F32, DType::F16] {
        for &(shape, causal) in &shapes {
            if dtype == DType::F16 && !bed.f16() {
                continue;
            }
            let rule = if causal { Rule::Causal } else { Rule::None };
            let gradients = OnceCell::new();
            for wanted in [Wanted::All, Wanted::Queries, Wanted::KeysAndValues] {
                let row = of_attention(row(&bed.gpu, "kernels", wanted.name()), shape, &rule.name(), dtype);
                let id = format!("{} {}", wanted.name(), Case::new(shape, rule, dtype).id());
                let new = || Gradients::new(&bed.gpu, shape, causal, dtype);
                let work = Gradients::least(shape, causal, dtype, wanted);
                bench(bed, &mut group, &id, work, Kind::Plain, row, || {
                    let gradients = gradients.get_or_init(new);
                    let (operator, call) = (gradients.operator(&bed.gpu), gradients.call(wanted));
                    let size = operator.backward_scratch_size(&call).expect("a size");
                    let mut scratch = Scratch::new(bed.gpu.device(), size).expect("room");
                    let record = move |pass: &mut wgpu::ComputePass| {
                        operator.backward(pass, &call, &mut scratch).expect("a call");
                    };
                    bed.check(&id, record, || gradients.judge(&bed.gpu, wanted))
                });
            }
        }
    }
}

fn project(c: &mut Criterion, bed: &Bed) {
    let mut group = c.benchmark_group("kernels/project");
    let square = |n| [n, n];
    let sizes = if settings::quick() {
        vec![(square(64), false), (square(64), true)]
    } else {
        let few = [1, 8].map(|rows| [rows, 4096]);
        let squares = [(512, false), (512, true), (1024, false), (4096, false)];
        let squares = squares.into_iter().take(if bed.software() { 3 } else { 4 });
        let squares = squares.map(|(n, transposed)| (square(n), transposed));
        squares.chain([(few[0], false), (few[0], true), (few[1], false)]).collect()
    };
    let mut kinds = vec![(DType::F32, MatrixUnits::Never)];
    if bed.f16() {
        kinds.push((DType::F16, MatrixUnits::Never));
    }
    if !bed.fragments.is_empty() && (settings::quick() || !bed.software()) {
        kinds.push((DType::F16, MatrixUnits::Always));
    }
    for (dtype, units) in kinds {
        for &(size, transposed) in &sizes {
            // Products of few rows do not use matrix units.
            if units == MatrixUnits::Never || size[0] == size[1] {
                project_one(bed, &mut group, (size, transposed, dtype), units);
            }
        }
    }
}

fn project_one(
    bed: &Bed,
    group: &mut BenchmarkGroup<WallTime>,
    ([rows, n], transposed, dtype): ([usize; 2], bool, DType),
    units: MatrixUnits,
) {
    let layout = if transposed { "in,out" } else { "out,in" };
    let (kind, what) = match units {
        MatrixUnits::Always => (Kind::Matrix, "project, matrix"),
        _ => (Kind::Plain, "project"),
    };
    let bytes = (n * n + 2 * rows * n) * dtype.bytes();
    let work = Work { flops: 2.0 * (rows * n * n) as f64, bytes: bytes as f64 };
    let row = Row {
        shape: format!("{rows}×{n}×{n} {layout}"),
        dtype: Some(dtype_name(dtype).into()),
        ..row(&bed.gpu, "kernels", what)
    };
    let on = if kind == Kind::Matrix { " matrix" } else { "" };
    let few = if rows == n { String::new() } else { format!("{rows} by ") };
    let id = format!("{few}{n} {layout} {}{on}", dtype_name(dtype));
    let product = OnceCell::new();
    bench(bed, group, &id, work, kind, row, || {
        let product = product.get_or_init(|| Product::new(&bed.gpu, [rows, n], transposed, dtype));
        let operator = product.operator(&bed.gpu, units);
        let record = move |pass: &mut wgpu::ComputePass| {
            operator.forward(pass, &[product.call()]).expect("a call");
        };
        bed.check(&id, record, || product.judge(&bed.gpu))
    });
}

fn layer(c: &mut Criterion, bed: &Bed) {
    let (length, embed, heads) = if settings::quick() { (64, 64, 2) } else { (512, 512, 8) };
    let layer = Layer::random(&bed.gpu, length, embed, heads);
    let operator = layer.operator(&bed.gpu);
    let call = layer.call();

    let shape = Shape::new(1, heads, length, embed / heads);
    let case = Case::new(shape, Rule::None, DType::F32);
    let work = Work {
        flops: 8.0 * (length * embed * embed) as f64 + case.work().flops,
        bytes: 4.0 * (2 * length * embed + 4 * embed * embed) as f64,
    };
    let mut group = c.benchmark_group("kernels/layer");
    let row = of_attention(row(&bed.gpu, "kernels", "layer"), shape, "none", DType::F32);
    bench(bed, &mut group, &format!("{length}x{embed}x{heads} f32"), work, Kind::Plain, row, || {
        let size = operator.scratch_size(&call).expect("size");
        let mut scratch = Scratch::new(bed.gpu.device(), size).expect("scratch");
        let (operator, call) = (&operator, &call);
        let record = move |pass: &mut wgpu::ComputePass| {
            operator.forward(pass, call, &mut scratch).expect("forward");
        };
        bed.check("the layer", record, || layer.judge(&bed.gpu))
    });
}

fn all(c: &mut Criterion) {
    let Some(bed) = Bed::open() else { return };
    if !bed.f16() {
        println!("f16: skipped, the device has none");
    }
    // First, because tables compare the others with it, and time may end before them.
    project(c, &bed);
    attend(c, &bed);
    backward(c, &bed);
    layer(c, &bed);
}

criterion_group! {
    name = benches;
    config = settings::criterion();
    targets = all
}
criterion_main!(benches);
