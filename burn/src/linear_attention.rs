//! Linear attention of tensors.

use std::sync::Arc;

use burn::tensor::{Bool, Int, Tensor};
use burn_cubecl::tensor::CubeTensor;
use wgpu_attention::TensorView;
use wgpu_attention::linear_attention::{LinearAttention, LinearBackward, LinearConfig, LinearForward};

use crate::device::{Shared, shared};
use crate::error::{Error, Result};
use crate::graph::{Gradient, GradientTensors, Parents};
use crate::tensor::{self, Bound, Float, dims, empty, empty_like, flush, on_device, same_device};

/// One call of linear attention: `φ(q) · Σ φ(k)ᵀ v`, whose cost is linear in the length.
///
/// Shapes are as in [`LinearForward`]. `backward` of a loss computes the gradients of `query`,
/// `key` and `value`.
///
/// ```no_run
/// use burn::tensor::Tensor;
/// use wgpu_attention_burn::LinearAttend;
///
/// # fn f(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> wgpu_attention_burn::Result<()> {
/// let out = LinearAttend::new(q, k, v).configure(|config| config.causal(true)).forward()?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use]
pub struct LinearAttend {
    floats: Vec<(&'static str, Tensor<4>)>,
    others: Vec<(&'static str, Other)>,
    configure: fn(LinearConfig) -> LinearConfig,
}

#[derive(Debug)]
enum Other {
    Bool(Tensor<4, Bool>),
    Int(Tensor<4, Int>),
}

/// The number of tensors of a call that may have gradients.
const GRADIENTS: usize = 3;

impl LinearAttend {
    /// Linear attention of `query` to `key` and `value`.
    pub fn new(query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Self {
        let floats = vec![("query", query), ("key", key), ("value", value)];
        LinearAttend { floats, others: Vec::new(), configure: |config| config }
    }

    /// Sets the options: the feature map, causality, the update rule. Heads, widths and dtype
    /// follow from the tensors.
    pub fn configure(mut self, configure: fn(LinearConfig) -> LinearConfig) -> Self {
        self.configure = configure;
        self
    }

    /// The keys that queries see, `[batch or 1, kv_heads or 1, 1, kv_len]`.
    pub fn key_mask(mut self, key_mask: Tensor<4, Bool>) -> Self {
        self.others.push(("key_mask", Other::Bool(key_mask)));
        self
    }

    /// The number of keys of each sequence, `[batch or 1, kv_heads or 1, 1, 1]`.
    pub fn lengths(mut self, lengths: Tensor<4, Int>) -> Self {
        self.others.push(("lengths", Other::Int(lengths)));
        self
    }

    /// The first rows of packed sequences and the end of the last, `[1, 1, 1, sequences + 1]`.
    pub fn packed(mut self, starts: Tensor<4, Int>) -> Self {
        self.others.push(("packed", Other::Int(starts)));
        self
    }

    /// The directions of random features, `[1, 1 or kv_heads, directions, head_dim]`.
    pub fn directions(mut self, directions: Tensor<4>) -> Self {
        self.floats.push(("directions", directions));
        self
    }

    /// The decay of the update rule, `[batch, kv_heads, kv_len, 1 or features]`.
    pub fn decay(mut self, decay: Tensor<4>) -> Self {
        self.floats.push(("decay", decay));
        self
    }

    /// The rate of a delta rule, `[batch, kv_heads, kv_len, 1]`.
    pub fn beta(mut self, beta: Tensor<4>) -> Self {
        self.floats.push(("beta", beta));
        self
    }

    /// Computes the result, `[batch, heads, q_len, value_dim]`.
    ///
    /// # Errors
    /// See [`Error`]. A tracked tensor other than `query`, `key` and `value` is
    /// [`Error::Unsupported`]: detach it.
    pub fn forward(self) -> Result<Tensor<4>> {
        let names: Vec<_> = self.floats.iter().map(|(name, _)| *name).collect();
        let floats = self.floats.into_iter().map(|(name, t)| Ok((name, Float::new(name, t)?)));
        let others = self.others.into_iter().map(|(name, t)| {
            let handle = match t {
                Other::Bool(t) => tensor::bool(name, t)?,
                Other::Int(t) => tensor::int(name, t)?,
            };
            Ok((name, handle))
        });
        let others = others.collect::<Result<Vec<_>>>()?;
        let parents = Parents::new(floats.collect::<Result<_>>()?)?;
        if parents.tracked()[GRADIENTS..].contains(&true) {
            let why = "decay, beta and directions have no gradient; detach them";
            return Err(Error::Unsupported { what: "linear attention", why });
        }
        let tensors = names.into_iter().zip(parents.tensors.clone()).chain(others).collect();
        let call = Call { tensors, configure: self.configure };
        same_device(&call.tensors.iter().map(|(name, t)| (*name, t)).collect::<Vec<_>>())?;
        let query = &call.tensors[0].1;
        let shared = shared("query", &query.device)?;
        let ([batch, heads, q_len, _], [.., value_dim]) = (dims(query), dims(&call.tensors[2].1));
        let out = empty(query, vec![batch, heads, q_len, value_dim], query.dtype);
        on_device(&out, || call.forward(&shared, &out))?;
        let saved = Saved { call, out: out.clone(), shared };
        if parents.any_tracked() {
            saved.check(parents.tracked())?;
        }
        Ok(parents.finish(out, || Arc::new(saved)))
    }
}

/// A call on handles: floats first, in the order of the graph's parents.
#[derive(Debug)]
struct Call {
    tensors: Vec<(&'static str, CubeTensor)>,
    configure: fn(LinearConfig) -> LinearConfig,
}

impl Call {
    /// The tensors that may have gradients: query, key and value.
    fn differentiable(&self) -> impl Iterator<Item = &CubeTensor> {
        self.tensors[..GRADIENTS].iter().map(|(_, t)| t)
    }

    fn bind(&self) -> Result<Vec<Bound>> {
        self.tensors.iter().map(|(name, t)| Bound::new(name, t)).collect()
    }

    fn operator(&self, shared: &Shared, [q, k, v]: [TensorView; 3]) -> Result<LinearAttention> {
        let ([_, heads, _, head_dim], [_, kv_heads, ..], [.., value_dim]) = (q.shape(), k.shape(), v.shape());
        let config =
            LinearConfig::new(heads, head_dim).kv_heads(kv_heads).value_dim(value_dim).dtype(q.dtype());
        Ok(LinearAttention::with_pipelines(&shared.pipelines, (self.configure)(config))?)
    }

    fn views<'a>(&self, inputs: &'a [Bound], out: &'a Bound) -> LinearForward<'a> {
        let [q, k, v] = [0, 1, 2].map(|n| inputs[n].view());
        let mut call = LinearForward::new(q, k, v, out.view());
        for ((name, _), bound) in self.tensors.iter().zip(inputs) {
            call = match *name {
                "key_mask" => call.key_mask(bound.view()),
                "lengths" => call.lengths(bound.view()),
                "packed" => call.packed(bound.view()),
                "directions" => call.directions(bound.view()),
                "decay" => call.decay(bound.view()),
                "beta" => call.beta(bound.view()),
                _ => call,
            };
        }
        call
    }

    fn forward(&self, shared: &Shared, out: &CubeTensor) -> Result<()> {
        let (inputs, out_bound) = (self.bind()?, Bound::new("out", out)?);
        let call = self.views(&inputs, &out_bound);
        let operator = self.operator(shared, [0, 1, 2].map(|n| inputs[n].view()))?;
        let size = operator.scratch_size(&call)?;
        flush(self.tensors.iter().map(|(_, t)| t).chain([out]))?;
        shared.submit(size, |encoder, scratch| operator.forward(encoder, &call, scratch))
    }
}

#[derive(Debug)]
struct Saved {
    call: Call,
    out: CubeTensor,
    shared: Arc<Shared>,
}

impl Saved {
    /// Checks the backward pass in advance, with a gradient of the result that has no content.
    fn check(&self, wanted: &[bool]) -> Result<()> {
        on_device(&self.out, || {
            let gradients = GradientTensors::new(self.call.differentiable(), wanted)?;
            self.with_call(&empty_like(&self.out), &gradients, |operator, call| {
                Ok(operator.backward_scratch_size(call).map(drop)?)
            })
        })
    }

    /// Calls `then` with the library's call.
    fn with_call(
        &self,
        d_out: &CubeTensor,
        gradients: &GradientTensors,
        then: impl FnOnce(&LinearAttention, &LinearBackward) -> Result<()>,
    ) -> Result<()> {
        let inputs = self.call.bind()?;
        let [out, d_out] = [Bound::new("out", &self.out)?, Bound::new("d_out", d_out)?];
        let operator = self.call.operator(&self.shared, [0, 1, 2].map(|n| inputs[n].view()))?;
        let forward = self.call.views(&inputs, &out);
        let [d_q, d_k, d_v] = [0, 1, 2].map(|n| gradients.view(n));
        then(&operator, &LinearBackward::new(forward, d_out.view()).d_q(d_q).d_k(d_k).d_v(d_v))
    }
}

impl Gradient for Saved {
    fn backward(&self, d_out: CubeTensor, wanted: &[bool]) -> Result<Vec<Option<CubeTensor>>> {
        on_device(&self.out, || {
            let gradients = GradientTensors::new(self.call.differentiable(), wanted)?;
            self.with_call(&d_out, &gradients, |operator, call| {
                let size = operator.backward_scratch_size(call)?;
                let read = self.call.tensors.iter().map(|(_, t)| t).chain([&self.out, &d_out]);
                flush(read.chain(gradients.iter()))?;
                self.shared.submit(size, |encoder, scratch| operator.backward(encoder, call, scratch))
            })?;
            Ok(gradients.into_tensors())
        })
    }
}
