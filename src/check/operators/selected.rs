//! Problems of selected attention: lists with a window and sinks, the weights of indices, and
//! gradients.

use crate::attention::{Backward, Config, Forward};
use crate::check::bench::{Bench, Tensor, both, judged, judged_gradients};
use crate::check::data::{FEW, Outcome};
use crate::gpu::Gpu;
use crate::mask::{At, DeviceMask, HostMask};
use crate::reference::{self, Options, SelectedKeys};
use crate::selected::{SelectedAttention, SelectedBackward, SelectedConfig, SelectedForward};
use crate::tensor::{Error, HostTensor, Shape, TensorView};

const SHAPE: Shape =
    Shape { batch: 1, heads: 4, kv_heads: 2, q_len: FEW, kv_len: 53, head_dim: 12, value_dim: 20 };
const COUNT: usize = 8;
const WINDOW: usize = 5;
const INDICES: [usize; 4] = [1, 1, FEW, COUNT];
const SINKS: [usize; 4] = [1, SHAPE.heads, 1, 1];

struct Tensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor<u32>,
    sinks: Tensor,
}

impl Tensors {
    /// Some indices repeat, are later than the query, or name nothing.
    fn new(bench: &Bench) -> Result<Self, Error> {
        let [q, k, v] = bench.inputs(&SHAPE)?;
        let index = |n: u32| if n % 6 == 5 { u32::MAX } else { n * n * 7 % 53 };
        let indices = (0..(FEW * COUNT) as u32).map(index).collect();
        Ok(Tensors { q, k, v, indices: bench.tensor(INDICES, indices)?, sinks: bench.noise(SINKS, 4)? })
    }

    fn forward<'a>(&'a self, out: TensorView<'a>, lse: TensorView<'a>) -> Forward<'a> {
        let mask = DeviceMask::causal().sink_logits(self.sinks.view());
        Forward::new(self.q.view(), self.k.view(), self.v.view(), out).lse(lse).mask(mask)
    }

    fn keys(&self) -> SelectedKeys<'_> {
        let indices = HostTensor::new(&self.indices, INDICES);
        SelectedKeys { indices, heads: SHAPE.heads, block: 1, window: WINDOW }
    }

    /// Calls `f` with the options of the reference.
    fn with_options<T>(&self, f: impl FnOnce(&Options) -> T) -> T {
        let keys = self.keys();
        let sees = |at: &At| keys.names(at);
        let mask = HostMask::causal().sink_logits(HostTensor::new(&self.sinks, SINKS)).mask_fn(&sees);
        f(&Options::new().mask(mask).weights(true))
    }
}

fn operator(gpu: &Gpu) -> Result<SelectedAttention, Error> {
    let config = SelectedConfig::new(Config::of(&SHAPE)).window(WINDOW);
    SelectedAttention::with_pipelines(gpu.pipelines(), config)
}

pub(super) async fn forward(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let tensors = Tensors::new(&bench)?;
    let (out, lse) = (bench.zeros(SHAPE.out())?, bench.zeros(SHAPE.lse())?);
    let weights = bench.zeros([1, SHAPE.heads, FEW, COUNT])?;
    let attention = operator(gpu)?;
    let call = SelectedForward::new(tensors.forward(out.view(), lse.view()), tensors.indices.view());
    let call = call.weights(weights.view());
    let mut scratch = bench.scratch(attention.scratch_size(&call)?)?;
    bench.run("selected attention", |encoder| attention.forward(encoder, &call, &mut scratch)).await?;
    let Tensors { q, k, v, .. } = &tensors;
    let both = both!(|q, k, v| {
        let all = tensors.with_options(|options| reference::attention(q, k, v, SHAPE, options))?;
        let weights = tensors.keys().weights(&all.weights.unwrap_or_default(), SHAPE.kv_len)?;
        [all.out, all.lse, weights]
    });
    judged(gpu, [&out, &lse, &weights], both).await
}

pub(super) async fn gradients(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let (tensors, d_out) = (Tensors::new(&bench)?, bench.noise(SHAPE.out(), 5)?);
    let Tensors { q, k, v, indices, .. } = &tensors;
    let attended = tensors.with_options(|options| reference::attention::<f32>(q, k, v, SHAPE, options))?;
    let (out, lse) = (bench.tensor(SHAPE.out(), attended.out)?, bench.tensor(SHAPE.lse(), attended.lse)?);
    let (d_q, d_k, d_v) = (bench.zeros(SHAPE.q())?, bench.zeros(SHAPE.k())?, bench.zeros(SHAPE.v())?);
    let attention = operator(gpu)?;
    let back = Backward::new(tensors.forward(out.view(), lse.view()), d_out.view());
    let back = back.d_q(d_q.view()).d_k(d_k.view()).d_v(d_v.view());
    let call = SelectedBackward::new(back, indices.view());
    let mut scratch = bench.scratch(attention.backward_scratch_size(&call)?)?;
    let what = "gradients of selected attention";
    bench.run(what, |encoder| attention.backward(encoder, &call, &mut scratch)).await?;
    let both = both!(|q, k, v, d_out| {
        let all = tensors
            .with_options(|options| reference::attention_backward(q, k, v, d_out, None, SHAPE, options))?;
        [all.d_q, all.d_k, all.d_v]
    });
    let terms = tensors.with_options(|options| {
        reference::attention_backward_magnitudes::<f32>(q, k, v, &d_out, None, SHAPE, options)
    })?;
    judged_gradients(gpu, [&d_q, &d_k, &d_v], both, [terms.d_q, terms.d_k, terms.d_v]).await
}
