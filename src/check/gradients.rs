//! The gradient problems of a check. The results of the forward pass come from the reference.

use super::data::{FEW, Outcome, PREFILL, from_bits, inputs, judge, judge_gradient, noise, to_bits};
use crate::attention::{Attention, Backward, Config, Forward};
use crate::gpu::Gpu;
use crate::kernel::Scratch;
use crate::kernel::guard::Watch;
use crate::mask::{DeviceMask, HostMask};
use crate::matmul::{Linear, Projection, ProjectionBackward, ProjectionForward};
use crate::position::{AddPositions, PositionTable, Positions, RowPositions, TableBackward};
use crate::reference::{self, Gradients, Options};
use crate::tensor::{DType, Error, HostTensor, TensorView, count, widen};

const F32: DType = DType::F32;

/// A bias so large that f32 cannot compute a weight from its lse.
const LARGE: f32 = 5000.0;

/// Checks the gradients of q, k and v, which are tensors of `dtype`. With `added`, it checks the
/// gradients of the bias and the sinks instead.
pub(super) async fn attention(gpu: &Gpu, dtype: DType, added: bool) -> Result<Outcome, Error> {
    let shape = PREFILL;
    let halves = dtype != F32;
    let stored = |x: Vec<f32>| if halves { from_bits(&to_bits(&x, dtype), dtype) } else { x };
    let [q, k, v] = inputs(&shape).map(stored);
    let (d_out, d_lse) = (stored(noise(count(shape.out()), 4)), noise(count(shape.lse()), 5));
    let bias_shape = [1, 1, shape.q_len, shape.kv_len];
    let sinks_shape = [1, shape.heads, 1, 1];
    let (mut bias, sinks) = (noise(count(bias_shape), 6), noise(shape.heads, 7));
    bias[shape.q_len / 2 * shape.kv_len + 1] = LARGE;

    let mut mask = HostMask::causal();
    if added {
        mask =
            mask.bias(HostTensor::new(&bias, bias_shape)).sink_logits(HostTensor::new(&sinks, sinks_shape));
    }
    let options = Options::new().mask(mask);
    let wide = [&q, &k, &v, &d_out, &d_lse].map(|x| widen::<f64>(x));
    let forward = reference::attention(&wide[0], &wide[1], &wide[2], shape, &options)?;
    let want = reference::attention_backward(
        &wide[0],
        &wide[1],
        &wide[2],
        &wide[3],
        Some(&wide[4]),
        shape,
        &options,
    )?;
    let naive = reference::attention_backward(&q, &k, &v, &d_out, Some(&d_lse), shape, &options)?;
    let terms = reference::attention_backward_magnitudes(&q, &k, &v, &d_out, Some(&d_lse), shape, &options)?;
    let [out, lse] = [forward.out, forward.lse].map(|x| x.iter().map(|x| *x as f32).collect::<Vec<_>>());
    let out = stored(out);

    let watch = Watch::begin(gpu.device());
    let read = [
        (&q, shape.q(), dtype),
        (&k, shape.k(), dtype),
        (&v, shape.v(), dtype),
        (&out, shape.out(), dtype),
        (&lse, shape.lse(), F32),
        (&d_out, shape.out(), dtype),
        (&d_lse, shape.lse(), F32),
        (&bias, bias_shape, F32),
        (&sinks, sinks_shape, F32),
    ];
    let upload =
        |x: &Vec<f32>, dtype| if dtype == F32 { gpu.upload(x) } else { gpu.upload(&to_bits(x, dtype)) };
    let read = read.map(|(x, shape, dtype)| upload(x, dtype).map(|buffer| (buffer, shape, dtype)));
    let read = read.into_iter().collect::<Result<Vec<_>, _>>()?;
    let shapes = if added { vec![bias_shape, sinks_shape] } else { vec![shape.q(), shape.k(), shape.v()] };
    let written = shapes.iter().map(|shape| gpu.buffer(4 * count(*shape)));
    let written = written.collect::<Result<Vec<_>, _>>()?;
    let view = |n: usize| TensorView::new(&read[n].0, read[n].2, read[n].1);
    let gradient = |n: usize| TensorView::new(&written[n], F32, shapes[n]);
    let forward = Forward::new(view(0), view(1), view(2), view(3)).lse(view(4));
    let call = |mask| Backward::new(forward.mask(mask), view(5)).d_lse(view(6));
    let call = if added {
        let mask = DeviceMask::causal().bias(view(7)).sink_logits(view(8));
        call(mask).d_bias(gradient(0)).d_sinks(gradient(1))
    } else {
        call(DeviceMask::causal()).d_q(gradient(0)).d_k(gradient(1)).d_v(gradient(2))
    };
    let config = Config::of(&shape).dtype(dtype);
    let attention = Attention::with_pipelines(gpu.pipelines(), config)?;
    let mut scratch = Scratch::new(gpu.device(), attention.backward_scratch_size(&call)?)?;
    gpu.submit(|encoder| attention.backward(encoder, &call, &mut scratch))?;
    watch.end("gradients of attention").await?;

    let (want, naive, terms) = (of_call(want), of_call(naive), of_call(terms));
    let mut worst = 0.0f64;
    for (n, name) in (if added { 3..5 } else { 0..3 }).enumerate() {
        let got: Vec<f32> = gpu.download_async(&written[n], count(shapes[n])).await?;
        match judge_gradient(&got, &want[name], &naive[name], &terms[name], dtype) {
            Ok(share) => worst = worst.max(share),
            wrong => return Ok(wrong),
        }
    }
    Ok(Ok(worst))
}

/// Returns the gradients of q, k, v, the bias and the sinks.
fn of_call<R>(all: Gradients<R>) -> [Vec<R>; 5] {
    let Gradients { d_q, d_k, d_v, d_bias, d_sinks, .. } = all;
    [d_q, d_k, d_v, d_bias.unwrap_or_default(), d_sinks.unwrap_or_default()]
}

/// Checks the gradient of a projection's input, with few rows, and of another projection's weight,
/// with few rows. Software drivers take seconds to compile products of many rows.
pub(super) async fn product(gpu: &Gpu) -> Result<Outcome, Error> {
    let features = 44;
    let mut worst = 0.0f64;
    for [rows, dim] in [[FEW, 52], [PREFILL.q_len, FEW]] {
        let of_x = rows == FEW;
        let [x, weight, d_y] =
            [(rows * features, 4), (dim * features, 5), (rows * dim, 6)].map(|(n, seed)| noise(n, seed));
        let n = if of_x { x.len() } else { weight.len() };
        let watch = Watch::begin(gpu.device());
        let read = [&x, &weight, &d_y].map(|x| gpu.upload(x));
        let [x_at, weight_at, d_y_at] = read;
        let (x_at, weight_at, d_y_at, written) = (x_at?, weight_at?, d_y_at?, gpu.buffer(4 * n)?);
        let x_view = TensorView::sequence(&x_at, F32, [1, rows, features]);
        let linear = Linear { weight: TensorView::matrix(&weight_at, F32, [dim, features]), bias: None };
        let d_y_view = TensorView::sequence(&d_y_at, F32, [1, rows, dim]);
        // The output of the forward call is not read.
        let call = ProjectionBackward::new(ProjectionForward::new(x_view, linear, d_y_view), d_y_view);
        let call = if of_x {
            call.d_x(TensorView::sequence(&written, F32, [1, rows, features]))
        } else {
            call.d_weight(TensorView::matrix(&written, F32, [dim, features]))
        };
        let projection = Projection::with_pipelines(gpu.pipelines());
        gpu.submit(|encoder| projection.backward(encoder, &[call]))?;
        watch.end("gradients of a projection").await?;
        let got: Vec<f32> = gpu.download_async(&written, n).await?;
        let wide = [&x, &weight, &d_y].map(|x| widen::<f64>(x));
        let want = reference::project_backward(&wide[0], &wide[1], &wide[2], features, dim)?;
        let naive = reference::project_backward(&x, &weight, &d_y, features, dim)?;
        let (want, naive) = if of_x { (want.d_x, naive.d_x) } else { (want.d_weight, naive.d_weight) };
        match judge(&got, &want, &naive, F32) {
            Ok(share) => worst = worst.max(share),
            wrong => return Ok(wrong),
        }
    }
    Ok(Ok(worst))
}

/// Checks the gradients of a projection's bias and of a learned table. Several rows share some
/// positions of the table.
pub(super) async fn row_sums(gpu: &Gpu) -> Result<Outcome, Error> {
    let [rows, dim, positions] = [PREFILL.q_len, 20, 50];
    let at: Vec<u32> = (0..rows).map(|row| (row * row % positions) as u32).collect();
    let (d_y, table_shape) = (noise(rows * dim, 4), [1, 1, positions, dim]);
    let watch = Watch::begin(gpu.device());
    let (read, places) = (gpu.upload(&d_y)?, gpu.upload(&at)?);
    let (d_bias, d_table) = (gpu.buffer(4 * dim)?, gpu.buffer(4 * positions * dim)?);
    let view = TensorView::sequence(&read, F32, [1, rows, dim]);
    // The gradient of the bias depends on neither input nor weight: one feature of any value
    // suffices.
    let linear = Linear { weight: TensorView::matrix(&read, F32, [dim, 1]), bias: None };
    let forward = ProjectionForward::new(TensorView::sequence(&read, F32, [1, rows, 1]), linear, view);
    let products = [ProjectionBackward::new(forward, view).d_bias(TensorView::vector(&d_bias, F32, dim))];
    let places = RowPositions::Tensor(TensorView::new(&places, DType::U32, [1, 1, rows, 1]));
    let d_table_view = TensorView::new(&d_table, F32, table_shape);
    // The gradient of a table reads only the shape of the table.
    let forward = AddPositions::new(view, PositionTable::Learned(d_table_view), places);
    let table = TableBackward::new(forward, view, d_table_view);
    let projection = Projection::with_pipelines(gpu.pipelines());
    let operator = Positions::with_pipelines(gpu.pipelines());
    gpu.submit(|encoder| {
        projection.backward(encoder, &products)?;
        operator.table_backward(encoder, &table)
    })?;
    watch.end("sums of rows").await?;
    let got: Vec<f32> = gpu.download_async(&d_bias, dim).await?;
    let sums: Vec<f32> = gpu.download_async(&d_table, positions * dim).await?;
    let shape = [1, 1, rows, dim];
    let at = || RowPositions::Tensor(HostTensor::new(&at, [1, 1, rows, 1]));
    let wide = widen::<f64>(&d_y);
    let bias = reference::project_backward(&wide[..rows], &wide[..dim], &wide, 1, dim)?.d_bias;
    let naive_bias = reference::project_backward(&d_y[..rows], &d_y[..dim], &d_y, 1, dim)?.d_bias;
    let want = reference::add_positions_backward(&wide, shape, positions, at(), 1.0)?.d_table;
    let naive = reference::add_positions_backward(&d_y, shape, positions, at(), 1.0)?.d_table;
    let of_bias = judge(&got, &bias, &naive_bias, F32);
    Ok(of_bias.and_then(|share| Ok(share.max(judge(&sums, &want, &naive, F32)?))))
}
