//! Problems of linear attention: chunks with random features (which use all kernels), tokens one by
//! one, and gradients.

use crate::check::bench::{Bench, Tensor, both, judged, judged_gradients};
use crate::check::data::{FEW, Outcome};
use crate::gpu::Gpu;
use crate::linear_attention::reference::linear_attention_backward_magnitudes;
use crate::linear_attention::{
    FeatureMap, LinearAttention, LinearBackward, LinearConfig, LinearForward, RandomFeatures, UpdateRule,
    random_features,
};
use crate::reference::{self, LinearOptions};
use crate::tensor::{Error, Shape};

/// Tokens for two chunks.
const SHAPE: Shape =
    Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 70, kv_len: 70, head_dim: 12, value_dim: 20 };
const DIRECTIONS: usize = 8;
const RANDOM: FeatureMap = FeatureMap::Random { kind: RandomFeatures::Positive, directions: DIRECTIONS };

fn config(map: FeatureMap) -> LinearConfig {
    let Shape { heads, kv_heads, head_dim, value_dim, .. } = SHAPE;
    LinearConfig::new(heads, head_dim).kv_heads(kv_heads).value_dim(value_dim).feature_map(map).causal(true)
}

/// Directions of random features.
fn directions(bench: &Bench) -> Result<Tensor, Error> {
    let numbers = random_features(7, DIRECTIONS, SHAPE.head_dim)?;
    bench.tensor([1, 1, DIRECTIONS, SHAPE.head_dim], numbers)
}

fn options(map: FeatureMap, directions: &[f32]) -> LinearOptions<'_> {
    LinearOptions { causal: true, directions, ..LinearOptions::new(map) }
}

pub(super) async fn forward(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let [q, k, v] = bench.inputs(&SHAPE)?;
    let (directions, out) = (directions(&bench)?, bench.zeros(SHAPE.out())?);
    let attention = LinearAttention::with_pipelines(gpu.pipelines(), config(RANDOM))?;
    let call = LinearForward::new(q.view(), k.view(), v.view(), out.view()).directions(directions.view());
    let mut scratch = bench.scratch(attention.scratch_size(&call)?)?;
    bench.run("linear attention", |encoder| attention.forward(encoder, &call, &mut scratch)).await?;
    let both = both!(|q, k, v| {
        [reference::linear_attention(q, k, v, SHAPE, &options(RANDOM, &directions))?.out]
    });
    judged(gpu, [&out], both).await
}

pub(super) async fn recurrence(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let shape = Shape { q_len: FEW, kv_len: FEW, ..SHAPE };
    let [q, k, v] = bench.inputs(&shape)?;
    let (beta, out) = (bench.noise([1, shape.kv_heads, FEW, 1], 4)?, bench.zeros(shape.out())?);
    let rule = UpdateRule::Delta;
    let config = config(FeatureMap::Identity).update_rule(rule).normalised(false);
    let attention = LinearAttention::with_pipelines(gpu.pipelines(), config)?;
    let call = LinearForward::new(q.view(), k.view(), v.view(), out.view()).beta(beta.view());
    let mut scratch = bench.scratch(attention.scratch_size(&call)?)?;
    bench.run("linear recurrence", |encoder| attention.forward(encoder, &call, &mut scratch)).await?;
    let both = both!(|q, k, v, beta| {
        let options = LinearOptions { normalised: false, ..options(FeatureMap::Identity, &[]) };
        [reference::linear_recurrence([q, k, v], shape, &options, rule, &[], beta)?.out]
    });
    judged(gpu, [&out], both).await
}

pub(super) async fn gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let [q, k, v] = bench.inputs(&SHAPE)?;
    let (directions, d_out) = (directions(&bench)?, bench.noise(SHAPE.out(), 4)?);
    let out = reference::linear_attention::<f32>(&q, &k, &v, SHAPE, &options(RANDOM, &directions))?.out;
    let out = bench.tensor(SHAPE.out(), out)?;
    let (d_q, d_k, d_v) = (bench.zeros(SHAPE.q())?, bench.zeros(SHAPE.k())?, bench.zeros(SHAPE.v())?);
    let attention = LinearAttention::with_pipelines(gpu.pipelines(), config(RANDOM))?;
    let call = LinearForward::new(q.view(), k.view(), v.view(), out.view()).directions(directions.view());
    let call = LinearBackward::new(call, d_out.view());
    let call = call.d_q(d_q.view()).d_k(d_k.view()).d_v(d_v.view());
    let mut scratch = bench.scratch(attention.backward_scratch_size(&call)?)?;
    let what = "gradients of linear attention";
    bench.run(what, |encoder| attention.backward(encoder, &call, &mut scratch)).await?;
    let both = both!(|q, k, v, out, d_out| {
        let options = options(RANDOM, &directions);
        let all = reference::linear_attention_backward([q, k, v], Some(out), d_out, SHAPE, &options)?;
        [all.d_q, all.d_k, all.d_v]
    });
    let inputs = [&q[..], &k[..], &v[..]];
    let terms = linear_attention_backward_magnitudes(inputs, &d_out, SHAPE, &options(RANDOM, &directions))?;
    judged_gradients(gpu, [&d_q, &d_k, &d_v], both, [terms.d_q, terms.d_k, terms.d_v]).await
}
