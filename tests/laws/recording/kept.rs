//! Bindings of past calls. The cache drops those of released tensors and retains those of loops.

use wgpu_attention::attention::{Merge, MergeForward, Partial};
use wgpu_attention::cache::{Append, Tokens};
use wgpu_attention::mask::Blocks;
use wgpu_attention::matmul::{
    Activation, ProjectionForward, QuantizedFormat, QuantizedMatrix, QuantizedProjection, QuantizedRows,
};
use wgpu_attention::position::{AddPositions, PositionTable, Positions, RowPositions, Sinusoid};
use wgpu_attention::rows::{
    CausalConv, CausalConvForward, Elementwise, ElementwiseForward, Embedding, EmbeddingForward, LogSoftmax,
    LogSoftmaxForward, MeanPool, MeanPoolForward, Norm, NormConfig, NormForward, PoolMask, TopK, TopKForward,
    WeightNorm, WeightNormForward,
};
use wgpu_attention::{Cache, CacheConfig, Projection};

use super::*;

const ROWS: [usize; 4] = [1, 1, 8, 16];

type Record =
    Box<dyn FnMut(&mut wgpu::CommandEncoder, [&wgpu::Buffer; 2]) -> Result<(), wgpu_attention::Error>>;
type Forget = Box<dyn Fn()>;

fn view(buffer: &wgpu::Buffer, shape: [usize; 4]) -> TensorView<'_> {
    TensorView::new(buffer, DType::F32, shape)
}

fn numbers(buffer: &wgpu::Buffer) -> TensorView<'_> {
    TensorView::new(buffer, DType::U32, [1, 1, 8, 1])
}

/// Each operator that caches bindings: its call from one buffer to another, and its `forget`.
fn operators(gpu: &Gpu) -> Vec<(&'static str, Record, Forget)> {
    fn of<T: Clone + 'static>(
        name: &'static str,
        operator: T,
        forget: fn(&T),
        mut record: impl FnMut(
            &T,
            &mut wgpu::CommandEncoder,
            [&wgpu::Buffer; 2],
        ) -> Result<(), wgpu_attention::Error>
        + 'static,
    ) -> (&'static str, Record, Forget) {
        let own = operator.clone();
        (
            name,
            Box::new(move |encoder, buffers| record(&own, encoder, buffers)),
            Box::new(move || forget(&operator)),
        )
    }
    let p = gpu.pipelines();
    let sinusoid = Sinusoid::new(gpu.device(), 16, 10000.0).expect("a sinusoid");
    vec![
        of(
            "norm",
            Norm::with_pipelines(p, NormConfig::layer()).expect("a norm"),
            Norm::forget,
            |o, e, [x, y]| o.forward(e, &NormForward::new(view(x, ROWS), view(y, ROWS))),
        ),
        of("elementwise", Elementwise::with_pipelines(p), Elementwise::forget, |o, e, [x, y]| {
            o.forward(e, &ElementwiseForward::new(view(x, ROWS), view(y, ROWS)).activation(Activation::Silu))
        }),
        of("projection", Projection::with_pipelines(p), Projection::forget, |o, e, [x, y]| {
            let linear = Linear { weight: view(x, [1, 1, 16, 16]), bias: None };
            o.forward(e, &[ProjectionForward::new(view(x, ROWS), linear, view(y, ROWS))])
        }),
        of(
            "quantised",
            QuantizedProjection::with_pipelines(p),
            QuantizedProjection::forget,
            move |o, e, [x, y]| {
                let blocks = QuantizedMatrix::new(x, QuantizedFormat::Q4_1, [16, 32]);
                o.rows(e, &QuantizedRows::new(blocks, numbers(x), view(y, [1, 1, 8, 32])))
            },
        ),
        of("merge", Merge::with_pipelines(p), Merge::forget, |o, e, [x, y]| {
            let part = |b, at| Partial { out: view(b, ROWS), lse: view(b, [1, 1, 8, 1]).with_offset(at) };
            o.forward(e, &MergeForward::new(&[part(x, 256)], part(y, 256)))
        }),
        of("positions", Positions::with_pipelines(p), Positions::forget, move |o, e, [x, y]| {
            let table = PositionTable::Sinusoid(&sinusoid);
            o.add(e, &AddPositions::new(view(x, ROWS), table, RowPositions::Start(0)).out(view(y, ROWS)))
        }),
        of("weight norm", WeightNorm::with_pipelines(p), WeightNorm::forget, |o, e, [x, y]| {
            let shape = [1, 8, 1, 16];
            o.forward(e, &WeightNormForward::new(view(x, shape), view(x, [1, 8, 1, 1]), view(y, shape)))
        }),
        of("embedding", Embedding::with_pipelines(p), Embedding::forget, move |o, e, [x, y]| {
            o.forward(e, &EmbeddingForward::new(numbers(x), view(x, ROWS), view(y, ROWS)))
        }),
        of("mean pool", MeanPool::with_pipelines(p), MeanPool::forget, |o, e, [x, y]| {
            let lengths = PoolMask::Lengths(TensorView::new(x, DType::U32, [1, 1, 1, 1]));
            o.forward(e, &MeanPoolForward::new(view(x, ROWS), lengths, view(y, [1, 1, 1, 16])))
        }),
        of("causal convolution", CausalConv::with_pipelines(p), CausalConv::forget, |o, e, [x, y]| {
            let weight = view(x, [1, 1, 16, 4]);
            o.forward(e, &CausalConvForward::new(view(x, ROWS), weight, view(y, ROWS)))
        }),
        of("log-softmax", LogSoftmax::with_pipelines(p), LogSoftmax::forget, |o, e, [x, y]| {
            o.forward(e, &LogSoftmaxForward::new(view(x, ROWS), view(y, ROWS)))
        }),
        of("top-k", TopK::with_pipelines(p), TopK::forget, |o, e, [x, y]| {
            o.forward(e, &TopKForward::new(view(x, ROWS), TensorView::new(y, DType::U32, [1, 1, 8, 3])))
        }),
        of(
            "classify",
            Attention::with_pipelines(p, Config::new(2, 8)).expect("an operator"),
            Attention::forget,
            |o, e, [x, y]| {
                let blocks = Blocks::new(TensorView::new(y, DType::U32, [1, 1, 2, 2]), [8, 8]);
                let lengths = TensorView::new(x, DType::U32, [1, 1, 1, 1]);
                o.classify(e, &Mask::causal().lengths(lengths), [1, 16, 16], &blocks)
            },
        ),
    ]
}

/// Makes calls with new tensors and drops them. Returns the largest number of additional live
/// buffers.
fn fresh(own: &Own, calls: usize, bytes: usize, record: &mut Record) -> usize {
    let gpu = &own.gpu;
    let alive = || {
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
        own.alive().expect("wgpu counts resources on this backend").buffers
    };
    let before = alive();
    let mut most = 0;
    for _ in 0..calls {
        let buffers = [(); 2].map(|()| gpu.buffer(bytes).expect("a buffer"));
        gpu.submit(|encoder| record(encoder, buffers.each_ref())).expect("a recording");
        drop(buffers);
        most = most.max(alive().saturating_sub(before));
    }
    most
}

#[test]
fn bindings_of_dropped_tensors_are_released() {
    let own = Own::new();
    for (name, mut record, forget) in operators(&own.gpu) {
        // 2 MiB a call: 8 MiB of earlier calls, and the last. A call has one or two buffers.
        let most = fresh(&own, 24, 1 << 20, &mut record);
        assert!((2..=5 * 4).contains(&most), "{name}: {most} buffers of 1 MiB");
        // Large tensors: two earlier calls.
        let most = fresh(&own, 8, 16 << 20, &mut record);
        assert!(most <= 3 * 4, "{name}: {most} buffers of 16 MiB");
        // Bindings of small tensors are dropped by age.
        let most = fresh(&own, 150, 4096, &mut record);
        assert!(most <= 66 * 4, "{name}: {most} small buffers");
        let alive = || {
            own.gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
            own.alive().expect("wgpu counts resources on this backend")
        };
        let before = alive();
        forget();
        let after = alive();
        assert!(after.bind_groups + 60 <= before.bind_groups, "{name}: {before:?}, then {after:?}");
        assert!(after.buffers + 60 <= before.buffers, "{name}: {before:?}, then {after:?}");
        // The operator still works.
        fresh(&own, 1, 4096, &mut record);
    }
}

#[test]
fn scratch_and_caches_release_dropped_tensors() {
    let own = Own::new();
    let gpu = own.gpu.clone();
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(2, 8)).expect("an operator");
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    let mut record: Record = Box::new(move |encoder, [x, y]| {
        let [x, y] = [x, y].map(|b| view(b, [1, 2, 8, 8]));
        attention.forward(encoder, &Forward::new(x, x, x, y), &mut scratch)
    });
    let most = fresh(&own, 40, 1 << 20, &mut record);
    assert!(most <= 5 * 4, "{most} buffers of 1 MiB");
    let mut cache = Cache::with_pipelines(gpu.pipelines(), CacheConfig::new(2, 8, 64)).expect("a cache");
    let mut record: Record = Box::new(move |encoder, [x, y]| {
        cache.advance(encoder, Tokens::All(4))?;
        cache.append(encoder, 0, &Append::new(view(x, [1, 2, 4, 8]), view(y, [1, 2, 4, 8])))?;
        cache.rewind(encoder, Tokens::All(4))
    });
    let most = fresh(&own, 40, 1 << 20, &mut record);
    assert!(most <= 8 * 4, "{most} buffers of 1 MiB next to a cache");
}

/// Runs steps of several layers with a shared operator. After `rounds` steps nothing is bound
/// again.
fn step(gpu: &Gpu, layers: usize, calls: usize, bytes: usize, rounds: usize) {
    let buffers: Vec<_> = (0..layers).map(|_| gpu.buffer(bytes).expect("a buffer")).collect();
    let activations = [(); 2].map(|()| gpu.buffer(4096).expect("a buffer"));
    let projection = Projection::with_pipelines(gpu.pipelines());
    let step = || {
        let mut encoder = encoder(gpu);
        let count = allocations(|| {
            for weight in &buffers {
                for n in 0..calls {
                    let linear =
                        Linear { weight: view(weight, [1, 1, 16, 16]).with_offset(16 * n), bias: None };
                    let [x, y] = activations.each_ref().map(|b| view(b, ROWS));
                    let product = [ProjectionForward::new(x, linear, y)];
                    projection.forward(&mut encoder, &product).expect("a recording");
                }
            }
        });
        drop(encoder);
        count
    };
    let first = step();
    let mut later: Vec<usize> = (1..rounds + 6).map(|_| step()).collect();
    say(&format!("{layers} layers, {calls} calls each, {bytes} bytes: {first} allocations, then {later:?}"));
    later.drain(..rounds - 1);
    assert!(later.iter().all(|n| *n < first / 2), "{layers} layers: {first}, then {later:?}");
    let (least, most) = (later.iter().min(), later.iter().max());
    assert!(
        *most.expect("a step") <= least.expect("a step") + first / 20,
        "{layers} layers: {first}, then {later:?}"
    );
}

#[test]
fn loops_over_layers_bind_once() {
    let gpu = &Own::new().gpu;
    for layers in [1, 2, 30, 64] {
        step(gpu, layers, 1, 4096, 1);
    }
    // The weights are too large to retain without need, and the rounds are long. The second round
    // shows that the bindings recur.
    step(gpu, 32, 1, 1 << 20, 2);
    step(gpu, 64, 7, 8192, 2);
}
