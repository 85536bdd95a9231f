//! Parts of attention that few calls have, merges, and attention to few keys.

use crate::attention::{
    Attention, Config, Forward, Merge, MergeBackward, MergeForward, PartGradients, Partial, ScoreStage,
};
use crate::check::bench::{Bench, Tensor, both, equal, judged, judged_gradients, worse};
use crate::check::data::{FEW, Outcome, PREFILL, judge, noise};
use crate::gpu::Gpu;
use crate::layers::MultiHeadConfig;
use crate::linformer::{Linformer, LinformerForward};
use crate::lsh::reference::lsh_attention_backward_magnitudes;
use crate::lsh::{LshAttention, LshBackward, LshConfig, LshForward};
use crate::mask::{Blocks, DeviceMask, HostMask};
use crate::reference::compare::{Tolerance, compare};
use crate::reference::{
    self, HostLinear, HostWeights, LengthProjections, LshHashed, LshShape, MultiHeadShape, Options,
};
use crate::tensor::{DType, Error, Shape, TensorView};

fn config(shape: &Shape) -> Config {
    Config::new(shape.heads, shape.head_dim).kv_heads(shape.kv_heads).value_dim(shape.value_dim)
}

/// A block map, and the pairs of a mask one by one.
pub(super) async fn masks(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (shape, size) = (PREFILL, [16, 16]);
    let map = bench.zeros([1, 1, 3, 4])?;
    let attention = Attention::with_pipelines(gpu.pipelines(), config(&shape))?;
    let blocks = Blocks::new(map.view(), size);
    let lengths = [shape.batch, shape.q_len, shape.kv_len];
    let mask = DeviceMask::causal();
    bench.run("a block map", |encoder| attention.classify(encoder, &mask, lengths, &blocks)).await?;
    let host = HostMask::causal();
    let of_map = equal(&map.read(gpu).await?, &reference::classify(&host, shape, size, [1, 1])?);
    // Such a mask leaves scores as they are.
    let off = gpu.compare_masks_async(&mask, &host, shape, f64::INFINITY).await?;
    Ok(worse(of_map, compare(&[off], &[0.0], Tolerance { absolute: 0.0 }).map(|_| 0.0)))
}

/// Scores on their way to the softmax, and the mean of the heads' weights.
pub(super) async fn scores(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let shape = Shape { q_len: FEW, ..PREFILL };
    let [q, k, v] = bench.inputs(&shape)?;
    let out: Tensor = bench.zeros(shape.out())?;
    let (scores, weights) = (bench.zeros(shape.weights())?, bench.zeros([1, 1, FEW, shape.kv_len])?);
    let attention = Attention::with_pipelines(gpu.pipelines(), config(&shape))?;
    let call = Forward::new(q.view(), k.view(), v.view(), out.view());
    let call = call.scores(scores.view(), ScoreStage::Scaled).weights(weights.view());
    let mut scratch = bench.scratch(attention.scratch_size(&call)?)?;
    bench.run("scores of attention", |encoder| attention.forward(encoder, &call, &mut scratch)).await?;
    let options = Options::new().weights(true);
    let both = both!(|q, k, v| {
        let all = reference::attention(q, k, v, shape, &options)?.weights.unwrap_or_default();
        let scores = reference::scores_at(q, k, shape, &options, ScoreStage::Scaled)?;
        [scores, reference::average_heads(&all, shape.batch, shape.heads)?]
    });
    judged(gpu, [&scores, &weights], both).await
}

/// A layer with a learned key and value, all of whose projections have one weight.
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

/// Rows of a merge, and their channels.
const PARTS: [usize; 4] = [1, 2, 5, 12];
const SUMS: [usize; 4] = [1, 2, 5, 1];

/// Outputs of two parts, and their sums.
fn parts(bench: &Bench) -> Result<[Tensor; 4], Error> {
    Ok([bench.noise(PARTS, 1)?, bench.noise(SUMS, 2)?, bench.noise(PARTS, 3)?, bench.noise(SUMS, 4)?])
}

fn partial<'a>(out: &'a Tensor, lse: &'a Tensor) -> Partial<'a> {
    Partial { out: out.view(), lse: lse.view() }
}

pub(super) async fn merge(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let [a, of_a, b, of_b] = parts(&bench)?;
    let (out, lse) = (bench.zeros(PARTS)?, bench.zeros(SUMS)?);
    let merge = Merge::with_pipelines(gpu.pipelines());
    let (given, into) = ([partial(&a, &of_a), partial(&b, &of_b)], partial(&out, &lse));
    let call = MergeForward::new(&given, into);
    bench.run("a merge", |encoder| merge.forward(encoder, &call)).await?;
    let both = both!(|a, of_a, b, of_b| {
        let (out, lse) = reference::merge(&[(a, of_a), (b, of_b)], PARTS[3])?;
        [out, lse]
    });
    judged(gpu, [&out, &lse], both).await
}

pub(super) async fn merge_gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let [a, of_a, b, of_b] = parts(&bench)?;
    let (out, lse) = reference::merge(&[(&a[..], &of_a[..]), (&b[..], &of_b[..])], PARTS[3])?;
    let (out, lse) = (bench.tensor(PARTS, out)?, bench.tensor(SUMS, lse)?);
    let (d_out, d_lse) = (bench.noise(PARTS, 5)?, bench.noise(SUMS, 6)?);
    let written: [Tensor; 4] =
        [bench.zeros(PARTS)?, bench.zeros(SUMS)?, bench.zeros(PARTS)?, bench.zeros(SUMS)?];
    let merge = Merge::with_pipelines(gpu.pipelines());
    let given = [partial(&a, &of_a), partial(&b, &of_b)];
    let gradients = [0, 2].map(|n| PartGradients { d_out: written[n].view(), d_lse: written[n + 1].view() });
    let forward = MergeForward::new(&given, partial(&out, &lse));
    let call = MergeBackward::new(forward, d_out.view(), &gradients).d_lse(d_lse.view());
    bench.run("gradients of a merge", |encoder| merge.backward(encoder, &call)).await?;
    let both = both!(|a, of_a, b, of_b, d_out, d_lse| {
        let of = reference::merge_backward(&[(a, of_a), (b, of_b)], PARTS[3], d_out, Some(d_lse))?;
        let mut all = of.into_iter().flat_map(|part| [part.d_out, part.d_lse]);
        [(); 4].map(|()| all.next().unwrap_or_default())
    });
    judged(gpu, written.each_ref(), both).await
}

/// Some keys are not there.
pub(super) async fn linformer(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let shape = Shape { q_len: FEW, kv_len: 23, ..PREFILL };
    let rank = 7;
    let [q, k, v] = bench.inputs(&shape)?;
    let (e, out) = (bench.noise([1, 1, rank, shape.kv_len], 4)?, bench.zeros(shape.out())?);
    let there: Vec<bool> = (0..shape.kv_len).map(|n| n % 5 != 2).collect();
    let of_keys = gpu.upload_bools(&there)?;
    let of_keys = TensorView::new(&of_keys, DType::Bool, [1, 1, 1, shape.kv_len]);
    let operator = Linformer::with_pipelines(gpu.pipelines(), config(&shape), rank)?;
    let call = LinformerForward::new(q.view(), k.view(), v.view(), e.view(), out.view()).key_mask(of_keys);
    let mut scratch = bench.scratch(operator.scratch_size(&call)?)?;
    bench.run("Linformer", |encoder| operator.forward(encoder, &call, &mut scratch)).await?;
    let both = both!(|q, k, v, e| {
        let projections = LengthProjections { e, f: e, rank, per_head: false, key_mask: Some(&there) };
        [reference::linformer(q, k, v, &projections, shape, &Options::new())?.out]
    });
    judged(gpu, [&out], both).await
}

const LSH: LshShape = LshShape { batch: 1, heads: 2, length: 21, head_dim: 12, value_dim: 20 };
const LSE: [usize; 4] = [1, LSH.heads, LSH.length, 1];
const ROUNDS: usize = 2;
const BUCKETS: usize = 4;
const CHUNK: usize = 8;

fn lsh_config() -> LshConfig {
    LshConfig::new(LSH.heads, LSH.head_dim, ROUNDS, BUCKETS, CHUNK).value_dim(LSH.value_dim)
}

/// Rotations, and the buckets that they put `qk` into.
fn hashed(qk: &[f32]) -> Result<(Vec<f32>, Vec<u32>), Error> {
    let rotations = lsh_config().rotations(7);
    let buckets = reference::lsh_buckets(qk, &rotations, LSH, ROUNDS, BUCKETS, None)?;
    Ok((rotations, buckets))
}

fn in_buckets<R>(buckets: &[u32]) -> LshHashed<'_, R> {
    let (chunk, causal) = (Some(CHUNK), false);
    LshHashed { buckets, rounds: ROUNDS, chunk, causal, scale: None, lengths: None, keys: None }
}

pub(super) async fn lsh(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (qk, v) = (bench.noise(LSH.qk(), 1)?, bench.noise(LSH.v(), 2)?);
    let (rotations, want) = hashed(&qk)?;
    let rotations = bench.tensor([1, ROUNDS, LSH.head_dim, BUCKETS / 2], rotations)?;
    let (buckets, out, lse) = (bench.zeros(LSH.buckets(ROUNDS))?, bench.zeros(LSH.v())?, bench.zeros(LSE)?);
    let attention = LshAttention::with_pipelines(gpu.pipelines(), lsh_config())?;
    let call = LshForward::new(qk.view(), v.view(), rotations.view(), buckets.view(), out.view());
    let call = call.lse(lse.view());
    let mut scratch = bench.scratch(attention.scratch_size(&call)?)?;
    bench.run("LSH attention", |encoder| attention.forward(encoder, &call, &mut scratch)).await?;
    let of_buckets = equal(&buckets.read(gpu).await?, &want);
    let both = both!(|qk, v| {
        let all = reference::lsh_attention(qk, v, &in_buckets(&want), LSH)?;
        [all.out, all.lse]
    });
    Ok(worse(of_buckets, judged(gpu, [&out, &lse], both).await?))
}

pub(super) async fn lsh_gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (qk, v, d_out) = (bench.noise(LSH.qk(), 1)?, bench.noise(LSH.v(), 2)?, bench.noise(LSH.v(), 3)?);
    let (_, buckets) = hashed(&qk)?;
    let forward = reference::lsh_attention::<f32>(&qk, &v, &in_buckets(&buckets), LSH)?;
    let (out, lse) = (bench.tensor(LSH.v(), forward.out)?, bench.tensor(LSE, forward.lse)?);
    let (buckets, d_qk, d_v) =
        (bench.tensor(LSH.buckets(ROUNDS), buckets)?, bench.zeros(LSH.qk())?, bench.zeros(LSH.v())?);
    let attention = LshAttention::with_pipelines(gpu.pipelines(), lsh_config())?;
    let call = LshForward::with_buckets(qk.view(), v.view(), buckets.view(), out.view()).lse(lse.view());
    let call = LshBackward::new(call, d_out.view());
    let call = call.d_qk(d_qk.view()).d_v(d_v.view());
    let mut scratch = bench.scratch(attention.backward_scratch_size(&call)?)?;
    let what = "gradients of LSH attention";
    bench.run(what, |encoder| attention.backward(encoder, &call, &mut scratch)).await?;
    let both = both!(|qk, v, d_out| {
        let all = reference::lsh_attention_backward(qk, v, d_out, None, &in_buckets(&buckets), LSH)?;
        [all.d_qk, all.d_v]
    });
    let terms = lsh_attention_backward_magnitudes(&qk, &v, &d_out, None, &in_buckets(&buckets), LSH)?;
    judged_gradients(gpu, [&d_qk, &d_v], both, [terms.d_qk, terms.d_v]).await
}
