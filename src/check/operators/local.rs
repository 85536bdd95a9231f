//! Local attention, and predicted positions.

use crate::check::bench::{Bench, Tensor, both, judged, judged_gradients, worse};
use crate::check::data::{FEW, Outcome, noise};
use crate::gpu::Gpu;
use crate::local::reference::local_attention_backward_magnitudes;
use crate::local::{
    LocalAttention, LocalBackward, LocalConfig, LocalForward, PositionPredictor, PredictorBackward,
    PredictorForward,
};
use crate::matmul::Linear;
use crate::reference::{self, HostLinear, LocalOptions};
use crate::tensor::{Error, Shape};

const SHAPE: Shape =
    Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 9, kv_len: 23, head_dim: 12, value_dim: 20 };
const OPTIONS: LocalOptions = LocalOptions { half_window: 3, sigma: Some(1.5), scale: 1.0, lengths: None };

fn config() -> LocalConfig {
    let Shape { heads, kv_heads, head_dim, value_dim, .. } = SHAPE;
    LocalConfig::new(heads, head_dim, OPTIONS.half_window).kv_heads(kv_heads).value_dim(value_dim)
}

/// Returns positions of the queries. Some are beyond the keys.
fn positions(bench: &Bench) -> Result<Tensor, Error> {
    let numbers = noise(SHAPE.heads * SHAPE.q_len, 4).into_iter().map(|x| 12.0 + 14.0 * x);
    bench.tensor(SHAPE.lse(), numbers.collect())
}

pub(super) async fn forward(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let [q, k, v] = bench.inputs(&SHAPE)?;
    let (positions, out) = (positions(&bench)?, bench.zeros(SHAPE.out())?);
    let attention = LocalAttention::with_pipelines(gpu.pipelines(), config())?;
    let call = LocalForward::new([q.view(), k.view(), v.view()], positions.view(), out.view());
    let mut scratch = bench.scratch(attention.scratch_size(&call)?)?;
    bench.run("local attention", |encoder| attention.forward(encoder, &call, &mut scratch)).await?;
    let both = both!(|q, k, v, positions| {
        [reference::local_attention(q, k, v, positions, SHAPE, &OPTIONS)?.out]
    });
    Ok(worse(judged(gpu, [&out], both).await?, predicted(gpu).await?))
}

pub(super) async fn gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let [q, k, v] = bench.inputs(&SHAPE)?;
    let (positions, d_out) = (positions(&bench)?, bench.noise(SHAPE.out(), 5)?);
    let written: [Tensor; 4] = [
        bench.zeros(SHAPE.q())?,
        bench.zeros(SHAPE.k())?,
        bench.zeros(SHAPE.v())?,
        bench.zeros(SHAPE.lse())?,
    ];
    let attention = LocalAttention::with_pipelines(gpu.pipelines(), config())?;
    let [d_q, d_k, d_v, d_positions] = written.each_ref().map(Tensor::view);
    // The output of the forward call is not read.
    let call = LocalForward::new([q.view(), k.view(), v.view()], positions.view(), d_out.view());
    let call = LocalBackward::new(call, d_out.view());
    let call = call.d_q(d_q).d_k(d_k).d_v(d_v).d_positions(d_positions);
    let mut scratch = bench.scratch(attention.backward_scratch_size(&call)?)?;
    let what = "gradients of local attention";
    bench.run(what, |encoder| attention.backward(encoder, &call, &mut scratch)).await?;
    let both = both!(|q, k, v, positions, d_out| {
        let all = reference::local_attention_backward(q, k, v, positions, d_out, SHAPE, &OPTIONS)?;
        [all.d_q, all.d_k, all.d_v, all.d_positions]
    });
    let terms = local_attention_backward_magnitudes(&q, &k, &v, &positions, &d_out, SHAPE, &OPTIONS)?;
    let terms = [terms.d_q, terms.d_k, terms.d_v, terms.d_positions];
    let of_attention = judged_gradients(gpu, written.each_ref(), both, terms).await?;
    Ok(worse(of_attention, predictor_gradients(gpu).await?))
}

const FEATURES: usize = 36;
const UNITS: usize = 12;
const SOURCES: [u32; FEW] = [SHAPE.kv_len as u32; FEW];

/// Returns hidden states, a weight, a bias and a vector.
fn predictor(bench: &Bench) -> Result<[Tensor; 4], Error> {
    let small = noise(UNITS * FEATURES, 2).into_iter().map(|x| x / 4.0).collect();
    Ok([
        bench.noise([1, 1, FEW, FEATURES], 1)?,
        bench.tensor([1, 1, UNITS, FEATURES], small)?,
        bench.noise([1, 1, 1, UNITS], 3)?,
        bench.noise([1, 1, 1, UNITS], 4)?,
    ])
}

async fn predicted(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let [hidden, weight, bias, vector] = predictor(&bench)?;
    let positions = bench.zeros([1, 1, FEW, 1])?;
    let linear = Linear { weight: weight.view(), bias: Some(bias.view()) };
    let call = PredictorForward::new(hidden.view(), linear, vector.view(), SHAPE.kv_len, positions.view());
    let operator = PositionPredictor::with_pipelines(gpu.pipelines());
    let mut scratch = bench.scratch(operator.scratch_size(&call)?)?;
    bench.run("predicted positions", |encoder| operator.forward(encoder, &call, &mut scratch)).await?;
    let both = both!(|hidden, weight, bias, vector| {
        [reference::predict_positions(hidden, HostLinear { weight, bias: Some(bias) }, vector, &SOURCES)?]
    });
    judged(gpu, [&positions], both).await
}

/// The gradients of bias and vector run the first kernel of all gradients, and sums over rows.
async fn predictor_gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let [hidden, weight, bias, vector] = predictor(&bench)?;
    let d_positions = bench.noise([1, 1, FEW, 1], 5)?;
    let (d_bias, d_vector) = (bench.zeros([1, 1, 1, UNITS])?, bench.zeros([1, 1, 1, UNITS])?);
    let linear = Linear { weight: weight.view(), bias: Some(bias.view()) };
    // The positions of the forward call are not read.
    let call = PredictorForward::new(hidden.view(), linear, vector.view(), SHAPE.kv_len, d_positions.view());
    let call = PredictorBackward::new(call, d_positions.view());
    let call = call.d_bias(d_bias.view()).d_vector(d_vector.view());
    let operator = PositionPredictor::with_pipelines(gpu.pipelines());
    let mut scratch = bench.scratch(operator.backward_scratch_size(&call)?)?;
    let what = "gradients of predicted positions";
    bench.run(what, |encoder| operator.backward(encoder, &call, &mut scratch)).await?;
    let both = both!(|hidden, weight, bias, vector, d_positions| {
        let linear = HostLinear { weight, bias: Some(bias) };
        let all = reference::predict_positions_backward(hidden, linear, vector, &SOURCES, d_positions)?;
        [all.d_bias, all.d_vector]
    });
    judged(gpu, [&d_bias, &d_vector], both).await
}
