//! Operators of layers: learned keys and attentional vectors.

use crate::check::bench::{Bench, both, judged};
use crate::check::data::{FEW, Outcome, judge, noise};
use crate::gpu::Gpu;
use crate::layers::{AttentionalBackward, AttentionalForward, AttentionalVector, MultiHeadConfig};
use crate::matmul::Linear;
use crate::reference::{self, HostLinear, HostWeights, MultiHeadShape, Options};
use crate::tensor::{DType, Error};

/// Features of an attentional vector's context plus hidden state.
const WIDTH: usize = 36;

/// Checks a layer with a learned key and value. All its projections share one weight.
pub(super) async fn appended_keys(gpu: &Gpu) -> Result<Outcome, Error> {
    fn weights<'a, R>(weight: &'a [R], key: &'a [R], value: &'a [R]) -> HostWeights<'a, R> {
        let [query, of_key, of_value, out] = [(); 4].map(|()| HostLinear { weight, bias: None });
        let bias_kv = Some([key, value]);
        HostWeights { query, key: of_key, value: of_value, out, bias_kv, qk_norm: None, gate: None }
    }
    const DIM: usize = 24;
    let config = MultiHeadConfig::new(DIM, 2);
    let shape = MultiHeadShape { batch: 1, q_len: FEW, kv_len: FEW };
    let options = Options::new();
    let (x, weight) = (noise(FEW * DIM, 1), noise(DIM * DIM, 2));
    let weight: Vec<f32> = weight.iter().map(|w| w / 4.0).collect();
    let (key, value) = (noise(DIM, 3), noise(DIM, 4));
    let given = weights(&weight, &key, &value);
    let got = gpu.multi_head_async([&x; 3], shape, &config, &given, &options).await?;
    let ([want], [naive]) = both!(|x, weight, key, value| {
        [reference::multi_head([x; 3], shape, &config, &weights(weight, key, value), &options)?.out]
    });
    Ok(judge(&got.out, &want, &naive, DType::F32))
}

/// Channels of the context and of the hidden state.
const CHANNELS: [usize; 2] = [20, 16];

pub(super) async fn attentional(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let [context, hidden] = [CHANNELS[0], CHANNELS[1]].map(|n| bench.noise([1, 1, FEW, n], n as u32));
    let (context, hidden, weight) = (context?, hidden?, bench.noise([1, 1, 12, WIDTH], 3)?);
    let (bias, out) = (bench.noise([1, 1, 1, 12], 4)?, bench.zeros([1, 1, FEW, 12])?);
    let linear = Linear { weight: weight.view(), bias: Some(bias.view()) };
    let call = AttentionalForward::new(context.view(), hidden.view(), linear, out.view());
    let operator = AttentionalVector::with_pipelines(gpu.pipelines());
    let mut scratch = bench.scratch(operator.scratch_size(&call)?)?;
    bench.run("an attentional vector", |encoder| operator.forward(encoder, &call, &mut scratch)).await?;
    let both = both!(|context, hidden, weight, bias| {
        [reference::attentional(context, hidden, HostLinear { weight, bias: Some(bias) }, FEW, 12)?]
    });
    judged(gpu, [&out], both).await
}

/// The gradient of the bias runs the first kernel of all gradients, and a sum over rows.
pub(super) async fn attentional_gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let [context, hidden] = [CHANNELS[0], CHANNELS[1]].map(|n| bench.noise([1, 1, FEW, n], n as u32));
    let (context, hidden, weight) = (context?, hidden?, bench.noise([1, 1, 12, WIDTH], 3)?);
    let linear = HostLinear { weight: &weight, bias: None };
    let out = bench.tensor([1, 1, FEW, 12], reference::attentional(&context, &hidden, linear, FEW, 12)?)?;
    let (d_out, d_bias) = (bench.noise([1, 1, FEW, 12], 5)?, bench.zeros([1, 1, 1, 12])?);
    let linear = Linear { weight: weight.view(), bias: None };
    let forward = AttentionalForward::new(context.view(), hidden.view(), linear, out.view());
    let call = AttentionalBackward::new(forward, d_out.view()).d_bias(d_bias.view());
    let operator = AttentionalVector::with_pipelines(gpu.pipelines());
    let mut scratch = bench.scratch(operator.backward_scratch_size(&call)?)?;
    let what = "gradients of an attentional vector";
    bench.run(what, |encoder| operator.backward(encoder, &call, &mut scratch)).await?;
    let both = both!(|context, hidden, weight, d_out| {
        let linear = HostLinear { weight, bias: None };
        [reference::attentional_backward(context, hidden, linear, d_out, FEW, 12)?.d_bias]
    });
    judged(gpu, [&d_bias], both).await
}
