//! The backward pass: gradients of queries, keys, values and the vector that scores are made of.

use super::dispatch_backward::{self, AdditiveProblem};
use super::{AdditiveAttention, AdditiveForward, check_score_vector};
use crate::attention::dispatch::{AddedGradients, BackwardProblem};
use crate::attention::{Forward, required_lse};
use crate::kernel::{MatrixUnits, Prepared, Recorder, Scratch, ScratchSize};
use crate::tensor::{Access, CallTensors, DType, Error, Shape, TensorView};

/// One backward call of additive attention: an [`AdditiveForward`], whose inputs, `out` and `lse`
/// are read, the gradient of its result, and where the gradients go.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q`, `d_q` | `[batch, heads, q_len, hidden]` | the configured; of the gradient F32 too |
/// | `k`, `d_k` | `[batch, kv_heads, kv_len, hidden]` | the configured; of the gradient F32 too |
/// | `v`, `d_v` | `[batch, kv_heads, kv_len, value_dim]` | the configured; of the gradient F32 too |
/// | `score_vector`, `d_score_vector` | `[1, heads or 1, 1, hidden]`, both alike | F32, F16 or BF16; of the gradient its own, or F32 |
/// | `out`, `d_out` | `[batch, heads, q_len, value_dim]` | the configured |
/// | `lse`, `d_lse` | `[batch, heads, q_len, 1]` | F32 |
///
/// A query that sees no key has a gradient of zero and gives none to others; so has a
/// key that no query sees. Gradients of what a mask adds to scores are not computed.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct AdditiveBackward<'a> {
    forward: AdditiveForward<'a>,
    d_out: TensorView<'a>,
    d_lse: Option<TensorView<'a>>,
    d_q: Option<TensorView<'a>>,
    d_k: Option<TensorView<'a>>,
    d_v: Option<TensorView<'a>>,
    d_score_vector: Option<TensorView<'a>>,
    accumulates: bool,
}

impl<'a> AdditiveBackward<'a> {
    /// `forward` as it was made, with its [`lse`](AdditiveForward::lse), and the gradient of its
    /// `out`. No gradient is written until it is asked for.
    pub fn new(forward: AdditiveForward<'a>, d_out: TensorView<'a>) -> Self {
        let [d_lse, d_q, d_k, d_v, d_score_vector] = [None; 5];
        AdditiveBackward { forward, d_out, d_lse, d_q, d_k, d_v, d_score_vector, accumulates: false }
    }

    /// The gradient of `lse`, where the loss depends on that too.
    pub fn d_lse(mut self, d_lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_lse = d_lse.into();
        self
    }

    /// Writes the gradient of the projected queries there.
    pub fn d_q(mut self, d_q: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_q = d_q.into();
        self
    }

    /// Writes the gradient of the projected keys there: summed over the query heads that share
    /// them.
    pub fn d_k(mut self, d_k: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_k = d_k.into();
        self
    }

    /// Writes the gradient of the values there: summed over the query heads that share them.
    pub fn d_v(mut self, d_v: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_v = d_v.into();
        self
    }

    /// Writes the gradient of the score vector there, summed over the batch, and over the heads
    /// that share it.
    pub fn d_score_vector(mut self, d_score_vector: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_score_vector = d_score_vector.into();
        self
    }

    /// Adds the gradients to what is there instead, rounding once to their type.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }
}

/// Gradients, without the hidden units of pairs in memory and without atomics: the same inputs on
/// the same device by the same plan give the same bits.
impl AdditiveAttention {
    /// The temporary memory that `call` needs: 16 bytes for each query of each head; 8 for each
    /// pair, but at most 64 MiB unless a single query's or key's pairs take more, beyond which
    /// pairs are computed part by part, once for queries and once for keys; and a number for each
    /// hidden unit of up to 64 queries.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &AdditiveBackward) -> Result<ScratchSize, Error> {
        let problem = self.check_backward(call)?;
        Ok(dispatch_backward::plan(&problem, &self.pipelines.facts())?.scratch_size(&problem))
    }

    /// Records the gradients of a forward call into an encoder or a pass.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors, masks, options and scratch; [`Error::Unsupported`] if no gradient
    /// is asked for, or the forward call has no `lse`; [`Error::Limit`] if the device cannot bind so many tensors of a
    /// mask beside the others. Then nothing has been recorded.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &AdditiveBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(
        &self,
        call: &AdditiveBackward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let problem = self.check_backward(call)?;
        let plan = dispatch_backward::plan(&problem, device)?;
        let memory = plan.memory(&problem, scratch)?;
        let dispatches = dispatch_backward::dispatches(&problem, &plan, memory, device);
        self.pipelines.bind("additive attention backward", &dispatches, scratch.bindings())
    }

    /// Everything that can be said of a call before its pipelines.
    fn check_backward<'a>(&self, call: &AdditiveBackward<'a>) -> Result<AdditiveProblem<'a>, Error> {
        let device = &self.pipelines.facts();
        let config = &self.config;
        let AdditiveBackward { forward, d_out, d_lse, d_q, d_k, d_v, d_score_vector, .. } = *call;
        let AdditiveForward { call: Forward { q, out, lse, mask, dropout, .. }, k, v, score_vector } =
            forward;
        let mut tensors = CallTensors::new(device);
        let out_view = ("out", out, Access::Read);
        let shape = Shape::of(&mut tensors, config.dtype, config.dims(), [q, k, v], out_view)?;
        let lse = required_lse(lse)?;
        tensors.read("lse", lse, DType::F32, shape.lse())?;
        tensors.read("d_out", d_out, config.dtype, shape.out())?;
        tensors.read("d_lse", d_lse, DType::F32, shape.lse())?;
        check_score_vector(score_vector, &shape, &mut tensors)?;
        tensors.gradient("d_q", d_q, config.dtype, shape.q())?;
        tensors.gradient("d_k", d_k, config.dtype, shape.k())?;
        tensors.gradient("d_v", d_v, config.dtype, shape.v())?;
        tensors.gradient("d_score_vector", d_score_vector, score_vector.dtype(), score_vector.shape())?;
        tensors.require_gradients("nothing is asked for: give `d_q`, `d_k`, `d_v` or `d_score_vector`")?;
        if config.kernel_options.matrix_units == MatrixUnits::Always {
            let why = "they multiply, and an additive score is a sum of tanh; leave the matrix units to Auto";
            return Err(Error::Unsupported { what: "matrix units for this call", why });
        }
        mask.check(&shape, device)?;
        mask.mods().check_slope()?;
        tensors.read_checked(mask.tensors());
        if let Some(dropout) = &dropout {
            dropout.check_for(shape.weights(), &mut tensors)?;
        }
        tensors.finish()?;
        let problem = BackwardProblem {
            shape,
            appended: 0,
            q,
            k,
            v,
            out,
            lse,
            d_out,
            d_lse,
            d_q,
            d_k,
            d_v,
            d_added: AddedGradients::default(),
            accumulates: call.accumulates,
            adds_to_added: false,
            partial: false,
            mask,
            dropout,
            scale: 1.0,
            softcap: None,
            kernel_options: config.kernel_options,
        };
        Ok(AdditiveProblem { problem, score_vector, d_score_vector })
    }
}
