//! Operators without scratch cache the bindings of their calls, and threads share pipelines.

use std::sync::Barrier;

use wgpu_attention::additive::{AdditiveAttention, AdditiveConfig, AdditiveForward};
use wgpu_attention::attention::{Merge, MergeForward, Partial};
use wgpu_attention::cache::{Append, Tokens};
use wgpu_attention::layers::{AttentionalForward, AttentionalVector};
use wgpu_attention::linear_attention::{LinearAttention, LinearConfig, LinearForward};
use wgpu_attention::linformer::{Linformer, LinformerForward};
use wgpu_attention::local::{
    LocalAttention, LocalBackward, LocalConfig, LocalForward, PositionPredictor, PredictorBackward,
    PredictorForward,
};
use wgpu_attention::lsh::{LshAttention, LshConfig, LshForward};
use wgpu_attention::mask::Blocks;
use wgpu_attention::matmul::{
    ProjectionForward, QuantizedFormat, QuantizedForward, QuantizedMatrix, QuantizedProjection, QuantizedRows,
};
use wgpu_attention::position::{
    AddPositions, PositionTable, Positions, Rope, RopeConfig, Rotate, Rotation, RowPositions, Sinusoid,
};
use wgpu_attention::rows::{RadixSort, Sort};
use wgpu_attention::{Cache, CacheConfig, Linear, Projection};

use super::*;

const ROWS: [usize; 4] = [1, 2, 3, 8];

/// Operators without scratch, and the tensors of their calls.
struct Operators {
    attention: Attention,
    projection: Projection,
    quantized: QuantizedProjection,
    merge: Merge,
    positions: Positions,
    cache: Cache,
    rope: Rope,
    sinusoid: Sinusoid,
    buffers: [wgpu::Buffer; 4],
}

impl Operators {
    fn new(gpu: &Gpu) -> Self {
        let (device, pipelines) = (gpu.device(), gpu.pipelines());
        Operators {
            attention: Attention::with_pipelines(pipelines, Config::new(2, 8)).expect("an operator"),
            projection: Projection::with_pipelines(pipelines),
            quantized: QuantizedProjection::with_pipelines(pipelines),
            merge: Merge::with_pipelines(pipelines),
            positions: Positions::with_pipelines(pipelines),
            cache: Cache::with_pipelines(pipelines, CacheConfig::new(2, 8, 64)).expect("a cache"),
            rope: Rope::new(device, RopeConfig::new(8)).expect("a rope"),
            sinusoid: Sinusoid::new(device, 8, 10000.0).expect("a sinusoid"),
            buffers: [0.3, 0.5, 0.7, 0.9].map(|seed| gpu.upload(&noise(256, seed)).expect("an upload")),
        }
    }

    /// Records one call of each.
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder) -> Result<(), wgpu_attention::Error> {
        let heads = |n: usize| TensorView::new(&self.buffers[n], DType::F32, ROWS);
        let map = TensorView::new(&self.buffers[3], DType::U32, [1; 4]);
        self.attention.classify(encoder, &Mask::causal(), [1, 3, 3], &Blocks::new(map, [8, 8]))?;
        let x = TensorView::sequence(&self.buffers[0], DType::F32, [1, 3, 8]);
        let weight = TensorView::matrix(&self.buffers[1], DType::F32, [16, 8]);
        let linear = Linear { weight, bias: None };
        self.projection.forward(encoder, &[ProjectionForward::new(x, linear, heads(3))])?;
        let blocks = QuantizedMatrix::new(&self.buffers[1], QuantizedFormat::Q4_1, [16, 32]);
        let sequence = |n: usize, width| TensorView::sequence(&self.buffers[n], DType::F32, [1, 3, width]);
        let product = QuantizedForward::new(sequence(0, 32), blocks, sequence(3, 16));
        self.quantized.forward(encoder, &[product])?;
        let ids = TensorView::new(&self.buffers[2], DType::U32, [1, 1, 3, 1]);
        self.quantized.rows(encoder, &QuantizedRows::new(blocks, ids, sequence(3, 32)))?;
        let lse = |n: usize| TensorView::new(&self.buffers[n], DType::F32, [1, 2, 3, 1]);
        let part = Partial { out: heads(0), lse: lse(1) };
        self.merge.forward(encoder, &MergeForward::new(&[part], Partial { out: heads(3), lse: lse(2) }))?;
        let at = RowPositions::Start(0);
        self.positions
            .rotate(encoder, &Rotate::new(heads(0), Rotation::Rope(&self.rope), at).out(heads(3)))?;
        let table = PositionTable::Sinusoid(&self.sinusoid);
        let sum = AddPositions::new(heads(0), table, at).out(heads(3));
        self.positions.add(encoder, &sum)?;
        self.cache.advance(encoder, Tokens::All(3))?;
        self.cache.append(encoder, 0, &Append::new(heads(0), heads(1)))?;
        self.cache.rewind(encoder, Tokens::All(3))?;
        self.cache.reorder(encoder, &[0])
    }
}

#[test]
fn second_calls_create_nothing() {
    let own = Own::new();
    let gpu = &own.gpu;
    let mut operators = Operators::new(gpu);
    let alive = || {
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
        own.alive().expect("wgpu counts resources on this backend")
    };
    let before = alive();
    gpu.submit(|encoder| operators.record(encoder)).expect("a recording");
    let first = alive();
    assert!(first.bind_groups >= before.bind_groups + 10, "{before:?}, then {first:?}");
    for n in 0..3 {
        gpu.submit(|encoder| operators.record(encoder)).expect("a recording");
        assert_eq!(alive(), first, "recording {n} after the first");
    }
    // A clone shares the bindings. The last clone releases them.
    let clone = operators.positions.clone();
    drop(operators);
    let left = alive();
    assert!(left.bind_groups > before.bind_groups && left.bind_groups < first.bind_groups, "{left:?}");
    drop(clone);
    assert_eq!(alive().bind_groups, before.bind_groups);
}

/// Threads that need the same new pipelines at the same time compile each of them once.
#[test]
fn threads_compile_a_pipeline_once() {
    let own = Own::new();
    let gpu = &own.gpu;
    let problems =
        [0.4, 0.5, 0.6, 0.7].map(|seed| Problem::new(gpu, Algorithm::Staged, Shape::new(1, 2, 9, 8), seed));
    let barrier = Barrier::new(problems.len());
    std::thread::scope(|threads| {
        for problem in &problems {
            threads.spawn(|| {
                let attention = problem.attention(gpu.pipelines());
                let mut scratch = problem.scratch(gpu);
                let mut encoder = encoder(gpu);
                barrier.wait();
                attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
                gpu.queue().submit([encoder.finish()]);
            });
        }
    });
    problems.iter().for_each(|problem| problem.judge(gpu, "recorded with others"));
    assert_eq!(gpu.pipelines().compiled(), 3);
    let alive = own.alive().expect("wgpu counts resources on this backend");
    assert_eq!(alive.pipelines, 3, "{alive:?}");
}

/// For operators that use other operators, `prepare` compiles and binds everything. Examples are
/// projected keys, buckets and their sort, positions, additive scores and states.
#[test]
fn prepared_composite_operators_create_nothing() {
    let own = Own::new();
    let gpu = &own.gpu;
    let wide = [1, 2, 24, 8];
    let floats: Vec<_> =
        [0.3, 0.5, 0.7].map(|seed| gpu.upload(&noise(384, seed)).expect("an upload")).into_iter().collect();
    let outs: Vec<_> = (0..4).map(|_| gpu.buffer(4 * 384).expect("a buffer")).collect();
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    let numbers = |n: usize| TensorView::new(&outs[n], DType::U32, [1, 2, 2, 24]);
    let [q, k, out] = [view(&floats[0], wide), view(&floats[1], wide), view(&outs[0], wide)];

    let linformer = Linformer::with_pipelines(gpu.pipelines(), Config::new(2, 8), 6).expect("an operator");
    let low = LinformerForward::new(q, k, k, view(&floats[2], [1, 1, 6, 24]), out);
    let config = LshConfig::new(2, 8, 2, 4, 8);
    let lsh = LshAttention::with_pipelines(gpu.pipelines(), config).expect("an operator");
    let hashed = LshForward::new(q, k, view(&floats[2], [1, 2, 8, 2]), numbers(1), out);
    let sort = RadixSort::with_pipelines(gpu.pipelines());
    let sorted = Sort::new(numbers(1), numbers(2)).ranks(numbers(3)).bits(9);

    // Shapes of one head, and of rows.
    let (few, rows) = ([1, 1, 24, 8], [1, 1, 24, 1]);
    let local = LocalAttention::with_pipelines(gpu.pipelines(), LocalConfig::new(1, 8, 3));
    let local = local.expect("an operator");
    let [x, y, positions] = [view(&floats[0], few), view(&floats[1], few), view(&outs[1], rows)];
    let near = LocalForward::new([x, y, y], positions, view(&outs[0], few));
    let near_back = LocalBackward::new(near, view(&floats[2], few))
        .d_q(view(&outs[0], few))
        .d_k(view(&outs[2], few))
        .d_v(view(&outs[3], few));
    let predictor = PositionPredictor::with_pipelines(gpu.pipelines());
    let linear = Linear { weight: view(&floats[2], [1, 1, 6, 8]), bias: None };
    let vector = view(&floats[1], [1, 1, 1, 6]);
    let predicted = PredictorForward::new(x, linear, vector, 24, positions);
    let predicted_back = PredictorBackward::new(predicted, view(&floats[1], rows));
    let predicted_back = predicted_back.d_hidden(view(&outs[0], few)).d_vector(view(&outs[2], [1, 1, 1, 6]));
    let additive = AdditiveAttention::with_pipelines(gpu.pipelines(), AdditiveConfig::new(1, 8));
    let additive = additive.expect("an operator");
    let scored = AdditiveForward::new(x, y, y, view(&floats[2], [1, 1, 1, 8]), view(&outs[0], few));
    let of_state = LinearAttention::with_pipelines(gpu.pipelines(), LinearConfig::new(1, 8).causal(true));
    let of_state = of_state.expect("an operator");
    let summed = LinearForward::new(x, y, y, view(&outs[0], few));
    let join = AttentionalVector::with_pipelines(gpu.pipelines());
    let weight = Linear { weight: view(&floats[2], [1, 1, 8, 16]), bias: None };
    let joined = AttentionalForward::new(x, y, weight, view(&outs[0], few));

    let sizes = [
        linformer.scratch_size(&low),
        lsh.scratch_size(&hashed),
        sort.scratch_size(&sorted),
        local.scratch_size(&near),
        local.backward_scratch_size(&near_back),
        predictor.scratch_size(&predicted),
        predictor.backward_scratch_size(&predicted_back),
        additive.scratch_size(&scored),
        of_state.scratch_size(&summed),
        join.scratch_size(&joined),
    ];
    let size = sizes.into_iter().fold(ScratchSize::default(), |all, size| all.max(size.expect("a size")));
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    linformer.prepare(&low, &mut scratch).expect("a preparation");
    lsh.prepare(&hashed, &mut scratch).expect("a preparation");
    sort.prepare(&sorted, &mut scratch).expect("a preparation");
    local.prepare(&near, &mut scratch).expect("a preparation");
    local.prepare_backward(&near_back, &mut scratch).expect("a preparation");
    predictor.prepare(&predicted, &mut scratch).expect("a preparation");
    predictor.prepare_backward(&predicted_back, &mut scratch).expect("a preparation");
    additive.prepare(&scored, &mut scratch).expect("a preparation");
    of_state.prepare(&summed, &mut scratch).expect("a preparation");
    join.prepare(&joined, &mut scratch).expect("a preparation");
    let alive = || {
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
        (gpu.pipelines().compiled(), own.alive().expect("wgpu counts resources on this backend"))
    };
    let prepared = alive();
    assert!(prepared.0 >= 10 && prepared.1.bind_groups >= 15, "{prepared:?}");
    for n in 0..3 {
        let record = |encoder: &mut wgpu::CommandEncoder| {
            linformer.forward(encoder, &low, &mut scratch)?;
            lsh.forward(encoder, &hashed, &mut scratch)?;
            sort.forward(encoder, &sorted, &mut scratch)?;
            local.forward(encoder, &near, &mut scratch)?;
            local.backward(encoder, &near_back, &mut scratch)?;
            predictor.forward(encoder, &predicted, &mut scratch)?;
            predictor.backward(encoder, &predicted_back, &mut scratch)?;
            additive.forward(encoder, &scored, &mut scratch)?;
            of_state.forward(encoder, &summed, &mut scratch)?;
            join.forward(encoder, &joined, &mut scratch)
        };
        gpu.submit(record).expect("a recording");
        assert_eq!(alive(), prepared, "recording {n}");
    }
}
