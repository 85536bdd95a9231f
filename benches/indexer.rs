//! `scripts/gpu cargo bench -p benches --bench indexer [-- --quick]`
//!
//! Measures top-k for several k, compared with a copy of the rows. Measures the indexer, compared
//! with the same product by `Projection`. The result of that product is not summed over heads. It
//! prints the least time of interleaved rounds.

use common::bed::Bed;
use common::settings::quick;
use common::timer::noise;
use wgpu_attention::matmul::ProjectionForward;
use wgpu_attention::rows::{Elementwise, ElementwiseForward, TopK, TopKForward};
use wgpu_attention::selected::{Indexer, IndexerBackward, IndexerForward};
use wgpu_attention::{DType, Linear, Mask, Projection, Scratch, TensorView, wgpu};

type Record<'a> = Box<dyn FnMut(&mut wgpu::ComputePass) + 'a>;

/// Returns the least times of these calls in ms.
fn least(bed: &Bed, calls: &mut [Record]) -> Vec<f64> {
    let mut least = vec![f64::INFINITY; calls.len()];
    for _ in 0..if quick() { 2 } else { 5 } {
        for (least, call) in least.iter_mut().zip(calls.iter_mut()) {
            let time = bed.timer.time(|pass: &mut wgpu::ComputePass| call(pass));
            *least = least.min(time.as_secs_f64() * 1e3);
        }
    }
    least
}

fn view(buffer: &wgpu::Buffer, dtype: DType, shape: [usize; 4]) -> TensorView<'_> {
    TensorView::new(buffer, dtype, shape)
}

fn top_k(bed: &Bed, rows: usize, columns: usize) {
    let x = bed.gpu.upload(&noise(rows * columns, 1)).expect("room");
    let [out, indices] = [0; 2].map(|_| bed.gpu.buffer(4 * rows * columns).expect("room"));
    let shape = [1, 1, rows, columns];
    let x = view(&x, DType::F32, shape);
    let pipelines = bed.gpu.pipelines();
    let copy = Elementwise::with_pipelines(pipelines);
    let top = TopK::with_pipelines(pipelines);
    let many = [1, 16, 64, 65, 512, 2048, 4096, 16384];
    let many: Vec<usize> = many.into_iter().filter(|k| *k <= columns).collect();
    let copied = ElementwiseForward::new(x, view(&out, DType::F32, shape));
    let calls: Vec<_> =
        many.iter().map(|k| TopKForward::new(x, view(&indices, DType::U32, [1, 1, rows, *k]))).collect();
    let mut scratches: Vec<Scratch> = calls
        .iter()
        .map(|call| Scratch::new(bed.gpu.device(), top.scratch_size(call).expect("a size")).expect("room"))
        .collect();
    let mut all: Vec<Record> = vec![Box::new(|pass| copy.forward(pass, &copied).expect("a call"))];
    for (call, scratch) in calls.iter().zip(&mut scratches) {
        let top = &top;
        all.push(Box::new(move |pass| top.forward_with(pass, call, scratch).expect("a call")));
    }
    let times = least(bed, &mut all);
    println!("top-k of {rows} × {columns}, a copy takes {:.3} ms", times[0]);
    for (k, time) in many.iter().zip(&times[1..]) {
        println!(
            "  k {k:>6}: {time:>9.3} ms, {:>6.2} copies, {:>6.2} times k = 1",
            time / times[0],
            time / times[1]
        );
    }
}

fn indexer(bed: &Bed, [heads, queries, keys, dim]: [usize; 4], dtype: DType) {
    let bytes = dtype.bytes();
    let upload = |count: usize, seed: u32| {
        let x = noise(count, seed);
        match dtype {
            DType::F32 => bed.gpu.upload(&x).expect("room"),
            _ => bed
                .gpu
                .upload(&x.iter().map(|x| half::f16::from_f32(*x).to_bits()).collect::<Vec<u16>>())
                .expect("room"),
        }
    };
    let (q, k) = (upload(heads * queries * dim, 1), upload(keys * dim, 2));
    let w = bed.gpu.upload(&noise(queries * heads, 3)).expect("room");
    let best = 2048.min(keys / 4);
    let buffer = |count: usize| bed.gpu.buffer(4 * count).expect("room");
    let (indices, scores) = (buffer(queries * best), buffer(queries * keys));
    let products = bed.gpu.buffer(bytes * heads * queries * keys).expect("room");
    let (d_q, d_k, d_w) = (buffer(heads * queries * dim), buffer(keys * dim), buffer(queries * heads));
    let d_scores = bed.gpu.upload(&noise(queries * best, 4)).expect("room");
    let pipelines = bed.gpu.pipelines();
    let of_q = TensorView::blhd(&q, dtype, [1, heads, queries, dim]);
    let of_k = view(&k, dtype, [1, 1, keys, dim]);
    let of_w = view(&w, DType::F32, [1, 1, queries, heads]);
    let call = IndexerForward::new(of_q, of_k, of_w).scale(0.1);
    let list = [1, 1, queries, best];
    let dense = call.scores(view(&scores, DType::F32, [1, 1, queries, keys]));
    let listed = call.indices(view(&indices, DType::U32, list));
    let causal = listed.mask(Mask::causal_top_left());
    let back = IndexerBackward::new(call, view(&d_scores, DType::F32, list)).indices(view(
        &indices,
        DType::U32,
        list,
    ));
    let of_queries = back.d_q(view(&d_q, DType::F32, [1, heads, queries, dim])).d_w(view(
        &d_w,
        DType::F32,
        [1, 1, queries, heads],
    ));
    let of_keys = back.d_k(view(&d_k, DType::F32, [1, 1, keys, dim]));
    let indexer = Indexer::with_pipelines(pipelines);
    let projection = Projection::with_pipelines(pipelines);
    let linear = Linear { weight: TensorView::matrix(&k, dtype, [keys, dim]), bias: None };
    let product = [ProjectionForward::new(
        view(&q, dtype, [1, 1, queries * heads, dim]),
        linear,
        view(&products, dtype, [1, 1, queries * heads, keys]),
    )];
    let scratch = |size| Scratch::new(bed.gpu.device(), size).expect("room");
    let sizes = [&dense, &listed, &causal].map(|call| indexer.scratch_size(call).expect("a size"));
    let [mut a, mut b, mut c] = sizes.map(scratch);
    let sizes = [&of_queries, &of_keys].map(|call| indexer.backward_scratch_size(call).expect("a size"));
    let [mut d, mut e] = sizes.map(scratch);
    let mut all: Vec<Record> = vec![
        Box::new(|pass| projection.forward(pass, &product).expect("a call")),
        Box::new(|pass| indexer.forward(pass, &dense, &mut a).expect("a call")),
        Box::new(|pass| indexer.forward(pass, &listed, &mut b).expect("a call")),
        Box::new(|pass| indexer.forward(pass, &causal, &mut c).expect("a call")),
    ];
    if !quick() {
        all.push(Box::new(|pass| indexer.backward(pass, &of_queries, &mut d).expect("a call")));
        all.push(Box::new(|pass| indexer.backward(pass, &of_keys, &mut e).expect("a call")));
    }
    let times = least(bed, &mut all);
    let names = [
        "product by Projection",
        "scores",
        "scores and the best",
        "causal, top-left",
        "d_q and d_w of lists",
        "d_k of lists",
    ];
    println!("indexer, {heads} heads of {dim}, {queries} queries, {keys} keys, the best {best}, {dtype:?}");
    for (name, time) in names.into_iter().zip(&times) {
        println!("  {name:<24} {time:>10.3} ms, {:>6.2} products", time / times[0]);
    }
}

fn main() {
    let Some(bed) = Bed::open() else { return };
    let software = bed.software();
    let rows = if quick() || software { 8 } else { 512 };
    top_k(&bed, rows, if quick() { 8192 } else { 65536 });
    if !quick() {
        top_k(&bed, 1, 1_000_000);
    }
    let (queries, keys) = match (quick(), software) {
        (true, _) => (4, 2048),
        (false, true) => (16, 16384),
        (false, false) => (256, 65536),
    };
    for dtype in [DType::F32, DType::F16] {
        // The products must fit in a binding.
        let fits = |queries: usize| 64 * queries * keys * dtype.bytes() < 1 << 30;
        let queries = (0..).map(|n| queries >> n).find(|n| fits(*n)).unwrap_or(1);
        indexer(&bed, [64, queries, keys, 128], dtype);
    }
    indexer(&bed, [4, 4 * queries, keys, 32], DType::F32);
}
