//! Invalid views: every operator refuses them. The error names the tensor, the axis, the range and
//! the size.

use wgpu_attention::additive::{AdditiveAttention, AdditiveBackward, AdditiveConfig, AdditiveForward};
use wgpu_attention::attention::{Merge, MergeForward, Partial};
use wgpu_attention::cache::{Append, Tokens};
use wgpu_attention::layers::{
    AttentionalForward, AttentionalVector, DecoderForward, DecoderLayerWeights, DecoderMemory,
    EncoderBackward, EncoderForward, EncoderLayerWeights, FeedForwardWeights, MultiHeadBackward,
    TransformerLayerConfig,
};
use wgpu_attention::linear_attention::{
    LinearAttention, LinearBackward, LinearConfig, LinearForward, LinearState,
};
use wgpu_attention::linformer::{Linformer, LinformerForward};
use wgpu_attention::local::{
    LocalAttention, LocalBackward, LocalConfig, LocalForward, PositionPredictor, PredictorForward,
};
use wgpu_attention::lsh::{LshAttention, LshConfig, LshForward};
use wgpu_attention::mask::Blocks;
use wgpu_attention::matmul::{
    Activation, QuantizedFormat, QuantizedForward, QuantizedMatrix, QuantizedProjection, QuantizedRows,
};
use wgpu_attention::position::{
    AddPositions, PositionTable, Positions, Rope, RopeConfig, RopeSections, Rotate, Rotation, RowPositions,
    TableBackward,
};
use wgpu_attention::rows::{
    CausalConv, CausalConvBackward, CausalConvForward, Elementwise, ElementwiseForward, Embedding,
    EmbeddingBackward, EmbeddingForward, LogSoftmax, LogSoftmaxForward, MeanPool, MeanPoolBackward,
    MeanPoolForward, Norm, NormBackward, NormConfig, NormForward, NormGate, NormWeights, PoolMask, RadixSort,
    Sort, TopK, TopKForward, WeightNorm, WeightNormForward,
};
use wgpu_attention::selected::{
    Indexer, IndexerBackward, IndexerForward, NativeSparseAttention, NativeSparseBackward,
    NativeSparseBranches, NativeSparseConfig, NativeSparseForward, SelectedAttention, SelectedBackward,
    SelectedConfig, SelectedForward,
};
use wgpu_attention::{Backward, TransformerDecoder, TransformerEncoder};

use super::*;

/// Makes the views of a call, each in a separate buffer. The view with index `at` is spoiled.
struct Views<'a> {
    buffers: &'a [wgpu::Buffer],
    spoil: &'a dyn for<'b> Fn(TensorView<'b>) -> TensorView<'b>,
    at: usize,
    made: std::cell::Cell<usize>,
}

impl<'a> Views<'a> {
    fn of(&self, dtype: DType, shape: [usize; 4]) -> TensorView<'a> {
        let n = self.made.replace(self.made.get() + 1);
        let view = TensorView::new(&self.buffers[n], dtype, shape);
        if n == self.at { (self.spoil)(view) } else { view }
    }

    fn f32(&self, shape: [usize; 4]) -> TensorView<'a> {
        self.of(DType::F32, shape)
    }

    fn u32(&self, shape: [usize; 4]) -> TensorView<'a> {
        self.of(DType::U32, shape)
    }

    fn linear(&self, [rows, columns]: [usize; 2]) -> Linear<'a> {
        let weight = self.f32([1, 1, rows, columns]);
        Linear { weight, bias: Some(self.f32([1, 1, 1, rows])) }
    }

    fn layer(&self) -> MultiHeadWeights<'a> {
        let [query, key, value, out] = [(); 4].map(|()| self.linear([8, 8]));
        MultiHeadWeights { query, key, value, out, bias_kv: None, qk_norm: None, gate: None }
    }
}

type Call = fn(&Pipelines, &Views, &mut wgpu::CommandEncoder) -> Result<(), Error>;

/// `[batch, heads, length, dim]`; below, rows of a layer.
const HEADS: [usize; 4] = [1, 2, 6, 8];
const LSE: [usize; 4] = [1, 2, 6, 1];
const ROWS: [usize; 4] = [2, 1, 6, 8];

/// Native sparse attention with separate keys for each branch, or its gradients.
fn native_sparse(p: &Pipelines, v: &Views, backward: bool) -> Result<(), Error> {
    let config = NativeSparseConfig::new(Config::new(2, 8)).compression(2, 1).selection(2, 2).always(1, 1);
    let operator = NativeSparseAttention::with_pipelines(p, config)?;
    let [q, k, value, out] = [(); 4].map(|()| v.f32(HEADS));
    let blocks = [1, 2, 5, 8];
    let call = NativeSparseForward::new(q, k, value, v.f32([1, 2, 6, 3]), out)
        .compressed(v.f32(blocks), v.f32(blocks))
        .window_keys(v.f32(HEADS), v.f32(HEADS))
        .branches(NativeSparseBranches {
            out: v.f32([3, 2, 6, 8]),
            lse: v.f32([3, 2, 6, 1]),
            indices: v.u32([1, 2, 6, 2]),
        });
    if !backward {
        return operator.scratch_size(&call).map(drop);
    }
    // The backward pass does not read `out`: its gradient takes the place.
    let call = NativeSparseBackward::new(call, out)
        .d_q(v.f32(HEADS))
        .d_k(v.f32(HEADS))
        .d_v(v.f32(HEADS))
        .d_gates(v.f32([1, 2, 6, 3]))
        .d_compressed(v.f32(blocks), v.f32(blocks))
        .d_window_keys(v.f32(HEADS), v.f32(HEADS));
    operator.backward_scratch_size(&call).map(drop)
}

/// One call of each operator, with all its tensors.
const CALLS: [(&str, Call); 35] = [
    ("attention", |p, v, _| {
        let mask = Mask::causal().lengths(v.u32([1, 1, 1, 1])).bias(v.f32([1, 2, 6, 6]));
        let keep = Dropout::Given { p: 0.5, keep: v.of(DType::Bool, [1, 2, 6, 6]) };
        let call = Forward::new(v.f32(HEADS), v.f32(HEADS), v.f32(HEADS), v.f32(HEADS));
        let call = call.mask(mask).dropout(keep).lse(v.f32(LSE)).weights(v.f32([1, 2, 6, 6]));
        Attention::with_pipelines(p, Config::new(2, 8))?.scratch_size(&call).map(drop)
    }),
    ("attention's scores", |p, v, _| {
        let call = Forward::new(v.f32(HEADS), v.f32(HEADS), v.f32(HEADS), v.f32(HEADS));
        let call = call.scores(v.f32([1, 2, 6, 6]), ScoreStage::Scaled);
        Attention::with_pipelines(p, Config::new(2, 8))?.scratch_size(&call).map(drop)
    }),
    ("attention backward", |p, v, _| {
        let [q, k, value, out, d_out] = [(); 5].map(|()| v.f32(HEADS));
        let forward = Forward::new(q, k, value, out).lse(v.f32(LSE));
        let call = Backward::new(forward, d_out).d_lse(v.f32(LSE));
        let call = call.d_q(v.f32(HEADS)).d_k(v.f32(HEADS)).d_v(v.f32(HEADS));
        Attention::with_pipelines(p, Config::new(2, 8))?.backward_scratch_size(&call).map(drop)
    }),
    ("classify", |p, v, encoder| {
        let blocks = Blocks::new(v.u32([1, 1, 1, 1]), [8, 8]);
        Attention::with_pipelines(p, Config::new(2, 8))?.classify(
            encoder,
            &Mask::causal(),
            [1, 6, 6],
            &blocks,
        )
    }),
    ("layer", |p, v, _| {
        let layer = MultiHeadAttention::with_pipelines(p, MultiHeadConfig::new(8, 2), &v.layer())?;
        let call = MultiHeadForward::new(v.f32(ROWS), v.f32(ROWS), v.f32(ROWS), v.f32(ROWS));
        layer.scratch_size(&call.context(v.f32(ROWS))).map(drop)
    }),
    ("layer backward", |p, v, _| {
        let layer = MultiHeadAttention::with_pipelines(p, MultiHeadConfig::new(8, 2), &v.layer())?;
        // Saved activations of the forward call are not read.
        let out = TensorView::new(&v.buffers[39], DType::F32, ROWS);
        let call = MultiHeadForward::new(v.f32(ROWS), v.f32(ROWS), v.f32(ROWS), out);
        let back = MultiHeadBackward::new(call, v.f32(ROWS)).d_query(v.f32(ROWS)).d_key(v.f32(ROWS));
        layer.backward_scratch_size(&back.d_value(v.f32(ROWS))).map(drop)
    }),
    ("encoder", |p, v, _| {
        let feed_forward = FeedForwardWeights { up: v.linear([12, 8]), gate: None, down: v.linear([8, 12]) };
        let norm = NormWeights { weight: Some(v.f32([1, 1, 1, 8])), bias: None };
        let layer = EncoderLayerWeights { attention: v.layer(), feed_forward, norms: [norm; 2] };
        let config = TransformerLayerConfig::new(MultiHeadConfig::new(8, 2), 12);
        let stack = TransformerEncoder::with_pipelines(p, config, &[layer; 2], None)?;
        let call = EncoderForward::new(v.f32(ROWS), v.f32(ROWS)).hidden(v.f32(ROWS));
        stack.scratch_size(&call)?;
        stack.backward_scratch_size(&EncoderBackward::new(call, v.f32(ROWS)).d_x(v.f32(ROWS))).map(drop)
    }),
    ("decoder", |p, v, _| {
        let feed_forward = FeedForwardWeights { up: v.linear([12, 8]), gate: None, down: v.linear([8, 12]) };
        let norm = NormWeights { weight: Some(v.f32([1, 1, 1, 8])), bias: None };
        let [self_attention, cross_attention] = [v.layer(), v.layer()];
        let layer = DecoderLayerWeights { self_attention, cross_attention, feed_forward, norms: [norm; 3] };
        let config = TransformerLayerConfig::new(MultiHeadConfig::new(8, 2), 12);
        let stack = TransformerDecoder::with_pipelines(p, config, &[layer], None)?;
        let memory = DecoderMemory { keys: v.f32([2, 2, 5, 4]), values: v.f32([2, 2, 5, 4]) };
        stack.scratch_size(&DecoderForward::new(v.f32(ROWS), memory, v.f32(ROWS))).map(drop)
    }),
    ("projection", |p, v, encoder| {
        let call = ProjectionForward::new(v.f32([1, 1, 6, 8]), v.linear([16, 8]), v.f32(HEADS));
        Projection::with_pipelines(p).forward(encoder, &[call])
    }),
    ("quantised products", |p, v, encoder| {
        let operator = QuantizedProjection::with_pipelines(p);
        let blocks = QuantizedMatrix::new(&v.buffers[39], QuantizedFormat::Q4_1, [16, 32]);
        let call = QuantizedForward::new(v.f32([1, 1, 6, 32]), blocks, v.f32([1, 1, 6, 16]));
        operator.forward(encoder, &[call])?;
        operator.rows(encoder, &QuantizedRows::new(blocks, v.u32([1, 1, 6, 1]), v.f32([1, 1, 6, 32])))
    }),
    ("merge", |p, v, encoder| {
        let [a, b, to] = [(); 3].map(|()| Partial { out: v.f32(HEADS), lse: v.f32(LSE) });
        Merge::with_pipelines(p).forward(encoder, &MergeForward::new(&[a, b], to))
    }),
    ("positions", |p, v, encoder| {
        let positions = Positions::with_pipelines(p);
        let at = RowPositions::Tensor(v.u32([1, 1, 6, 1]));
        let [cos, sin] = [(); 2].map(|()| v.f32([1, 1, 6, 4]));
        let rotation = Rotation::CosSin { cos, sin, order: Default::default() };
        positions.rotate(
            encoder,
            &Rotate::new(v.f32(HEADS), rotation, RowPositions::Start(0)).out(v.f32(HEADS)),
        )?;
        let config = RopeConfig::new(8).sections(RopeSections::Contiguous([2, 1, 1]));
        let rope = Rope::new(p.device(), config)?;
        let axes = RowPositions::Tensor(v.u32([1, 3, 6, 1]));
        positions.rotate(encoder, &Rotate::new(v.f32(HEADS), &rope, axes).out(v.f32(HEADS)))?;
        let table = PositionTable::Learned(v.f32([1, 1, 9, 8]));
        let call = AddPositions::new(v.f32(HEADS), table, at).out(v.f32(HEADS));
        positions.add(encoder, &call)?;
        let back = TableBackward::new(call, v.f32(HEADS), v.f32([1, 1, 9, 8]));
        positions.table_backward(encoder, &back)
    }),
    ("cache", |p, v, encoder| {
        let mut cache = Cache::with_pipelines(p, CacheConfig::new(2, 8, 16))?;
        cache.advance(encoder, Tokens::All(6))?;
        cache.append(encoder, 0, &Append::new(v.f32(HEADS), v.f32(HEADS)))
    }),
    ("Linformer", |p, v, _| {
        let [q, k, value, out] = [(); 4].map(|()| v.f32(HEADS));
        let call = LinformerForward::new(q, k, value, v.f32([1, 1, 4, 6]), out);
        Linformer::with_pipelines(p, Config::new(2, 8), 4)?.scratch_size(&call).map(drop)
    }),
    ("LSH", |p, v, _| {
        let wide = [1, 2, 24, 8];
        let (rotations, buckets) = (v.f32([1, 2, 8, 2]), v.u32([1, 2, 2, 24]));
        let call = LshForward::new(v.f32(wide), v.f32(wide), rotations, buckets, v.f32(wide));
        let operator = LshAttention::with_pipelines(p, LshConfig::new(2, 8, 2, 4, 8))?;
        operator.scratch_size(&call.lse(v.f32([1, 2, 24, 1]))).map(drop)
    }),
    ("selected", |p, v, _| {
        let [q, k, value, out] = [(); 4].map(|()| v.f32(HEADS));
        let mask = Mask::causal().lengths(v.u32([1, 1, 1, 1])).sink_logits(v.f32([1, 2, 1, 1]));
        let call = Forward::new(q, k, value, out).mask(mask).lse(v.f32(LSE));
        let call = SelectedForward::new(call, v.u32([1, 1, 6, 3])).weights(v.f32([1, 2, 6, 3]));
        let config = SelectedConfig::new(Config::new(2, 8)).window(2);
        SelectedAttention::with_pipelines(p, config)?.scratch_size(&call).map(drop)
    }),
    ("selected backward", |p, v, _| {
        let [q, k, value, out, d_out] = [(); 5].map(|()| v.f32(HEADS));
        let mask = Mask::causal().sink_logits(v.f32([1, 2, 1, 1]));
        let call = Backward::new(Forward::new(q, k, value, out).mask(mask).lse(v.f32(LSE)), d_out);
        let call = call.d_q(v.f32(HEADS)).d_k(v.f32(HEADS)).d_v(v.f32(HEADS)).d_lse(v.f32(LSE));
        let call = SelectedBackward::new(call.d_sinks(v.f32([1, 2, 1, 1])), v.u32([1, 2, 6, 3]));
        let operator = SelectedAttention::with_pipelines(p, SelectedConfig::new(Config::new(2, 8)))?;
        operator.backward_scratch_size(&call).map(drop)
    }),
    ("native sparse", |p, v, _| native_sparse(p, v, false)),
    ("native sparse backward", |p, v, _| native_sparse(p, v, true)),
    ("radix sort", |p, v, _| {
        let [keys, order, ranks] = [(); 3].map(|()| v.u32([1, 2, 2, 24]));
        RadixSort::with_pipelines(p).scratch_size(&Sort::new(keys, order).ranks(ranks)).map(drop)
    }),
    ("additive", |p, v, _| {
        let operator = AdditiveAttention::with_pipelines(p, AdditiveConfig::new(2, 8))?;
        let vector = v.f32([1, 1, 1, 8]);
        let [q, k, value, out] = [(); 4].map(|()| v.f32(HEADS));
        let call = AdditiveForward::new(q, k, value, vector, out).lse(v.f32(LSE));
        operator.scratch_size(&call)?;
        let call = AdditiveBackward::new(call, v.f32(HEADS));
        operator.backward_scratch_size(&call.d_q(v.f32(HEADS))).map(drop)
    }),
    ("weight norm", |p, v, encoder| {
        let call = WeightNormForward::new(v.f32([1, 3, 1, 8]), v.f32([1, 3, 1, 1]), v.f32([1, 3, 1, 8]));
        WeightNorm::with_pipelines(p).forward(encoder, &call)
    }),
    ("attentional vector", |p, v, _| {
        let linear = v.linear([8, 16]);
        let call = AttentionalForward::new(v.f32(ROWS), v.f32(ROWS), linear, v.f32(ROWS));
        AttentionalVector::with_pipelines(p).scratch_size(&call).map(drop)
    }),
    ("local", |p, v, _| {
        let operator = LocalAttention::with_pipelines(p, LocalConfig::new(2, 8, 2))?;
        let tensors = [(); 3].map(|()| v.f32(HEADS));
        let call = LocalForward::new(tensors, v.f32(LSE), v.f32(HEADS));
        operator.scratch_size(&call)?;
        let back = LocalBackward::new(call, v.f32(HEADS)).d_q(v.f32(HEADS));
        operator.backward_scratch_size(&back.d_positions(v.f32(LSE))).map(drop)
    }),
    ("predictor", |p, v, _| {
        let rows = [1, 1, 6, 8];
        let vector = v.f32([1, 1, 1, 5]);
        let call = PredictorForward::new(v.f32(rows), v.linear([5, 8]), vector, 6, v.f32([1, 1, 6, 1]));
        PositionPredictor::with_pipelines(p).scratch_size(&call).map(drop)
    }),
    ("linear", |p, v, _| {
        let operator = LinearAttention::with_pipelines(p, LinearConfig::new(2, 8).causal(true))?;
        let [q, k, value, out] = [(); 4].map(|()| v.f32(HEADS));
        let (state, norm) = (v.f32([1, 2, 8, 8]), v.f32([1, 2, 8, 1]));
        let call = LinearForward::new(q, k, value, out).lengths(v.u32([1, 1, 1, 1]));
        operator.scratch_size(&call.state(LinearState { state, norm, log_scale: None }))?;
        let back = LinearBackward::new(call, v.f32(HEADS)).d_q(v.f32(HEADS));
        operator.backward_scratch_size(&back.d_k(v.f32(HEADS)).d_v(v.f32(HEADS))).map(drop)
    }),
    ("norm", |p, v, encoder| {
        let norm = Norm::with_pipelines(p, NormConfig::layer())?;
        let call = NormForward::new(v.f32(ROWS), v.f32(ROWS)).residual(v.f32(ROWS)).sum(v.f32(ROWS));
        let call = call.weight(v.f32([1, 1, 1, 8])).bias(v.f32([1, 1, 1, 8]));
        norm.forward(encoder, &call)?;
        let back = NormBackward::new(call, v.f32(ROWS)).d_x(v.f32(ROWS)).d_weight(v.f32([1, 1, 1, 8]));
        norm.backward_scratch_size(&back).map(drop)
    }),
    ("activation", |p, v, encoder| {
        let call = ElementwiseForward::new(v.f32(ROWS), v.f32(ROWS)).multiply(v.f32(ROWS));
        Elementwise::with_pipelines(p).forward(encoder, &call)
    }),
    ("embedding", |p, v, encoder| {
        let embedding = Embedding::with_pipelines(p);
        let ids = v.u32([2, 1, 6, 1]);
        let call = EmbeddingForward::new(ids, v.f32([1, 1, 9, 8]), v.f32(ROWS));
        embedding.forward(encoder, &call)?;
        let back = EmbeddingBackward::new(call, v.f32(ROWS), v.f32([1, 1, 9, 8]));
        embedding.backward_scratch_size(&back).map(drop)
    }),
    ("mean pool", |p, v, encoder| {
        let pool = MeanPool::with_pipelines(p);
        let rows = PoolMask::Lengths(v.u32([2, 1, 1, 1]));
        let call = MeanPoolForward::new(v.f32(ROWS), rows, v.f32([2, 1, 1, 8]));
        pool.forward(encoder, &call)?;
        pool.backward(encoder, &MeanPoolBackward::new(call, v.f32([2, 1, 1, 8]), v.f32(ROWS)))
    }),
    ("gated norm", |p, v, encoder| {
        let norm = Norm::with_pipelines(p, NormConfig::rms())?;
        let gate = NormGate::before(v.f32(ROWS), Activation::Silu);
        let call = NormForward::new(v.f32(ROWS), v.f32(ROWS)).gate(gate);
        norm.forward(encoder, &call)?;
        let back = NormBackward::new(call, v.f32(ROWS)).d_x(v.f32(ROWS)).d_gate(v.f32(ROWS));
        norm.backward_scratch_size(&back).map(drop)
    }),
    ("causal convolution", |p, v, encoder| {
        let conv = CausalConv::with_pipelines(p);
        let states = [2, 1, 3, 8];
        let call = CausalConvForward::new(v.f32(ROWS), v.f32([1, 1, 8, 4]), v.f32(ROWS));
        let call = call.bias(v.f32([1, 1, 1, 8])).lengths(v.u32([2, 1, 1, 1]));
        conv.forward(encoder, &call.state(v.f32([4, 1, 3, 8])).slots(v.u32([2, 1, 1, 1])))?;
        let call = call.initial_state(v.f32(states)).final_state(v.f32(states));
        conv.forward(encoder, &call)?;
        let back = CausalConvBackward::new(call, v.f32(ROWS)).d_final_state(v.f32(states));
        let back = back.d_x(v.f32(ROWS)).d_weight(v.f32([1, 1, 8, 4])).d_bias(v.f32([1, 1, 1, 8]));
        conv.backward_scratch_size(&back.d_initial_state(v.f32(states))).map(drop)
    }),
    ("log-softmax", |p, v, encoder| {
        LogSoftmax::with_pipelines(p).forward(encoder, &LogSoftmaxForward::new(v.f32(ROWS), v.f32(ROWS)))
    }),
    ("top-k", |p, v, encoder| {
        let call = TopKForward::new(v.f32(ROWS), v.u32([2, 1, 6, 3])).values(v.f32([2, 1, 6, 3]));
        TopK::with_pipelines(p).forward(encoder, &call)
    }),
    ("indexer", |p, v, _| {
        let indexer = Indexer::with_pipelines(p);
        let (list, matrix) = ([2, 1, 6, 3], [2, 1, 6, 9]);
        let of = || IndexerForward::new(v.f32([2, 4, 6, 8]), v.f32([2, 1, 9, 8]), v.f32([2, 1, 6, 4]));
        let call = of().indices(v.u32(list)).values(v.f32(list)).scores(v.f32(matrix));
        indexer.scratch_size(&call).map(drop)?;
        let words = IndexerForward::new(v.f32([2, 4, 6, 8]), v.u32([2, 1, 9, 2]), v.f32([2, 1, 6, 4]));
        indexer.scratch_size(&words.key_scales(v.f32([2, 1, 9, 2])).indices(v.u32(list))).map(drop)?;
        let back = IndexerBackward::new(of(), v.f32(list)).indices(v.u32(list)).d_q(v.f32([2, 4, 6, 8]));
        let back = back.d_k(v.f32([2, 1, 9, 8])).d_w(v.f32([2, 1, 6, 4]));
        indexer.backward_scratch_size(&back).map(drop)
    }),
];

pub(super) fn wrong_views() -> Seen {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..40).map(|_| gpu.buffer(1 << 13).expect("a buffer")).collect();
    let mut seen = Seen::new();
    for (name, call) in CALLS {
        let run = |at, spoil: &dyn for<'b> Fn(TensorView<'b>) -> TensorView<'b>| {
            let views = Views { buffers: &buffers, spoil, at, made: 0.into() };
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            let result = call(gpu.pipelines(), &views, &mut encoder);
            (result, views.made.get())
        };
        let (result, tensors) = run(usize::MAX, &|view| view);
        result.unwrap_or_else(|e| panic!("{name} works: {e}"));
        for n in 0..tensors {
            let context = format!("{name}, tensor {n}");
            let mut refused = |words: &[&str], spoil: &dyn for<'b> Fn(TensorView<'b>) -> TensorView<'b>| {
                let error = run(n, spoil).0.expect_err(&context);
                seen.insert(read(&context, &error, &[words, &["`"]].concat()));
            };
            // The shape is unchanged: only the range is wrong.
            refused(&["`slice(2, 1, ", "ends past axis 2 ("], &|view| view.slice(2, 1, view.shape()[2]));
            // Later changes of the view do not repair it.
            refused(&["slice(3, 2, ", "axis 3 ("], &|view| {
                let [.., d] = view.shape();
                view.slice(3, 2, d).with_offset(0).slice(3, 0, d)
            });
            refused(&["`slice` got axis 4", "axes 0 to 3"], &|view| view.slice(4, 0, 1));
            refused(&["`transposed` got axis 5", "axes 0 to 3"], &|view| view.transposed(1, 5));
        }
    }
    // Ranges, with their sizes.
    let view = TensorView::new(&buffers[0], DType::F32, [1, 1, 64, 8]);
    let out = TensorView::new(&buffers[1], DType::F32, [1, 1, 10, 8]);
    let soft = LogSoftmax::with_pipelines(gpu.pipelines());
    let run = |x| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        soft.forward(&mut encoder, &LogSoftmaxForward::new(x, out))
    };
    run(view.slice(2, 54, 10)).expect("the last ten");
    run(view.slice(2, 4, 60).slice(2, 50, 10)).expect("a slice of a slice");
    for (start, words) in
        [(55, "slice(2, 55, 10)"), (60, "slice(2, 60, 10)"), (usize::MAX, "axis 2 (length)")]
    {
        let error = run(view.slice(2, start, 10)).expect_err("a slice past the end");
        read("a slice past the end", &error, &["`x`", words, "10)", "has 64", "at most 64"]);
    }
    let error = run(view.slice(2, 4, 60).slice(2, 51, 10)).expect_err("past the end of a slice");
    read("past the end of a slice", &error, &["`x`", "slice(2, 51, 10)", "has 60"]);
    let error = run(view.slice(2, 4, 0)).expect_err("no rows");
    read("no rows", &error, &["`x`", "length is 0"]);
    seen
}
