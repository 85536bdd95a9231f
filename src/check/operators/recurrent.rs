//! Problems of recurrent attention: two chunks of a gated delta rule, and its gradients.

use crate::check::bench::{Bench, Tensor, both, judged, judged_gradients};
use crate::check::data::Outcome;
use crate::gpu::Gpu;
use crate::recurrent::{Decay, RecurrentAttention, RecurrentBackward, RecurrentConfig, RecurrentForward};
use crate::reference::{self, RecurrentInputs, RecurrentOptions};
use crate::tensor::{Error, Shape, TensorView};

/// Value heads, and one head of queries and keys. Tokens for two chunks.
const SHAPE: Shape =
    Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 70, kv_len: 70, head_dim: 12, value_dim: 20 };
const EPS: f64 = 1e-6;

struct Tensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
}

impl Tensors {
    fn new(bench: &Bench) -> Result<Self, Error> {
        let Shape { batch, heads, kv_heads, q_len, head_dim, .. } = SHAPE;
        let (keys, token) = ([batch, kv_heads, q_len, head_dim], [batch, heads, q_len, 1]);
        let positive =
            |seed| bench.noise(token, seed).map(|t| t.iter().map(|x| 0.5 + 0.4 * x).collect::<Vec<_>>());
        Ok(Tensors {
            q: bench.noise(keys, 1)?,
            k: bench.noise(keys, 2)?,
            v: bench.noise(SHAPE.out(), 3)?,
            decay: bench.tensor(token, positive(4)?.into_iter().map(|x| -0.2 * x).collect())?,
            beta: bench.tensor(token, positive(5)?)?,
        })
    }

    fn call<'a>(&'a self, out: TensorView<'a>) -> RecurrentForward<'a> {
        RecurrentForward::new(self.q.view(), self.k.view(), self.v.view(), out)
            .decay(self.decay.view())
            .beta(self.beta.view())
    }
}

fn operator(gpu: &Gpu) -> Result<RecurrentAttention, Error> {
    let Shape { heads, kv_heads, head_dim, value_dim, .. } = SHAPE;
    let config = RecurrentConfig::new(kv_heads, head_dim).value_heads(heads).value_dim(value_dim);
    let config = config.decay(Decay::PerHead).delta(true).normalize_qk(EPS);
    RecurrentAttention::with_pipelines(gpu.pipelines(), config)
}

fn options() -> RecurrentOptions {
    RecurrentOptions {
        scale: 1.0 / (SHAPE.head_dim as f64).sqrt(),
        delta: true,
        unit_eps: Some(EPS),
        sequences: vec![[0, 0, SHAPE.q_len]],
    }
}

pub(super) async fn forward(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (tensors, out) = (Tensors::new(&bench)?, bench.zeros(SHAPE.out())?);
    let attention = operator(gpu)?;
    let call = tensors.call(out.view());
    let mut scratch = bench.scratch(attention.scratch_size(&call)?)?;
    bench.run("recurrent attention", |encoder| attention.forward(encoder, &call, &mut scratch)).await?;
    let Tensors { q, k, v, decay, beta } = &tensors;
    let both = both!(|q, k, v, decay, beta| {
        let inputs = RecurrentInputs { q, k, v, decay, beta, initial: &[] };
        [reference::recurrent_attention(&inputs, SHAPE, &options())?.out]
    });
    judged(gpu, [&out], both).await
}

pub(super) async fn gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (tensors, d_out) = (Tensors::new(&bench)?, bench.noise(SHAPE.out(), 6)?);
    let of = |t: &Tensor| bench.zeros::<f32>(t.view().shape());
    let Tensors { q, k, v, decay, beta } = &tensors;
    let [d_q, d_k, d_v, d_decay, d_beta] = [of(q)?, of(k)?, of(v)?, of(decay)?, of(beta)?];
    let attention = operator(gpu)?;
    // The backward pass does not read `out`.
    let call = RecurrentBackward::new(tensors.call(d_out.view()), d_out.view())
        .d_q(d_q.view())
        .d_k(d_k.view())
        .d_v(d_v.view())
        .d_decay(d_decay.view())
        .d_beta(d_beta.view());
    let mut scratch = bench.scratch(attention.backward_scratch_size(&call)?)?;
    let what = "gradients of recurrent attention";
    bench.run(what, |encoder| attention.backward(encoder, &call, &mut scratch)).await?;
    let both = both!(|q, k, v, decay, beta, d_out| {
        let inputs = RecurrentInputs { q, k, v, decay, beta, initial: &[] };
        let all = reference::recurrent_attention_backward(&inputs, SHAPE, &options(), d_out, &[])?;
        [all.d_q, all.d_k, all.d_v, all.d_decay, all.d_beta]
    });
    let most = |x: &[f64]| x.iter().fold(0f64, |most, x| most.max(x.abs()));
    let terms = std::array::from_fn(|n| vec![most(&both.0[n]) as f32]);
    judged_gradients(gpu, [&d_q, &d_k, &d_v, &d_decay, &d_beta], both, terms).await
}
