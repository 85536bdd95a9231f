//! Each operator's calls. Calls create nothing that `prepare` did not create, and a second call
//! creates nothing. A caller's pass and a prepared call give the same bits. A refused call records
//! nothing, and neither does a call whose kernels are disabled.

use wgpu_attention::attention::{Merge, MergeBackward, MergeForward, PartGradients, Partial, ScoreStage};
use wgpu_attention::layers::{
    AttentionalBackward, AttentionalForward, AttentionalVector, DecoderForward, DecoderLayerWeights,
    DecoderMemory, EncoderBackward, EncoderForward, EncoderLayerWeights, FeedForwardWeights, NormOrder,
    TransformerLayerConfig,
};
use wgpu_attention::linear_attention::{
    LinearAttention, LinearBackward, LinearConfig, LinearForward, UpdateRule,
};
use wgpu_attention::linformer::{Linformer, LinformerForward};
use wgpu_attention::local::{LocalAttention, LocalBackward, LocalConfig, LocalForward};
use wgpu_attention::lsh::{LshAttention, LshBackward, LshConfig, LshForward};
use wgpu_attention::matmul::{
    Activation, QuantizedFormat, QuantizedForward, QuantizedMatrix, QuantizedProjection, QuantizedRows,
};
use wgpu_attention::position::{
    AddPositions, PositionTable, Positions, Rope, RopeConfig, RopeSections, Rotate, RowPositions,
};
use wgpu_attention::recurrent::{
    Decay, RecurrentAttention, RecurrentBackward, RecurrentConfig, RecurrentForward,
};
use wgpu_attention::rows::{
    CausalConv, CausalConvBackward, CausalConvForward, Elementwise, ElementwiseBackward, ElementwiseForward,
    Embedding, EmbeddingBackward, EmbeddingForward, LogSoftmax, LogSoftmaxBackward, LogSoftmaxForward,
    MeanPool, MeanPoolBackward, MeanPoolForward, Norm, NormBackward, NormConfig, NormForward, NormGate,
    NormWeights, PoolMask, RadixSort, Sort, TopK, TopKForward, WeightNorm, WeightNormBackward,
    WeightNormForward,
};
use wgpu_attention::selected::{
    Indexer, IndexerBackward, IndexerForward, NativeSparseAttention, NativeSparseBackward,
    NativeSparseBranches, NativeSparseConfig, NativeSparseForward, SelectedAttention, SelectedBackward,
    SelectedConfig, SelectedForward,
};
use wgpu_attention::tuning::Family;
use wgpu_attention::tuning::Family::*;
use wgpu_attention::{Backward, Error, Prepared, Recorder, TransformerDecoder, TransformerEncoder, WarmUp};

use super::bench::{How, call, reshaped, with_separate_buffers_and_one, within_defaults};
use super::*;

const ROWS: [usize; 4] = [2, 1, 5, 12];
const VECTOR: [usize; 4] = [1, 1, 1, 12];

#[test]
fn norms_and_activations() {
    with_separate_buffers_and_one(|b| {
        let [x, residual, d_out] = [0, 1, 2].map(|n| b.read(n, ROWS));
        let (weight, out) = (b.read(3, VECTOR), b.written(0, ROWS));
        let norm = Norm::with_pipelines(b.gpu().pipelines(), NormConfig::layer()).expect("a norm");
        let call = NormForward::new(x, out).residual(residual).weight(weight).sum(b.written(1, ROWS));
        let wrong = NormForward::new(x, x).residual(residual);
        b.check("norm", &[Norms], call!(norm, [forward, prepare], &call, &wrong));
        let back = NormBackward::new(call, d_out).d_x(out).d_weight(b.written(2, VECTOR));
        let wrong = back.d_x(d_out);
        let mut scratch = b.scratch(norm.backward_scratch_size(&back));
        b.check(
            "norm backward",
            &[NormGradients, RowSums],
            call!(norm, [backward, prepare_backward], &back, &wrong, &mut scratch),
        );
        let gate = NormGate::after(residual, Activation::Silu);
        let call = NormForward::new(x, out).weight(weight).gate(gate);
        let wrong = NormForward::new(x, x).gate(NormGate::after(x, Activation::Silu));
        b.check("gated norm", &[Norms], call!(norm, [forward, prepare], &call, &wrong));
        let back = NormBackward::new(call, d_out).d_x(out).d_gate(b.written(1, ROWS));
        let back = back.d_weight(b.written(2, VECTOR));
        let wrong = back.d_x(d_out);
        let mut scratch = b.scratch(norm.backward_scratch_size(&back));
        b.check(
            "gated norm backward",
            &[NormGradients, RowSums],
            call!(norm, [backward, prepare_backward], &back, &wrong, &mut scratch),
        );
        let elementwise = Elementwise::with_pipelines(b.gpu().pipelines());
        let call = ElementwiseForward::new(x, out).activation(Activation::Silu).multiply(residual);
        let wrong = ElementwiseForward::new(x, x);
        b.check("elementwise", &[Elementwise], call!(elementwise, [forward, prepare], &call, &wrong));
        let back = ElementwiseBackward::new(call, d_out).d_x(out).d_multiply(b.written(1, ROWS));
        let wrong = back.d_x(d_out);
        b.check(
            "elementwise backward",
            &[ElementwiseGradients],
            call!(elementwise, [backward, prepare_backward], &back, &wrong),
        );
        let unit = WeightNorm::with_pipelines(b.gpu().pipelines());
        let (vectors, gain) = ([1, 3, 1, 12], [1, 3, 1, 1]);
        let inputs = [b.read(0, vectors), b.read(1, gain)];
        let call = WeightNormForward::new(inputs[0], inputs[1], b.written(0, vectors));
        let wrong = WeightNormForward::new(inputs[0], inputs[1], inputs[0]);
        b.check("weight norm", &[WeightNorms], call!(unit, [forward, prepare], &call, &wrong));
        let d_out = b.read(2, vectors);
        let back = WeightNormBackward::new(call, d_out, [b.written(0, vectors), b.written(1, gain)]);
        let wrong = WeightNormBackward::new(call, d_out, [d_out, b.written(1, gain)]);
        b.check(
            "weight norm backward",
            &[WeightNormGradients],
            call!(unit, [backward, prepare_backward], &back, &wrong),
        );
    });
}

#[test]
fn embeddings_and_means() {
    with_separate_buffers_and_one(|b| {
        let (table, ids) = ([1, 1, 9, 12], b.numbers([2, 1, 5, 1]));
        let embedding = Embedding::with_pipelines(b.gpu().pipelines());
        let rows = b.read(0, table);
        let call = EmbeddingForward::new(ids, rows, b.written(0, ROWS));
        let wrong = EmbeddingForward::new(ids, rows, reshaped(rows, ROWS));
        b.check("embedding", &[Embeddings], call!(embedding, [forward, prepare], &call, &wrong));
        let back = EmbeddingBackward::new(call, b.read(0, ROWS), b.written(0, table));
        let d_out = b.read(0, ROWS);
        let wrong = EmbeddingBackward::new(call, d_out, reshaped(d_out, table));
        let mut scratch = b.scratch(embedding.backward_scratch_size(&back));
        b.check(
            "embedding backward",
            &[RadixSort, EmbeddingGradients],
            call!(embedding, [backward, prepare_backward], &back, &wrong, &mut scratch),
        );
        let pool = MeanPool::with_pipelines(b.gpu().pipelines());
        let (x, means) = (b.read(0, ROWS), [2, 1, 1, 12]);
        let rows = PoolMask::Lengths(b.numbers([2, 1, 1, 1]));
        let call = MeanPoolForward::new(x, rows, b.written(0, means)).normalize(true);
        let wrong = MeanPoolForward::new(x, rows, reshaped(x, means));
        b.check("mean pool", &[MeanPools], call!(pool, [forward, prepare], &call, &wrong));
        let back = MeanPoolBackward::new(call, b.read(1, means), b.written(0, ROWS));
        let wrong = MeanPoolBackward::new(call, b.read(1, means), x);
        b.check(
            "mean pool backward",
            &[MeanPoolGradients],
            call!(pool, [backward, prepare_backward], &back, &wrong),
        );
    });
}

#[test]
fn causal_convolutions() {
    with_separate_buffers_and_one(|b| {
        let conv = CausalConv::with_pipelines(b.gpu().pipelines());
        for rows in [5, 20] {
            let (shape, states) = ([2, 1, rows, 12], [2, 1, 3, 12]);
            let (x, weight, out) = (b.read(0, shape), b.read(1, [1, 1, 12, 4]), b.written(0, shape));
            let plain = CausalConvForward::new(x, weight, out).bias(b.read(2, VECTOR));
            let plain = plain.activation(Activation::Silu);
            let call = plain.initial_state(b.read(3, states)).final_state(b.written(1, states));
            let wrong = plain.final_state(reshaped(x, states));
            b.check("causal convolution", &[CausalConvs], call!(conv, [forward, prepare], &call, &wrong));
            let forward = plain.initial_state(b.read(3, states));
            let d_out = b.read(4, shape);
            let back = CausalConvBackward::new(forward, d_out).d_x(b.written(0, shape));
            let back = back.d_weight(b.written(1, [1, 1, 12, 4])).d_bias(b.written(2, VECTOR));
            let wrong = back.d_x(d_out);
            let mut scratch = b.scratch(conv.backward_scratch_size(&back));
            b.check(
                "causal convolution backward",
                &[CausalConvGradients, RowSums],
                call!(conv, [backward, prepare_backward], &back, &wrong, &mut scratch),
            );
        }
    });
}

#[test]
fn logits_and_sorts() {
    with_separate_buffers_and_one(|b| {
        let (x, out) = (b.read(0, ROWS), b.written(0, ROWS));
        let soft = LogSoftmax::with_pipelines(b.gpu().pipelines());
        let (call, wrong) = (LogSoftmaxForward::new(x, out), LogSoftmaxForward::new(x, x));
        b.check("log-softmax", &[LogSoftmax], call!(soft, [forward, prepare], &call, &wrong));
        // The output of the wrong forward call is `x`.
        let back = LogSoftmaxBackward::new(wrong, b.read(1, ROWS), out);
        let wrong = LogSoftmaxBackward::new(wrong, b.read(1, ROWS), x);
        b.check(
            "log-softmax backward",
            &[LogSoftmaxGradients],
            call!(soft, [backward, prepare_backward], &back, &wrong),
        );
        let top = TopK::with_pipelines(b.gpu().pipelines());
        let found = [2, 1, 5, 3];
        let call = TopKForward::new(x, b.written_as(DType::U32, 0, found)).values(b.written(1, found));
        let indices = TensorView::new(x.buffer(), DType::U32, found).with_offset(x.offset());
        let wrong = TopKForward::new(x, indices);
        b.check("top-k", &[TopK], call!(top, [forward, prepare], &call, &wrong));
        let (row, many) = ([1, 1, 1, 100], [1, 1, 1, 90]);
        let x = b.read(0, row);
        let call = TopKForward::new(x, b.written_as(DType::U32, 0, many)).values(b.written(1, many));
        let wrong =
            TopKForward::new(x, TensorView::new(x.buffer(), DType::U32, many).with_offset(x.offset()));
        let mut scratch = b.scratch(top.scratch_size(&call));
        let call = call!(top, [forward_with, prepare_with], &call, &wrong, &mut scratch);
        b.check("top-k with a scratch", &[TopK], call);
        let sort = RadixSort::with_pipelines(b.gpu().pipelines());
        let keys = b.numbers([1, 2, 2, 200]);
        let order = |n: usize| b.written_as(DType::U32, n, [1, 2, 2, 200]);
        let call = Sort::new(keys, order(0)).ranks(order(1)).bits(4);
        let wrong = Sort::new(keys, keys);
        let mut scratch = b.scratch(sort.scratch_size(&call));
        b.check("radix sort", &[RadixSort], call!(sort, [forward, prepare], &call, &wrong, &mut scratch));
    });
}

#[test]
fn indexers() {
    with_separate_buffers_and_one(|b| {
        let (wide, keys, token) = ([1, 2, 6, 8], [1, 1, 12, 8], [1, 1, 6, 2]);
        let (list, matrix) = ([1, 1, 6, 3], [1, 1, 6, 12]);
        let [q, k, w] = [b.read(0, wide), b.read(1, keys), b.read(2, token)];
        let indexer = Indexer::with_pipelines(b.gpu().pipelines());
        let forward = IndexerForward::new(q, k, w).mask(Mask::causal());
        let call = forward.indices(b.written_as(DType::U32, 0, list)).values(b.written(1, list));
        let wrong = forward.values(b.written(1, list)).indices(reshaped_numbers(q, list));
        let mut scratch = b.scratch(indexer.scratch_size(&call));
        let needs = [TopK, Indexers];
        b.check("indexer", &needs, call!(indexer, [forward, prepare], &call, &wrong, &mut scratch));
        for (listed, d_scores) in [(None, b.read(3, matrix)), (Some(b.numbers(list)), b.read(3, list))] {
            let back = IndexerBackward::new(forward, d_scores).indices(listed);
            let back = back.d_q(b.written(0, wide)).d_k(b.written(1, keys)).d_w(b.written(2, token));
            let wrong = back.d_q(q);
            let mut scratch = b.scratch(indexer.backward_scratch_size(&back));
            b.check(
                "indexer backward",
                &[Indexers, IndexerGradients],
                call!(indexer, [backward, prepare_backward], &back, &wrong, &mut scratch),
            );
        }
    });
}

/// Returns a tensor of numbers at the beginning of another tensor.
fn reshaped_numbers(t: TensorView<'_>, shape: [usize; 4]) -> TensorView<'_> {
    TensorView::new(t.buffer(), DType::U32, shape).with_offset(t.offset())
}

#[test]
fn quantized_products() {
    with_separate_buffers_and_one(|b| {
        for (format, rows) in QuantizedFormat::ALL.into_iter().zip([3, 17]) {
            let (blocks, first) = b.input(&b.floats[1]);
            let weight = QuantizedMatrix::new(blocks, format, [16, 32]).with_offset(4 * first);
            let x = b.read(0, [1, 1, rows, 32]);
            let out = |width| b.written(0, [1, 1, rows, width]);
            let operator = QuantizedProjection::with_pipelines(b.gpu().pipelines());
            let call = [QuantizedForward::new(x, weight, out(16))];
            let wrong = [QuantizedForward::new(x, weight, x.slice(3, 0, 16))];
            b.check(
                "quantized products",
                &[QuantizedProducts],
                call!(operator, [forward, prepare], &call, &wrong),
            );
            let ids = b.numbers([1, 1, rows, 1]);
            let call = QuantizedRows::new(weight, ids, out(32));
            let in_blocks = TensorView::new(blocks, DType::F32, [1, 1, rows, 32]).with_offset(first);
            let wrong = QuantizedRows::new(weight, ids, in_blocks);
            b.check(
                "quantized rows",
                &[QuantizedProducts],
                call!(operator, [rows, prepare_rows], &call, &wrong),
            );
        }
    });
}

#[test]
fn attention_around_positions_and_attentional_vectors() {
    with_separate_buffers_and_one(|b| {
        let (wide, places) = ([1, 2, 6, 8], [1, 2, 6, 1]);
        let [q, k, v, d_out] = [0, 1, 2, 3].map(|n| b.read(n, wide));
        let positions = b.read(4, places);
        let local = LocalAttention::with_pipelines(b.gpu().pipelines(), LocalConfig::new(2, 8, 2));
        let local = local.expect("an operator");
        let call = LocalForward::new([q, k, v], positions, b.written(0, wide));
        let wrong = LocalForward::new([q, k, v], positions, q);
        let mut scratch = b.scratch(local.scratch_size(&call));
        b.check("local", &[LocalAttention], call!(local, [forward, prepare], &call, &wrong, &mut scratch));
        let back = LocalBackward::new(call, d_out).d_q(b.written(0, wide));
        let back = back.d_k(b.written(1, wide)).d_v(b.written(2, wide)).d_positions(b.written(3, places));
        let wrong = back.d_q(q);
        let mut scratch = b.scratch(local.backward_scratch_size(&back));
        b.check(
            "local backward",
            &[Family::LocalAttention, LocalGradients],
            call!(local, [backward, prepare_backward], &back, &wrong, &mut scratch),
        );
        let join = AttentionalVector::with_pipelines(b.gpu().pipelines());
        let (context, hidden, weight) = (b.read(0, ROWS), b.read(1, ROWS), b.read(2, [1, 1, 8, 24]));
        let linear = Linear { weight, bias: None };
        let joined = [2, 1, 5, 8];
        let call = AttentionalForward::new(context, hidden, linear, b.written(0, joined));
        let wrong = AttentionalForward::new(context, hidden, linear, reshaped(context, joined));
        let mut scratch = b.scratch(join.scratch_size(&call));
        b.check(
            "attentional vector",
            &[Attentional],
            call!(join, [forward, prepare], &call, &wrong, &mut scratch),
        );
        let back = AttentionalBackward::new(
            AttentionalForward::new(context, hidden, linear, b.read(3, joined)),
            b.read(4, joined),
        )
        .d_context(b.written(0, ROWS))
        .d_weight(b.written(1, [1, 1, 8, 24]));
        let wrong = back.d_context(context);
        let mut scratch = b.scratch(join.backward_scratch_size(&back));
        b.check(
            "attentional vector backward",
            &[AttentionalGradients],
            call!(join, [backward, prepare_backward], &back, &wrong, &mut scratch),
        );
    });
}

#[test]
fn positions_and_merges() {
    with_separate_buffers_and_one(|b| {
        let (wide, sums) = ([1, 2, 6, 8], [1, 2, 6, 1]);
        let (x, out) = (b.read(0, wide), b.written(0, wide));
        let positions = Positions::with_pipelines(b.gpu().pipelines());
        let rope = Rope::new(b.gpu().device(), RopeConfig::new(8)).expect("a rope");
        let at = RowPositions::Start(0);
        let (call, wrong) =
            (Rotate::new(x, &rope, at).out(out), Rotate::new(x, &rope, at).out(b.read(0, ROWS)));
        b.check("rotation", &[Rotations], call!(positions, [rotate, prepare_rotate], &call, &wrong));
        let back = call!(positions, [rotate_backward, prepare_rotate_backward], &call, &wrong);
        b.check("rotation backward", &[Rotations], back);
        let sections = RopeSections::Interleaved([2, 1, 1]);
        let rope = Rope::new(b.gpu().device(), RopeConfig::new(8).sections(sections)).expect("a rope");
        let axes = RowPositions::Tensor(b.numbers([1, 3, 6, 1]));
        let (call, wrong) =
            (Rotate::new(x, &rope, axes).out(out), Rotate::new(x, &rope, axes).out(b.read(0, ROWS)));
        b.check("rotation on axes", &[Rotations], call!(positions, [rotate, prepare_rotate], &call, &wrong));
        let table = |n: usize| PositionTable::Learned(b.read(n, [1, 1, 9, 8]));
        let call = AddPositions::new(x, table(1), at).out(out);
        let wrong = AddPositions::new(x, table(0), at).out(x);
        b.check("positions", &[Family::Positions], call!(positions, [add, prepare_add], &call, &wrong));
        let merge = Merge::with_pipelines(b.gpu().pipelines());
        let part = |n: usize| Partial { out: b.read(n, wide), lse: b.read(n + 1, sums) };
        let (parts, others) = ([part(0), part(2)], [part(0), Partial { out, ..part(2) }]);
        let into = Partial { out, lse: b.written(1, sums) };
        let (call, wrong) = (MergeForward::new(&parts, into), MergeForward::new(&others, into));
        b.check("merge", &[Merges], call!(merge, [forward, prepare], &call, &wrong));
        let gradients =
            [0, 2].map(|n| PartGradients { d_out: b.written(n, wide), d_lse: b.written(n + 1, sums) });
        let of = |parts| MergeBackward::new(MergeForward::new(parts, part(2)), b.read(4, wide), &gradients);
        let (back, wrong) = (of(&parts), of(&others));
        b.check(
            "merge backward",
            &[MergeGradients],
            call!(merge, [backward, prepare_backward], &back, &wrong),
        );
    });
}

#[test]
fn attention_of_other_kinds() {
    with_separate_buffers_and_one(|b| {
        let wide = [1, 2, 6, 8];
        let [q, k, v, d_out] = [0, 1, 2, 3].map(|n| b.read(n, wide));
        let (lse, out) = (b.read(4, [1, 2, 6, 1]), b.written(0, wide));
        let written = [1, 2, 3].map(|n| b.written(n, wide));
        let pipelines = b.gpu().pipelines();

        let scored = Attention::with_pipelines(pipelines, Config::new(2, 8)).expect("an operator");
        let scores = b.written(1, [1, 2, 6, 6]);
        let call =
            Forward::new(q, k, v, out).scores(scores, ScoreStage::Scaled).weights(b.written(2, [1, 1, 6, 6]));
        let wrong = Forward::new(q, k, v, q);
        let mut scratch = b.scratch(scored.scratch_size(&call));
        b.check("scores", &[ScoreOutputs], call!(scored, [forward, prepare], &call, &wrong, &mut scratch));

        let linear = LinearAttention::with_pipelines(pipelines, LinearConfig::new(2, 8).causal(true));
        let linear = linear.expect("an operator");
        let (call, wrong) = (LinearForward::new(q, k, v, out), LinearForward::new(q, k, v, q));
        let mut scratch = b.scratch(linear.scratch_size(&call));
        let needs = [Family::LinearAttention];
        b.check("linear", &needs, call!(linear, [forward, prepare], &call, &wrong, &mut scratch));
        let back =
            LinearBackward::new(LinearForward::new(q, k, v, b.read(4, wide)), d_out).d_q(out).d_v(written[0]);
        let wrong = back.d_q(q);
        let mut scratch = b.scratch(linear.backward_scratch_size(&back));
        let needs = [Family::LinearAttention, LinearGradients];
        let call = call!(linear, [backward, prepare_backward], &back, &wrong, &mut scratch);
        b.check("linear backward", &needs, call);
        let config = LinearConfig::new(2, 8).causal(true).update_rule(UpdateRule::Delta).normalised(false);
        let recurrent = LinearAttention::with_pipelines(pipelines, config).expect("an operator");
        let beta = b.read(3, [1, 2, 6, 1]);
        let call = LinearForward::new(q, k, v, out).beta(beta);
        let wrong = LinearForward::new(q, k, v, q).beta(beta);
        let mut scratch = b.scratch(recurrent.scratch_size(&call));
        let needs = [LinearRecurrence];
        b.check(
            "linear recurrence",
            &needs,
            call!(recurrent, [forward, prepare], &call, &wrong, &mut scratch),
        );

        let config = RecurrentConfig::new(2, 8).decay(Decay::PerHead).delta(true);
        let gated = RecurrentAttention::with_pipelines(pipelines, config).expect("an operator");
        let (decay, beta) = (b.read(3, [1, 2, 6, 1]), b.read(4, [1, 2, 6, 1]));
        let of = |out| RecurrentForward::new(q, k, v, out).decay(decay).beta(beta);
        let (call, wrong) = (of(out), of(q));
        let mut scratch = b.scratch(gated.scratch_size(&call));
        b.check(
            "recurrent attention",
            &[Recurrence],
            call!(gated, [forward, prepare], &call, &wrong, &mut scratch),
        );
        let back = RecurrentBackward::new(call, d_out).d_q(out).d_v(written[0]);
        let wrong = back.d_q(q);
        let mut scratch = b.scratch(gated.backward_scratch_size(&back));
        b.check(
            "recurrent attention backward",
            &[Recurrence, RecurrenceGradients],
            call!(gated, [backward, prepare_backward], &back, &wrong, &mut scratch),
        );

        let lsh =
            LshAttention::with_pipelines(pipelines, LshConfig::new(2, 8, 2, 4, 8)).expect("an operator");
        let rotations = b.read(3, [1, 2, 8, 2]);
        let buckets = b.written_as(DType::U32, 4, [1, 2, 2, 6]);
        let call = LshForward::new(q, v, rotations, buckets, out);
        let wrong = LshForward::new(q, v, rotations, buckets, q);
        let mut scratch = b.scratch(lsh.scratch_size(&call));
        b.check("LSH", &[RadixSort, Lsh], call!(lsh, [forward, prepare], &call, &wrong, &mut scratch));
        let call = LshForward::with_buckets(q, v, b.numbers([1, 2, 2, 6]), k).lse(lse);
        let back = LshBackward::new(call, d_out).d_qk(out).d_v(written[0]);
        let wrong = back.d_v(v);
        let mut scratch = b.scratch(lsh.backward_scratch_size(&back));
        let needs = [RadixSort, Lsh, LshGradients, RowStats];
        b.check(
            "LSH backward",
            &needs,
            call!(lsh, [backward, prepare_backward], &back, &wrong, &mut scratch),
        );

        let config = SelectedConfig::new(Config::new(2, 8)).window(1);
        let selected = SelectedAttention::with_pipelines(pipelines, config).expect("an operator");
        let indices = b.numbers([1, 1, 6, 3]);
        let of = |out| {
            let forward = Forward::new(q, k, v, out).mask(Mask::causal()).lse(b.written(1, [1, 2, 6, 1]));
            SelectedForward::new(forward, indices).weights(b.written(2, [1, 2, 6, 3]))
        };
        let (call, wrong) = (of(out), of(q));
        let mut scratch = b.scratch(selected.scratch_size(&call));
        b.check(
            "selected attention",
            &[SelectedKeys],
            call!(selected, [forward, prepare], &call, &wrong, &mut scratch),
        );
        let attended = Forward::new(q, k, v, b.read(4, wide)).mask(Mask::causal()).lse(lse);
        let of = |d_k| Backward::new(attended, d_out).d_q(out).d_k(d_k).d_v(written[1]);
        let [back, wrong] = [written[0], k].map(|d_k| SelectedBackward::new(of(d_k), indices));
        let mut scratch = b.scratch(selected.backward_scratch_size(&back));
        b.check(
            "selected attention backward",
            &[SelectedKeys, SelectedGradients, RowStats],
            call!(selected, [backward, prepare_backward], &back, &wrong, &mut scratch),
        );

        let config =
            NativeSparseConfig::new(Config::new(2, 8)).compression(2, 1).selection(2, 2).always(1, 1);
        let native = NativeSparseAttention::with_pipelines(pipelines, config).expect("an operator");
        let gates = b.read(3, [1, 2, 6, 3]);
        let (call, wrong) =
            (NativeSparseForward::new(q, k, v, gates, out), NativeSparseForward::new(q, k, v, gates, q));
        let mut scratch = b.scratch(native.scratch_size(&call));
        b.check(
            "native sparse attention",
            &[TopK, SelectedKeys, NativeSparse],
            call!(native, [forward, prepare], &call, &wrong, &mut scratch),
        );
        let branches = NativeSparseBranches {
            out: b.read(4, [3, 2, 6, 8]),
            lse: b.read(4, [3, 2, 6, 1]),
            indices: b.numbers([1, 2, 6, 2]),
        };
        let of = |d_k| NativeSparseBackward::new(call.branches(branches), d_out).d_q(out).d_k(d_k);
        let (back, wrong) = (of(written[0]), of(k));
        let mut scratch = b.scratch(native.backward_scratch_size(&back));
        b.check(
            "native sparse attention backward",
            &[ElementwiseGradients, SelectedKeys, SelectedGradients, NativeSparse, RowStats],
            call!(native, [backward, prepare_backward], &back, &wrong, &mut scratch),
        );

        let low = Linformer::with_pipelines(pipelines, Config::new(2, 8), 4).expect("an operator");
        let e = b.read(3, [1, 1, 4, 6]);
        let there = b.gpu().upload_bools(&[true, false, true, true, false, true]).expect("an upload");
        let there = TensorView::new(&there, DType::Bool, [1, 1, 1, 6]);
        let call = LinformerForward::new(q, k, v, e, out).key_mask(there);
        let wrong = LinformerForward::new(q, k, v, e, q).key_mask(there);
        let mut scratch = b.scratch(low.scratch_size(&call));
        b.check("Linformer", &[AbsentRows], call!(low, [forward, prepare], &call, &wrong, &mut scratch));
    });
}

#[test]
fn layers_with_appended_keys() {
    with_separate_buffers_and_one(|b| {
        let linear = |n: usize| Linear { weight: b.read(n, [1, 1, 12, 12]), bias: None };
        let weights = MultiHeadWeights {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            bias_kv: Some([b.read(0, VECTOR), b.read(1, VECTOR)]),
            qk_norm: None,
            gate: None,
        };
        let layer =
            MultiHeadAttention::with_pipelines(b.gpu().pipelines(), MultiHeadConfig::new(12, 2), &weights);
        let layer = layer.expect("a layer");
        let x = b.read(4, ROWS);
        let call = MultiHeadForward::self_attention(x, b.written(0, ROWS));
        let wrong = MultiHeadForward::self_attention(x, x);
        let mut scratch = b.scratch(layer.scratch_size(&call));
        b.check("a layer", &[AppendedKeys], call!(layer, [forward, prepare], &call, &wrong, &mut scratch));
    });
}

#[test]
fn stacks_of_layers() {
    with_separate_buffers_and_one(|b| {
        let linear = |n: usize, [to, from]: [usize; 2]| Linear {
            weight: b.read(n, [1, 1, to, from]),
            bias: Some(b.read(2, [1, 1, 1, to])),
        };
        let attention = MultiHeadWeights {
            query: linear(0, [12, 12]),
            key: linear(1, [12, 12]),
            value: linear(2, [12, 12]),
            out: linear(3, [12, 12]),
            bias_kv: None,
            qk_norm: None,
            gate: None,
        };
        let feed_forward =
            FeedForwardWeights { up: linear(0, [20, 12]), gate: None, down: linear(1, [12, 20]) };
        let norm = NormWeights { weight: Some(b.read(3, VECTOR)), bias: None };
        let config = TransformerLayerConfig::new(MultiHeadConfig::new(12, 2), 20).order(NormOrder::Pre);
        let (x, out) = (b.read(4, ROWS), b.written(0, ROWS));
        let pipelines = b.gpu().pipelines();
        let layer = EncoderLayerWeights { attention, feed_forward, norms: [norm; 2] };
        let encoder = TransformerEncoder::with_pipelines(pipelines, config, &[layer; 2], Some(norm));
        let encoder = encoder.expect("a stack");
        let call = EncoderForward::new(x, out).mask(Mask::causal());
        let wrong = EncoderForward::new(x, x);
        let mut scratch = b.scratch(encoder.scratch_size(&call));
        b.check("encoder", &[Norms], call!(encoder, [forward, prepare], &call, &wrong, &mut scratch));
        let back = EncoderBackward::new(call, b.read(3, ROWS)).d_x(out);
        let wrong = back.d_x(x);
        let mut scratch = b.scratch(encoder.backward_scratch_size(&back));
        b.check(
            "encoder backward",
            &[Norms, NormGradients, Family::Elementwise, ElementwiseGradients, RowStats],
            call!(encoder, [backward, prepare_backward], &back, &wrong, &mut scratch),
        );
        let layer = DecoderLayerWeights {
            self_attention: attention,
            cross_attention: attention,
            feed_forward,
            norms: [norm; 3],
        };
        let decoder = TransformerDecoder::with_pipelines(pipelines, config, &[layer; 2], Some(norm));
        let decoder = decoder.expect("a stack");
        let heads = |n: usize| b.read(n, [4, 2, 7, 6]);
        let memory = DecoderMemory { keys: heads(0), values: heads(1) };
        let call = DecoderForward::new(x, memory, out).mask(Mask::causal());
        let wrong = DecoderForward::new(x, memory, x);
        let mut scratch = b.scratch(decoder.scratch_size(&call));
        b.check("decoder", &[Norms], call!(decoder, [forward, prepare], &call, &wrong, &mut scratch));
        let to = DecoderMemory { keys: b.written(0, [4, 2, 7, 6]), values: b.written(1, [4, 2, 7, 6]) };
        let encoded = b.read(4, [2, 1, 7, 12]);
        let wrong = DecoderMemory { keys: reshaped(encoded, [4, 2, 7, 6]), ..to };
        let mut scratch = b.scratch(Ok(ScratchSize::default()));
        // Provides `forward` and `prepare` of one call, like the other operators.
        let project = Project { decoder: &decoder, memory: encoded };
        b.check("decoder memory", &[], call!(project, [forward, prepare], &to, &wrong, &mut scratch));
    });
}

/// The projections of a memory.
struct Project<'a> {
    decoder: &'a TransformerDecoder,
    memory: TensorView<'a>,
}

impl Project<'_> {
    fn forward(
        &self,
        into: &mut impl Recorder,
        to: &DecoderMemory,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.decoder.project_memory(into, self.memory, to, scratch)
    }

    fn prepare(&self, to: &DecoderMemory, scratch: &mut Scratch) -> Result<Prepared, Error> {
        self.decoder.prepare_memory(self.memory, to, scratch)
    }
}
