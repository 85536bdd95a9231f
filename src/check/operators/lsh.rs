//! LSH attention and its gradients.

use crate::check::bench::{Bench, both, equal, judged, judged_gradients, worse};
use crate::check::data::Outcome;
use crate::gpu::Gpu;
use crate::lsh::reference::lsh_attention_backward_magnitudes;
use crate::lsh::{LshAttention, LshBackward, LshConfig, LshForward};
use crate::reference::{self, LshHashed, LshShape};
use crate::tensor::Error;

const LSH: LshShape = LshShape { batch: 1, heads: 2, length: 21, head_dim: 12, value_dim: 20 };
const LSE: [usize; 4] = [1, LSH.heads, LSH.length, 1];
const ROUNDS: usize = 2;
const BUCKETS: usize = 4;
const CHUNK: usize = 8;

fn lsh_config() -> LshConfig {
    LshConfig::new(LSH.heads, LSH.head_dim, ROUNDS, BUCKETS, CHUNK).value_dim(LSH.value_dim)
}

/// Returns rotations, and the buckets that they assign to `qk`.
fn hashed(qk: &[f32]) -> Result<(Vec<f32>, Vec<u32>), Error> {
    let rotations = lsh_config().rotations(7);
    let buckets = reference::lsh_buckets(qk, &rotations, LSH, ROUNDS, BUCKETS, None)?;
    Ok((rotations, buckets))
}

fn in_buckets<R>(buckets: &[u32]) -> LshHashed<'_, R> {
    let (chunk, causal) = (Some(CHUNK), false);
    LshHashed { buckets, rounds: ROUNDS, chunk, causal, scale: None, lengths: None, keys: None }
}

pub(super) async fn forward(gpu: &Gpu) -> Result<Outcome, Error> {
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

pub(super) async fn gradients(gpu: &Gpu) -> Result<Outcome, Error> {
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
