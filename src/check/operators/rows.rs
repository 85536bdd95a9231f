//! Problems of operators on rows: norms, activations, embeddings, means, logits, sorting,
//! positions, quantized products.

use crate::check::bench::{Bench, both, equal, judged, worse};
use crate::check::data::{FEW, Outcome, noise};
use crate::gpu::Gpu;
use crate::matmul::{
    Activation, QuantizedFormat, QuantizedForward, QuantizedMatrix, QuantizedProjection, QuantizedRows,
};
use crate::position::{AddPositions, PositionTable, Positions, Rope, RopeConfig, Rotate, RowPositions};
use crate::reference::{self, CausalConvInputs};
use crate::rows::{
    CausalConv, CausalConvBackward, CausalConvForward, Elementwise, ElementwiseBackward, ElementwiseForward,
    Embedding, EmbeddingBackward, EmbeddingForward, LogSoftmax, LogSoftmaxBackward, LogSoftmaxForward,
    MeanPool, MeanPoolBackward, MeanPoolForward, Norm, NormBackward, NormConfig, NormForward, PoolMask,
    RadixSort, Sort, TopK, TopKForward, WeightNorm, WeightNormBackward, WeightNormForward,
};
use crate::tensor::{Error, HostTensor};

/// Features in vectors of four that do not fill a workgroup.
const WIDTH: usize = 36;
const LENGTH: usize = 5;
/// Two sequences of rows.
const ROWS: [usize; 4] = [2, 1, LENGTH, WIDTH];
const ROW: [usize; 4] = [1, 1, 1, WIDTH];

pub(super) async fn radix_sort(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let shape = [1, 1, 1, 300];
    // Repeated keys, with low and high bits of the words.
    let keys: Vec<u32> = (0..300u32).map(|n| (n * n % 97) << (n % 5 * 5)).collect();
    let (keys, order, ranks) = (bench.tensor(shape, keys)?, bench.zeros(shape)?, bench.zeros(shape)?);
    let sort = RadixSort::with_pipelines(gpu.pipelines());
    let call = Sort::new(keys.view(), order.view()).ranks(ranks.view());
    let mut scratch = bench.scratch(sort.scratch_size(&call)?)?;
    bench.run("a sort", |encoder| sort.forward(encoder, &call, &mut scratch)).await?;
    let mut want: Vec<u32> = (0..300).collect();
    want.sort_by_key(|n| keys[*n as usize]);
    let mut places = vec![0; want.len()];
    want.iter().zip(0..).for_each(|(n, place)| places[*n as usize] = place);
    Ok(worse(equal(&order.read(gpu).await?, &want), equal(&ranks.read(gpu).await?, &places)))
}

pub(super) async fn top_k(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let shape = [2, 1, LENGTH, FEW];
    let (x, indices, values) = (bench.noise(ROWS, 1)?, bench.zeros(shape)?, bench.zeros(shape)?);
    let call = TopKForward::new(x.view(), indices.view()).values(values.view());
    let top_k = TopK::with_pipelines(gpu.pipelines());
    bench.run("top-k", |encoder| top_k.forward(encoder, &call)).await?;
    let want = reference::top_k(&x, WIDTH, FEW)?;
    let largest = |x: &[f32]| {
        let at = |(n, index): (usize, &u32)| x[n / FEW * WIDTH + *index as usize];
        want.iter().enumerate().map(at).collect::<Vec<_>>()
    };
    let largest = largest(&x);
    let of_values = judged(gpu, [&values], both!(|largest| [largest.to_vec()])).await?;
    let few = worse(equal(&indices.read(gpu).await?, &want), of_values);
    Ok(worse(few, many(gpu).await?))
}

/// A selection, whose results are sorted and merged.
async fn many(gpu: &Gpu) -> Result<Outcome, Error> {
    const COLUMNS: usize = 2200;
    const MANY: usize = 2100;
    let bench = Bench::new(gpu);
    // Many equal elements.
    let x: Vec<f32> = noise(COLUMNS, 2).iter().map(|x| (x * 8.0).round()).collect();
    let (x, indices) = (bench.tensor([1, 1, 1, COLUMNS], x)?, bench.zeros([1, 1, 1, MANY])?);
    let call = TopKForward::new(x.view(), indices.view());
    let top_k = TopK::with_pipelines(gpu.pipelines());
    let mut scratch = bench.scratch(top_k.scratch_size(&call)?)?;
    bench.run("top-k with a large k", |encoder| top_k.forward_with(encoder, &call, &mut scratch)).await?;
    Ok(equal(&indices.read(gpu).await?, &reference::top_k(&x, COLUMNS, MANY)?))
}

pub(super) async fn log_softmax(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (x, out) = (bench.noise(ROWS, 1)?, bench.zeros(ROWS)?);
    let call = LogSoftmaxForward::new(x.view(), out.view());
    let operator = LogSoftmax::with_pipelines(gpu.pipelines());
    bench.run("log-softmax", |encoder| operator.forward(encoder, &call)).await?;
    judged(gpu, [&out], both!(|x| [reference::log_softmax(x, WIDTH)?])).await
}

pub(super) async fn log_softmax_gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let out = bench.tensor(ROWS, reference::log_softmax(&noise(2 * LENGTH * WIDTH, 1), WIDTH)?)?;
    let (d_out, d_x) = (bench.noise(ROWS, 2)?, bench.zeros(ROWS)?);
    // The `x` of the forward call is not read.
    let forward = LogSoftmaxForward::new(d_out.view(), out.view());
    let call = LogSoftmaxBackward::new(forward, d_out.view(), d_x.view());
    let operator = LogSoftmax::with_pipelines(gpu.pipelines());
    bench.run("gradients of log-softmax", |encoder| operator.backward(encoder, &call)).await?;
    judged(gpu, [&d_x], both!(|out, d_out| [reference::log_softmax_backward(out, WIDTH, d_out)?])).await
}

pub(super) async fn norm(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let config = NormConfig::layer();
    let (x, weight, bias) = (bench.noise(ROWS, 1)?, bench.noise(ROW, 2)?, bench.noise(ROW, 3)?);
    let out = bench.zeros(ROWS)?;
    let call = NormForward::new(x.view(), out.view()).weight(weight.view()).bias(bias.view());
    let norm = Norm::with_pipelines(gpu.pipelines(), config)?;
    bench.run("a norm", |encoder| norm.forward(encoder, &call)).await?;
    let both = both!(|x, weight, bias| [reference::norm(x, WIDTH, Some(weight), Some(bias), &config)?]);
    judged(gpu, [&out], both).await
}

pub(super) async fn norm_gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let config = NormConfig::layer();
    let (x, weight, bias) = (bench.noise(ROWS, 1)?, bench.noise(ROW, 2)?, bench.noise(ROW, 3)?);
    let (out, d_out) = (bench.zeros::<f32>(ROWS)?, bench.noise(ROWS, 4)?);
    let (d_x, d_weight, d_bias) = (bench.zeros(ROWS)?, bench.zeros(ROW)?, bench.zeros(ROW)?);
    let forward = NormForward::new(x.view(), out.view()).weight(weight.view()).bias(bias.view());
    let call = NormBackward::new(forward, d_out.view()).d_x(d_x.view());
    let call = call.d_weight(d_weight.view()).d_bias(d_bias.view());
    let norm = Norm::with_pipelines(gpu.pipelines(), config)?;
    let mut scratch = bench.scratch(norm.backward_scratch_size(&call)?)?;
    bench.run("gradients of a norm", |encoder| norm.backward(encoder, &call, &mut scratch)).await?;
    let both = both!(|x, weight, d_out| {
        let all = reference::norm_backward(x, WIDTH, Some(weight), &config, d_out)?;
        [all.d_x, all.d_weight, all.d_bias]
    });
    judged(gpu, [&d_x, &d_weight, &d_bias], both).await
}

const ACTIVATION: Activation = Activation::Silu;

pub(super) async fn elementwise(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (x, gate, out) = (bench.noise(ROWS, 1)?, bench.noise(ROWS, 2)?, bench.zeros(ROWS)?);
    let call = ElementwiseForward::new(x.view(), out.view()).activation(ACTIVATION).multiply(gate.view());
    let operator = Elementwise::with_pipelines(gpu.pipelines());
    bench.run("elementwise", |encoder| operator.forward(encoder, &call)).await?;
    let both = both!(|x, gate| {
        [x.iter().zip(gate).map(|(x, gate)| reference::activate(*x, ACTIVATION) * *gate).collect()]
    });
    judged(gpu, [&out], both).await
}

pub(super) async fn elementwise_gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (x, gate, d_out) = (bench.noise(ROWS, 1)?, bench.noise(ROWS, 2)?, bench.noise(ROWS, 3)?);
    let (out, d_x, d_gate) = (bench.zeros::<f32>(ROWS)?, bench.zeros(ROWS)?, bench.zeros(ROWS)?);
    let call = ElementwiseForward::new(x.view(), out.view()).activation(ACTIVATION).multiply(gate.view());
    let call = ElementwiseBackward::new(call, d_out.view()).d_x(d_x.view()).d_multiply(d_gate.view());
    let operator = Elementwise::with_pipelines(gpu.pipelines());
    bench.run("elementwise gradients", |encoder| operator.backward(encoder, &call)).await?;
    let both = both!(|x, gate, d_out| {
        let slopes = x.iter().map(|x| reference::activation_slope(*x, ACTIVATION));
        let values = x.iter().map(|x| reference::activate(*x, ACTIVATION));
        let d_x = slopes.zip(gate).zip(d_out).map(|((slope, gate), d)| slope * *gate * *d);
        [d_x.collect(), values.zip(d_out).map(|(value, d)| value * *d).collect()]
    });
    judged(gpu, [&d_x, &d_gate], both).await
}

/// Rows of a table. One row occurs twice.
const IDS: [u32; LENGTH] = [3, 0, 6, 3, 1];
const TABLE: [usize; 4] = [1, 1, 7, WIDTH];
const LOOKED_UP: [usize; 4] = [1, 1, LENGTH, WIDTH];

pub(super) async fn embedding(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let ids = bench.tensor([1, 1, LENGTH, 1], IDS.to_vec())?;
    let (table, out) = (bench.noise(TABLE, 1)?, bench.zeros(LOOKED_UP)?);
    let call = EmbeddingForward::new(ids.view(), table.view(), out.view()).scale(0.5);
    let operator = Embedding::with_pipelines(gpu.pipelines());
    bench.run("an embedding", |encoder| operator.forward(encoder, &call)).await?;
    judged(gpu, [&out], both!(|table| [reference::embedding(&IDS, table, WIDTH, 0.5)?])).await
}

pub(super) async fn embedding_gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let ids = bench.tensor([1, 1, LENGTH, 1], IDS.to_vec())?;
    let (d_out, d_table) = (bench.noise(LOOKED_UP, 1)?, bench.zeros(TABLE)?);
    // The table and the output of the forward call are not read.
    let forward = EmbeddingForward::new(ids.view(), d_table.view(), d_out.view());
    let call = EmbeddingBackward::new(forward, d_out.view(), d_table.view());
    let operator = Embedding::with_pipelines(gpu.pipelines());
    let mut scratch = bench.scratch(operator.backward_scratch_size(&call)?)?;
    bench.run("gradients of a table", |encoder| operator.backward(encoder, &call, &mut scratch)).await?;
    let [_, _, rows, width] = TABLE;
    let both = both!(|d_out| [reference::embedding_backward(&IDS, d_out, [rows, width], 1.0)?]);
    judged(gpu, [&d_table], both).await
}

const MEANS: [usize; 4] = [2, 1, 1, WIDTH];

/// The rows of each sequence.
fn sequences() -> [Vec<usize>; 2] {
    [(0..LENGTH).collect(), (LENGTH..2 * LENGTH).collect()]
}

pub(super) async fn mean_pool(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (x, out) = (bench.noise(ROWS, 1)?, bench.zeros(MEANS)?);
    let call = MeanPoolForward::new(x.view(), PoolMask::All, out.view()).normalize(true);
    let operator = MeanPool::with_pipelines(gpu.pipelines());
    bench.run("a mean", |encoder| operator.forward(encoder, &call)).await?;
    judged(gpu, [&out], both!(|x| [reference::mean_pool(x, WIDTH, &sequences(), true)?])).await
}

pub(super) async fn mean_pool_gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (x, out, d_out) = (bench.noise(ROWS, 1)?, bench.zeros::<f32>(MEANS)?, bench.noise(MEANS, 2)?);
    let d_x = bench.zeros(ROWS)?;
    let call = MeanPoolForward::new(x.view(), PoolMask::All, out.view()).normalize(true);
    let call = MeanPoolBackward::new(call, d_out.view(), d_x.view());
    let operator = MeanPool::with_pipelines(gpu.pipelines());
    bench.run("gradients of a mean", |encoder| operator.backward(encoder, &call)).await?;
    let both = both!(|x, d_out| [reference::mean_pool_backward(x, WIDTH, &sequences(), true, d_out)?]);
    judged(gpu, [&d_x], both).await
}

/// A filter of four columns and the states of two sequences.
const FILTER: [usize; 4] = [1, 1, WIDTH, 4];
const STATES: [usize; 4] = [2, 1, 3, WIDTH];

pub(super) async fn causal_conv(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (x, weight, bias) = (bench.noise(ROWS, 1)?, bench.noise(FILTER, 2)?, bench.noise(ROW, 3)?);
    let (initial, state) = (bench.noise(STATES, 4)?, bench.zeros(STATES)?);
    let out = bench.zeros(ROWS)?;
    let call = CausalConvForward::new(x.view(), weight.view(), out.view()).bias(bias.view());
    let call = call.activation(ACTIVATION).initial_state(initial.view()).final_state(state.view());
    let operator = CausalConv::with_pipelines(gpu.pipelines());
    bench.run("a causal convolution", |encoder| operator.forward(encoder, &call)).await?;
    let both = both!(|x, weight, bias, initial| {
        let [mut out, mut state] = [Vec::new(), Vec::new()];
        for (x, initial) in x.chunks_exact(LENGTH * WIDTH).zip(initial.chunks_exact(3 * WIDTH)) {
            let (bias, initial_state) = (Some(bias), Some(initial));
            let activation = Some(ACTIVATION);
            let inputs = CausalConvInputs { x, weight, bias, initial_state, activation, channels: WIDTH };
            let one = reference::causal_conv(&inputs)?;
            out.extend(one.out);
            state.extend(one.final_state);
        }
        [out, state]
    });
    judged(gpu, [&out, &state], both).await
}

pub(super) async fn causal_conv_gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let shape = [1, 1, LENGTH, WIDTH];
    let state = [1, 1, 3, WIDTH];
    let (x, weight, bias) = (bench.noise(shape, 1)?, bench.noise(FILTER, 2)?, bench.noise(ROW, 3)?);
    let (initial, d_out, d_final) = (bench.noise(state, 4)?, bench.noise(shape, 5)?, bench.noise(state, 6)?);
    let (out, d_x, d_weight) = (bench.zeros::<f32>(shape)?, bench.zeros(shape)?, bench.zeros(FILTER)?);
    let (d_bias, d_initial) = (bench.zeros(ROW)?, bench.zeros(state)?);
    let call = CausalConvForward::new(x.view(), weight.view(), out.view()).bias(bias.view());
    let call = call.activation(ACTIVATION).initial_state(initial.view());
    let call = CausalConvBackward::new(call, d_out.view()).d_final_state(d_final.view()).d_x(d_x.view());
    let call = call.d_weight(d_weight.view()).d_bias(d_bias.view()).d_initial_state(d_initial.view());
    let operator = CausalConv::with_pipelines(gpu.pipelines());
    let mut scratch = bench.scratch(operator.backward_scratch_size(&call)?)?;
    let record = |encoder: &mut wgpu::CommandEncoder| operator.backward(encoder, &call, &mut scratch);
    bench.run("gradients of a causal convolution", record).await?;
    let both = both!(|x, weight, bias, initial, d_out, d_final| {
        let (bias, initial_state) = (Some(bias), Some(initial));
        let activation = Some(ACTIVATION);
        let inputs = CausalConvInputs { x, weight, bias, initial_state, activation, channels: WIDTH };
        let all = reference::causal_conv_backward(&inputs, d_out, Some(d_final))?;
        [all.d_x, all.d_weight, all.d_bias, all.d_initial_state]
    });
    judged(gpu, [&d_x, &d_weight, &d_bias, &d_initial], both).await
}

/// Vectors of heads.
const VECTORS: [usize; 4] = [1, 3, 1, 20];
const GAINS: [usize; 4] = [1, 3, 1, 1];

pub(super) async fn weight_norm(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (x, gain, out) = (bench.noise(VECTORS, 1)?, bench.noise(GAINS, 2)?, bench.zeros(VECTORS)?);
    let call = WeightNormForward::new(x.view(), gain.view(), out.view());
    let operator = WeightNorm::with_pipelines(gpu.pipelines());
    bench.run("a weight norm", |encoder| operator.forward(encoder, &call)).await?;
    judged(gpu, [&out], both!(|x, gain| [reference::weight_norm(x, gain, VECTORS[3])?])).await
}

pub(super) async fn weight_norm_gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (x, gain, d_out) = (bench.noise(VECTORS, 1)?, bench.noise(GAINS, 2)?, bench.noise(VECTORS, 3)?);
    let (d_x, d_gain) = (bench.zeros(VECTORS)?, bench.zeros(GAINS)?);
    let written = [d_x.view(), d_gain.view()];
    // The output of the forward call is not read.
    let forward = WeightNormForward::new(x.view(), gain.view(), d_out.view());
    let call = WeightNormBackward::new(forward, d_out.view(), written);
    let operator = WeightNorm::with_pipelines(gpu.pipelines());
    bench.run("gradients of a weight norm", |encoder| operator.backward(encoder, &call)).await?;
    let both = both!(|x, gain, d_out| reference::weight_norm_backward(x, gain, d_out, VECTORS[3])?);
    judged(gpu, [&d_x, &d_gain], both).await
}

/// Checks both directions, which share one kernel.
pub(super) async fn rotate(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let shape = [2, 2, LENGTH, 16];
    let config = RopeConfig::new(12);
    let rope = Rope::new(gpu.device(), config)?;
    let (x, turned, back) = (bench.noise(shape, 1)?, bench.zeros(shape)?, bench.zeros(shape)?);
    let call = |out| Rotate::new(x.view(), &rope, RowPositions::Start(3)).out(out);
    let (forward, backward) = (call(turned.view()), call(back.view()));
    let operator = Positions::with_pipelines(gpu.pipelines());
    let record = |encoder: &mut wgpu::CommandEncoder| {
        operator.rotate(encoder, &forward)?;
        operator.rotate_backward(encoder, &backward)
    };
    bench.run("a rotation", record).await?;
    let at = || RowPositions::<HostTensor<u32>>::Start(3);
    let both = both!(|x| {
        [reference::rotate(x, shape, &config, at())?, reference::rotate_backward(x, shape, &config, at())?]
    });
    judged(gpu, [&turned, &back], both).await
}

pub(super) async fn add_positions(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (x, table, out) = (bench.noise(ROWS, 1)?, bench.noise(TABLE, 2)?, bench.zeros(ROWS)?);
    let learned = PositionTable::Learned(table.view());
    let call = AddPositions::new(x.view(), learned, RowPositions::Start(1)).out(out.view()).scale(0.5);
    let operator = Positions::with_pipelines(gpu.pipelines());
    bench.run("positions", |encoder| operator.add(encoder, &call)).await?;
    let both = both!(|x, table| {
        let table = PositionTable::Learned(table);
        [reference::add_positions(x, ROWS, table, RowPositions::<HostTensor<u32>>::Start(1), 0.5)?]
    });
    judged(gpu, [&out], both).await
}

/// Checks a product and a look-up in each format.
pub(super) async fn quantized(gpu: &Gpu) -> Result<Outcome, Error> {
    let [features, dim] = [2 * QuantizedFormat::BLOCK, 20];
    let mut worst = Ok(0.0);
    for format in [QuantizedFormat::Q4_1, QuantizedFormat::Q8_0] {
        let bench = Bench::new(gpu);
        let blocks = reference::quantize(format, &noise(dim * features, 1))?;
        let buffer = gpu.upload(&blocks)?;
        let matrix = QuantizedMatrix::new(&buffer, format, [dim, features]);
        let ids = bench.tensor([1, 1, LENGTH, 1], IDS.to_vec())?;
        let (x, y) = (bench.noise([1, 1, FEW, features], 2)?, bench.zeros([1, 1, FEW, dim])?);
        let looked_up = bench.zeros([1, 1, LENGTH, features])?;
        let product = QuantizedForward::new(x.view(), matrix, y.view());
        let rows = QuantizedRows::new(matrix, ids.view(), looked_up.view());
        let operator = QuantizedProjection::with_pipelines(gpu.pipelines());
        let record = |encoder: &mut wgpu::CommandEncoder| {
            operator.forward(encoder, &[product])?;
            operator.rows(encoder, &rows)
        };
        bench.run("a quantized product", record).await?;
        let weight = reference::dequantize::<f32>(format, &blocks)?;
        let both = both!(|x, weight| {
            let y = reference::project(x, weight, None, features, dim)?;
            [y, reference::embedding(&IDS, weight, features, 1.0)?]
        });
        worst = worse(worst, judged(gpu, [&y, &looked_up], both).await?);
    }
    Ok(worst)
}
