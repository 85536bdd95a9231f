//! Problems of indexers: scores, the best keys of each query, and gradients.

use crate::check::bench::{Bench, Both, Tensor, both, equal, judged_gradients, worse};
use crate::check::data::{Outcome, judge};
use crate::gpu::Gpu;
use crate::mask::Mask;
use crate::reference::{self, IndexerInputs};
use crate::selected::{Indexer, IndexerBackward, IndexerForward};
use crate::tensor::{DType, Error, Real, Shape};

/// Heads and keys that do not fill a tile.
const SHAPE: Shape =
    Shape { batch: 2, heads: 3, kv_heads: 1, q_len: 5, kv_len: 70, head_dim: 20, value_dim: 20 };
const SCALE: f32 = 0.25;
/// The selected keys of a query.
const BEST: usize = 9;

fn inputs(bench: &Bench) -> Result<[Tensor; 3], Error> {
    let Shape { batch, heads, q_len, .. } = SHAPE;
    Ok([bench.noise(SHAPE.q(), 1)?, bench.noise(SHAPE.k(), 2)?, bench.noise([batch, 1, q_len, heads], 3)?])
}

/// Returns scores with a finite number, below all others, for keys that are not permitted.
fn seen<R: Real>(scores: &[R]) -> Vec<R> {
    scores.iter().map(|x| if *x == R::neg_infinity() { R::of(-16.0) } else { *x }).collect()
}

pub(super) async fn forward(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let [q, k, w] = inputs(&bench)?;
    let Shape { batch, q_len, kv_len, .. } = SHAPE;
    let (scores, best) = (bench.zeros([batch, 1, q_len, kv_len])?, bench.zeros([batch, 1, q_len, BEST])?);
    let indexer = Indexer::with_pipelines(gpu.pipelines());
    let call = IndexerForward::new(q.view(), k.view(), w.view()).scale(SCALE).mask(Mask::causal());
    let call = call.scores(scores.view()).indices(best.view());
    let mut scratch = bench.scratch(indexer.scratch_size(&call)?)?;
    bench.run("an indexer", |encoder| indexer.forward(encoder, &call, &mut scratch)).await?;
    // The best keys are those of the scores on the device.
    let got = scores.read(gpu).await?;
    let want = reference::indexer_indices(&got, kv_len, BEST)?;
    let of_best = equal(&best.read(gpu).await?, &want);
    let both = both!(|q, k, w| {
        let inputs = IndexerInputs { q, k, w, scale: SCALE.into(), mask: Mask::causal() };
        [reference::indexer_scores(&inputs, SHAPE)?]
    });
    let ([want], [naive]): Both<1> = both;
    let of_scores = judge(&seen(&got), &seen(&want), &seen(&naive), DType::F32);
    Ok(worse(of_scores, of_best))
}

pub(super) async fn gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let [q, k, w] = inputs(&bench)?;
    let Shape { batch, q_len, kv_len, .. } = SHAPE;
    let listed: Vec<u32> = (0..(batch * q_len * BEST) as u32).map(|n| n * 13 % 71).collect();
    let listed = bench.tensor([batch, 1, q_len, BEST], listed)?;
    let d_scores = bench.noise([batch, 1, q_len, BEST], 4)?;
    let of = |t: &Tensor| bench.zeros::<f32>(t.view().shape());
    let [d_q, d_k, d_w] = [of(&q)?, of(&k)?, of(&w)?];
    let indexer = Indexer::with_pipelines(gpu.pipelines());
    let forward = IndexerForward::new(q.view(), k.view(), w.view()).scale(SCALE).mask(Mask::causal());
    let call = IndexerBackward::new(forward, d_scores.view()).indices(listed.view());
    let call = call.d_q(d_q.view()).d_k(d_k.view()).d_w(d_w.view());
    let mut scratch = bench.scratch(indexer.backward_scratch_size(&call)?)?;
    bench.run("gradients of an indexer", |encoder| indexer.backward(encoder, &call, &mut scratch)).await?;
    let both = both!(|q, k, w, d_scores| {
        let inputs = IndexerInputs { q, k, w, scale: SCALE.into(), mask: Mask::causal() };
        let dense = reference::indexer_scatter(&listed, d_scores, BEST, kv_len)?;
        let all = reference::indexer_backward(&inputs, SHAPE, &dense)?;
        [all.d_q, all.d_k, all.d_w]
    });
    let largest = |x: &[f64]| x.iter().fold(0f64, |most, x| most.max(x.abs())) as f32;
    let terms = std::array::from_fn(|n| vec![largest(&both.0[n])]);
    judged_gradients(gpu, [&d_q, &d_k, &d_w], both, terms).await
}
