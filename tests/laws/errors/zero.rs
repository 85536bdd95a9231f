//! Sizes of 0: every operator returns the same error.

use wgpu_attention::additive::{AdditiveAttention, AdditiveBackward, AdditiveConfig, AdditiveForward};
use wgpu_attention::attention::{Merge, MergeBackward, MergeForward, PartGradients, Partial};
use wgpu_attention::cache::{Append, CacheRead, Tokens};
use wgpu_attention::layers::{AttentionalBackward, AttentionalForward, AttentionalVector};
use wgpu_attention::linear_attention::{
    FeatureMap, LinearAttention, LinearBackward, LinearConfig, LinearForward,
};
use wgpu_attention::linformer::{Linformer, LinformerBackward, LinformerForward};
use wgpu_attention::local::{
    LocalAttention, LocalBackward, LocalConfig, LocalForward, PositionPredictor, PredictorBackward,
    PredictorForward,
};
use wgpu_attention::lsh::{LshAttention, LshBackward, LshConfig, LshForward};
use wgpu_attention::matmul::{
    ProjectionBackward, ProjectionForward, QuantizedFormat, QuantizedForward, QuantizedMatrix,
    QuantizedProjection, QuantizedRows,
};
use wgpu_attention::position::{
    AddPositions, PositionTable, Positions, Rope, RopeConfig, Rotate, RowPositions, TableBackward,
};
use wgpu_attention::rows::{
    CausalConv, CausalConvBackward, CausalConvForward, Elementwise, ElementwiseBackward, ElementwiseForward,
    Embedding, EmbeddingBackward, EmbeddingForward, LogSoftmax, LogSoftmaxBackward, LogSoftmaxForward,
    MeanPool, MeanPoolBackward, MeanPoolForward, Norm, NormBackward, NormConfig, NormForward, PoolMask,
    RadixSort, Sort, TopK, TopKForward,
};
use wgpu_attention::selected::{
    Indexer, IndexerBackward, IndexerForward, NativeSparseAttention, NativeSparseBackward,
    NativeSparseBranches, NativeSparseConfig, NativeSparseForward, SelectedAttention, SelectedBackward,
    SelectedConfig, SelectedForward,
};
use wgpu_attention::{
    Attention, Backward, Cache, CacheConfig, Config, DType, Error, Forward, Gpu, Linear, Projection, Scratch,
    ScratchSize, TensorView,
};

use crate::harness::full;

/// The results of calls with these sizes, by name.
type Outcomes = Vec<(&'static str, Result<(), Error>)>;

struct Calls<'a> {
    gpu: &'a Gpu,
    outcomes: Outcomes,
}

impl Calls<'_> {
    fn record(
        &mut self,
        name: &'static str,
        size: Result<ScratchSize, Error>,
        record: impl FnOnce(&mut wgpu::CommandEncoder, &mut Scratch) -> Result<(), Error>,
    ) {
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        let scratch = size.and_then(|size| Scratch::new(self.gpu.device(), size));
        self.outcomes.push((name, scratch.and_then(|mut scratch| record(&mut encoder, &mut scratch))));
        self.gpu.queue().submit([encoder.finish()]);
    }

    fn plain(
        &mut self,
        name: &'static str,
        record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<(), Error>,
    ) {
        self.record(name, Ok(ScratchSize::default()), |encoder, _| record(encoder));
    }
}

/// Calls every operator with one batch and one length. All other arguments are right.
fn outcomes(gpu: &Gpu, batch: usize, length: usize) -> Outcomes {
    let (device, pipelines) = (gpu.device(), gpu.pipelines());
    let buffers: Vec<_> = (0..13).map(|_| gpu.upload(&[0u32; 4096]).expect("a buffer")).collect();
    let of = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let f32 = |n, shape| of(n, DType::F32, shape);
    let heads = |n| f32(n, [batch, 2, length, 8]);
    let rows = |n| f32(n, [batch, 2, length, 1]);
    let tokens = |n, width| f32(n, [batch, 1, length, width]);
    let numbers = |n| of(n, DType::U32, [batch, 1, length, 1]);
    let matrix = |n, shape| TensorView::matrix(&buffers[n], DType::F32, shape);
    let [q, k, v, out] = [0, 1, 2, 3].map(heads);
    let (lse, d_out) = (rows(4), heads(5));
    let mut calls = Calls { gpu, outcomes: Vec::new() };

    let attention = Attention::with_pipelines(pipelines, Config::new(2, 8)).expect("an operator");
    let call = Forward::new(q, k, v, out);
    calls.record("attention", attention.scratch_size(&call), |e, s| attention.forward(e, &call, s));
    let call = Backward::new(call.lse(lse), d_out).d_q(heads(6)).d_k(heads(7)).d_v(heads(8));
    let size = attention.backward_scratch_size(&call);
    calls.record("attention, backward", size, |e, s| attention.backward(e, &call, s));

    let additive =
        AdditiveAttention::with_pipelines(pipelines, AdditiveConfig::new(2, 8)).expect("an operator");
    let vector = f32(9, [1, 2, 1, 8]);
    let call = AdditiveForward::new(q, k, v, vector, out);
    calls.record("additive", additive.scratch_size(&call), |e, s| additive.forward(e, &call, s));
    let call = AdditiveBackward::new(call.lse(lse), d_out).d_q(heads(6));
    let size = additive.backward_scratch_size(&call);
    calls.record("additive, backward", size, |e, s| additive.backward(e, &call, s));

    let low = Linformer::with_pipelines(pipelines, Config::new(2, 8), 2).expect("an operator");
    let e = f32(9, [1, 1, 2, length]);
    let call = LinformerForward::new(q, k, v, e, out);
    calls.record("linformer", low.scratch_size(&call), |e, s| low.forward(e, &call, s));
    let call = LinformerBackward::new(call.lse(lse), d_out).d_q(heads(6));
    let size = low.backward_scratch_size(&call);
    calls.record("linformer, backward", size, |e, s| low.backward(e, &call, s));

    let hashed = LshAttention::with_pipelines(pipelines, LshConfig::new(2, 8, 1, 4, 4)).expect("an operator");
    let buckets = of(9, DType::U32, [batch, 2, 1, length]);
    let call = LshForward::new(q, v, f32(10, [1, 1, 8, 2]), buckets, out);
    calls.record("lsh", hashed.scratch_size(&call), |e, s| hashed.forward(e, &call, s));
    let call = LshBackward::new(call.lse(lse), d_out).d_qk(heads(6));
    let size = hashed.backward_scratch_size(&call);
    calls.record("lsh, backward", size, |e, s| hashed.backward(e, &call, s));

    let config = SelectedConfig::new(Config::new(2, 8)).window(1);
    let selected = SelectedAttention::with_pipelines(pipelines, config).expect("an operator");
    let indices = of(9, DType::U32, [batch, 1, length, 3]);
    let attended = Forward::new(q, k, v, out).lse(lse);
    let call = SelectedForward::new(attended, indices).weights(f32(10, [batch, 2, length, 3]));
    calls.record("selected", selected.scratch_size(&call), |e, s| selected.forward(e, &call, s));
    let call = SelectedBackward::new(Backward::new(attended, d_out).d_k(heads(6)), indices);
    let size = selected.backward_scratch_size(&call);
    calls.record("selected, backward", size, |e, s| selected.backward(e, &call, s));

    let config = NativeSparseConfig::new(Config::new(2, 8)).compression(2, 1).selection(2, 2).always(1, 1);
    let native = NativeSparseAttention::with_pipelines(pipelines, config).expect("an operator");
    let call = NativeSparseForward::new(q, k, v, f32(9, [batch, 2, length, 3]), out);
    calls.record("native sparse", native.scratch_size(&call), |e, s| native.forward(e, &call, s));
    let branches = NativeSparseBranches {
        out: f32(10, [3 * batch, 2, length, 8]),
        lse: f32(11, [3 * batch, 2, length, 1]),
        indices: of(12, DType::U32, [batch, 2, length, 2]),
    };
    let call = NativeSparseBackward::new(call.branches(branches), d_out).d_k(heads(6));
    let size = native.backward_scratch_size(&call);
    calls.record("native sparse, backward", size, |e, s| native.backward(e, &call, s));

    let local = LocalAttention::with_pipelines(pipelines, LocalConfig::new(2, 8, 1)).expect("an operator");
    let call = LocalForward::new([q, k, v], rows(9), out);
    calls.record("local", local.scratch_size(&call), |e, s| local.forward(e, &call, s));
    let call = LocalBackward::new(call, d_out).d_q(heads(6));
    let size = local.backward_scratch_size(&call);
    calls.record("local, backward", size, |e, s| local.backward(e, &call, s));

    let predictor = PositionPredictor::with_pipelines(pipelines);
    let linear = Linear { weight: matrix(1, [8, 8]), bias: None };
    let (hidden, vector) = (tokens(0, 8), TensorView::vector(&buffers[2], DType::F32, 8));
    let call = PredictorForward::new(hidden, linear, vector, 5, tokens(3, 1));
    calls.record("predictor", predictor.scratch_size(&call), |e, s| predictor.forward(e, &call, s));
    let call = PredictorBackward::new(call, tokens(3, 1)).d_hidden(tokens(4, 8));
    let size = predictor.backward_scratch_size(&call);
    calls.record("predictor, backward", size, |e, s| predictor.backward(e, &call, s));

    let linear =
        LinearAttention::with_pipelines(pipelines, LinearConfig::new(2, 8).feature_map(FeatureMap::Elu))
            .expect("one");
    let call = LinearForward::new(q, k, v, out);
    calls.record("linear", linear.scratch_size(&call), |e, s| linear.forward(e, &call, s));
    let call = LinearBackward::new(call, d_out).d_q(heads(6));
    let size = linear.backward_scratch_size(&call);
    calls.record("linear, backward", size, |e, s| linear.backward(e, &call, s));

    let join = AttentionalVector::with_pipelines(pipelines);
    let (context, hidden, weight) = (tokens(0, 8), tokens(1, 8), matrix(2, [8, 16]));
    let call = AttentionalForward::new(context, hidden, Linear { weight, bias: None }, tokens(3, 8));
    calls.record("attentional vector", join.scratch_size(&call), |e, s| join.forward(e, &call, s));
    let call = AttentionalBackward::new(call, tokens(4, 8)).d_context(tokens(5, 8));
    let size = join.backward_scratch_size(&call);
    calls.record("attentional vector, backward", size, |e, s| join.backward(e, &call, s));

    let projection = Projection::with_pipelines(pipelines);
    let (x, weight) = (tokens(0, 8), matrix(1, [16, 8]));
    let call = ProjectionForward::new(x, Linear { weight, bias: None }, heads(3));
    calls.plain("projection", |e| projection.forward(e, &[call]));
    let call = [ProjectionBackward::new(call, heads(3)).d_weight(matrix(4, [16, 8]))];
    calls.plain("projection, backward", |e| projection.backward(e, &call));
    let quantized = QuantizedProjection::with_pipelines(pipelines);
    let blocks = QuantizedMatrix::new(&buffers[1], QuantizedFormat::Q8_0, [16, 32]);
    let call = [QuantizedForward::new(tokens(0, 32), blocks, heads(3))];
    calls.plain("quantised projection", |e| quantized.forward(e, &call));
    let call = QuantizedRows::new(blocks, numbers(0), tokens(3, 32));
    calls.plain("quantised rows", |e| quantized.rows(e, &call));

    let merge = Merge::with_pipelines(pipelines);
    let (parts, into) = ([Partial { out: heads(0), lse: rows(1) }], Partial { out: heads(2), lse: rows(3) });
    let call = MergeForward::new(&parts, into);
    calls.plain("merge", |e| merge.forward(e, &call));
    let gradients = [PartGradients { d_out: heads(6), d_lse: rows(7) }];
    let call = MergeBackward::new(call, d_out, &gradients);
    calls.plain("merge, backward", |e| merge.backward(e, &call));

    let positions = Positions::with_pipelines(pipelines);
    let rope = Rope::new(device, RopeConfig::new(8)).expect("a rope");
    let call = Rotate::new(q, &rope, RowPositions::Start(0)).out(out);
    calls.plain("rotate", |e| positions.rotate(e, &call));
    calls.plain("rotate, backward", |e| positions.rotate_backward(e, &call));
    let table = f32(1, [1, 1, 9, 8]);
    let call = AddPositions::new(q, PositionTable::Learned(table), RowPositions::Start(0)).out(out);
    calls.plain("add", |e| positions.add(e, &call));
    let call = TableBackward::new(call, d_out, table);
    calls.plain("table, backward", |e| positions.table_backward(e, &call));

    let cache = CacheConfig::new(2, 8, 16).batch(batch);
    let made = Cache::with_pipelines(pipelines, cache).map(|mut cache| {
        calls.plain("a cache's advance", |e| cache.advance(e, Tokens::All(length)));
        // An append needs an advance.
        calls.plain("a cache's append", |e| {
            cache.advance(e, Tokens::All(length.max(1)))?;
            cache.append(e, 0, &Append::new(k, v))
        });
        calls.plain("a cache's read", |e| cache.read(e, 0, &CacheRead::new(heads(6), heads(7))));
        let call = Forward::with_cache(q, &cache, out);
        calls.record("attention to a cache", attention.scratch_size(&call), |e, s| {
            attention.forward(e, &call, s)
        });
        calls.plain("a cache's rows, written over", |e| {
            cache.overwrite(e, 0, &Append::new(k, v), RowPositions::Start(0))
        });
    });
    calls.outcomes.push(("a cache", made));

    let sort = RadixSort::with_pipelines(pipelines);
    let keys = |n| of(n, DType::U32, [batch, 1, 1, length]);
    let call = Sort::new(keys(0), keys(1));
    calls.record("radix sort", sort.scratch_size(&call), |e, s| sort.forward(e, &call, s));
    let embedding = Embedding::with_pipelines(pipelines);
    let call = EmbeddingForward::new(numbers(0), f32(1, [1, 1, 9, 8]), tokens(2, 8));
    calls.plain("embedding", |e| embedding.forward(e, &call));
    let call = EmbeddingBackward::new(call, tokens(3, 8), f32(4, [1, 1, 9, 8]));
    let size = embedding.backward_scratch_size(&call);
    calls.record("embedding, backward", size, |e, s| embedding.backward(e, &call, s));
    let pool = MeanPool::with_pipelines(pipelines);
    let call = MeanPoolForward::new(tokens(0, 8), PoolMask::All, f32(1, [batch, 1, 1, 8]));
    calls.plain("mean pool", |e| pool.forward(e, &call));
    let call = MeanPoolBackward::new(call, f32(2, [batch, 1, 1, 8]), tokens(3, 8));
    calls.plain("mean pool, backward", |e| pool.backward(e, &call));
    let conv = CausalConv::with_pipelines(pipelines);
    let call = CausalConvForward::new(tokens(0, 8), f32(1, [1, 1, 8, 4]), tokens(2, 8));
    calls.plain("causal convolution", |e| conv.forward(e, &call));
    let call = CausalConvBackward::new(call, tokens(3, 8)).d_x(tokens(4, 8));
    let size = conv.backward_scratch_size(&call);
    calls.record("causal convolution, backward", size, |e, s| conv.backward(e, &call, s));
    let log_softmax = LogSoftmax::with_pipelines(pipelines);
    let call = LogSoftmaxForward::new(tokens(0, 8), tokens(1, 8));
    calls.plain("log-softmax", |e| log_softmax.forward(e, &call));
    let call = LogSoftmaxBackward::new(call, tokens(2, 8), tokens(3, 8));
    calls.plain("log-softmax, backward", |e| log_softmax.backward(e, &call));
    let top = TopK::with_pipelines(pipelines);
    let call = TopKForward::new(tokens(0, 8), of(1, DType::U32, [batch, 1, length, 2]));
    calls.plain("top k", |e| top.forward(e, &call));
    let indexer = Indexer::with_pipelines(pipelines);
    let call = IndexerForward::new(heads(0), f32(1, [batch, 1, length, 8]), tokens(2, 2));
    let call = call.indices(of(3, DType::U32, [batch, 1, length, 2]));
    calls.record("indexer", indexer.scratch_size(&call), |e, s| indexer.forward(e, &call, s));
    let call = IndexerBackward::new(call, tokens(4, length)).d_w(tokens(5, 2));
    let size = indexer.backward_scratch_size(&call);
    calls.record("indexer, backward", size, |e, s| indexer.backward(e, &call, s));
    let norm = Norm::with_pipelines(pipelines, NormConfig::rms()).expect("an operator");
    let call = NormForward::new(tokens(0, 8), tokens(1, 8));
    calls.plain("norm", |e| norm.forward(e, &call));
    let call = NormBackward::new(call, tokens(2, 8)).d_x(tokens(3, 8));
    let size = norm.backward_scratch_size(&call);
    calls.record("norm, backward", size, |e, s| norm.backward(e, &call, s));
    let elementwise = Elementwise::with_pipelines(pipelines);
    let call = ElementwiseForward::new(q, out);
    calls.plain("elementwise", |e| elementwise.forward(e, &call));
    let call = ElementwiseBackward::new(call, d_out).d_x(heads(6));
    calls.plain("elementwise, backward", |e| elementwise.backward(e, &call));
    calls.outcomes
}

#[test]
fn every_operator_refuses_zero_sizes() {
    let gpu = &full().gpu;
    for (name, outcome) in outcomes(gpu, 2, 5) {
        outcome.unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    let mut wrong = Vec::new();
    for (batch, length) in [(0, 5), (2, 0), (0, 0)] {
        for (name, outcome) in outcomes(gpu, batch, length) {
            // An empty cache has no call to make.
            let error = match outcome {
                Ok(()) if name == "a cache" && batch > 0 => continue,
                Ok(()) => {
                    wrong.push(format!("{name}, {batch} × {length}: accepted"));
                    continue;
                }
                Err(error) => error,
            };
            let text = error.to_string();
            let said =
                [" is 0, but every dimension must be at least 1", "skip calls with an empty batch or length"];
            if !matches!(error, Error::ZeroSize { .. }) || !said.iter().all(|words| text.contains(words)) {
                wrong.push(format!("{name}, {batch} × {length}: {text}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
