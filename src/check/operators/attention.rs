//! Problems of attention: masks, scores and merges.

use crate::attention::{
    Attention, Config, Forward, Merge, MergeBackward, MergeForward, PartGradients, Partial, ScoreStage,
};
use crate::check::bench::{Bench, Tensor, both, equal, judged, worse};
use crate::check::data::{FEW, Outcome, PREFILL};
use crate::gpu::Gpu;
use crate::mask::{Blocks, DeviceMask, HostMask};
use crate::reference::compare::{Tolerance, compare};
use crate::reference::{self, Options};
use crate::tensor::{Error, Shape};

/// Checks a block map, and the pairs of a mask one by one.
pub(super) async fn masks(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (shape, size) = (PREFILL, [16, 16]);
    let map = bench.zeros([1, 1, 3, 4])?;
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::of(&shape))?;
    let blocks = Blocks::new(map.view(), size);
    let lengths = [shape.batch, shape.q_len, shape.kv_len];
    let mask = DeviceMask::causal();
    bench.run("a block map", |encoder| attention.classify(encoder, &mask, lengths, &blocks)).await?;
    let host = HostMask::causal();
    let of_map = equal(&map.read(gpu).await?, &reference::classify(&host, shape, size, [1, 1])?);
    // This mask does not change scores.
    let off = gpu.compare_masks_async(&mask, &host, shape, f64::INFINITY).await?;
    Ok(worse(of_map, compare(&[off], &[0.0], Tolerance { absolute: 0.0 }).map(|_| 0.0)))
}

/// Checks the scores before the softmax, and the mean of the heads' weights.
pub(super) async fn scores(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let shape = Shape { q_len: FEW, ..PREFILL };
    let [q, k, v] = bench.inputs(&shape)?;
    let out: Tensor = bench.zeros(shape.out())?;
    let (scores, weights) = (bench.zeros(shape.weights())?, bench.zeros([1, 1, FEW, shape.kv_len])?);
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::of(&shape))?;
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

/// Rows of a merge with their channels.
const PARTS: [usize; 4] = [1, 2, 5, 12];
const SUMS: [usize; 4] = [1, 2, 5, 1];

/// Returns the outputs of two parts, and their sums.
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
