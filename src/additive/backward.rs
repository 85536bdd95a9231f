//! The backward pass: gradients of queries, keys, values and the score vector.

use super::dispatch_backward::{self, AdditiveProblem};
use super::{AdditiveAttention, AdditiveForward, check_score_vector};
use crate::attention::dispatch::{AddedGradients, BackwardProblem};
use crate::attention::{Forward, required_lse};
use crate::kernel::{MatrixUnits, Prepared, Recorder, Scratch, ScratchSize};
use crate::tensor::{Access, CallTensors, DType, Error, Shape, TensorView};

/// One backward call of additive attention. It reads the inputs, `out` and `lse` of an
/// [`AdditiveForward`], and the gradient of its result. It writes the gradients of the inputs.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q`, `d_q` | `[batch, heads, q_len, hidden]` | the configured; `d_q` also F32 |
/// | `k`, `d_k` | `[batch, kv_heads, kv_len, hidden]` | the configured; `d_k` also F32 |
/// | `v`, `d_v` | `[batch, kv_heads, kv_len, value_dim]` | the configured; `d_v` also F32 |
/// | `score_vector` | `[1, heads or 1, 1, hidden]` | F32, F16 or BF16 |
/// | `d_score_vector` | as `score_vector` | as `score_vector`, or F32 |
/// | `out`, `d_out` | `[batch, heads, q_len, value_dim]` | the configured |
/// | `lse`, `d_lse` | `[batch, heads, q_len, 1]` | F32 |
///
/// A query that sees no key has a gradient of zero and adds nothing to other gradients. A key that
/// no query sees has a gradient of zero too. The call does not compute gradients of the terms that
/// a mask adds to scores.
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
    /// Takes `forward`, unchanged and with its [`lse`](AdditiveForward::lse), and the gradient of
    /// its `out`. The call writes only the gradients that you request.
    pub fn new(forward: AdditiveForward<'a>, d_out: TensorView<'a>) -> Self {
        let [d_lse, d_q, d_k, d_v, d_score_vector] = [None; 5];
        AdditiveBackward { forward, d_out, d_lse, d_q, d_k, d_v, d_score_vector, accumulates: false }
    }

    /// The gradient of `lse`, if the loss depends on `lse` too.
    pub fn d_lse(mut self, d_lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_lse = d_lse.into();
        self
    }

    /// Writes the gradient of the projected queries to `d_q`.
    pub fn d_q(mut self, d_q: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_q = d_q.into();
        self
    }

    /// Writes the gradient of the projected keys to `d_k`, summed over the query heads that share
    /// them.
    pub fn d_k(mut self, d_k: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_k = d_k.into();
        self
    }

    /// Writes the gradient of the values to `d_v`, summed over the query heads that share them.
    pub fn d_v(mut self, d_v: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_v = d_v.into();
        self
    }

    /// Writes the gradient of the score vector to `d_score_vector`, summed over the batch and over
    /// the heads that share it.
    pub fn d_score_vector(mut self, d_score_vector: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_score_vector = d_score_vector.into();
        self
    }

    /// Adds the gradients to the contents of their tensors, and rounds each sum once to its type.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }
}

/// The backward pass. It stores no hidden units of pairs and uses no atomics. The same inputs on
/// the same device with the same plan give the same bits.
impl AdditiveAttention {
    /// Returns the temporary memory that `call` needs. Each query of each head needs 16 bytes, and
    /// each pair 8 bytes. Pairs take at most 64 MiB, unless the pairs of a single query or key take
    /// more. Beyond that the call computes pairs part by part, once for queries and once for keys.
    /// Each group of up to 64 queries also needs a number for each hidden unit.
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
    /// Any error that [`Error`] lists for tensors, masks, options and scratch.
    /// [`Error::Unsupported`] if the call requests no gradient, or if the forward call has no
    /// `lse`. [`Error::Limit`] if the device cannot bind the tensors of the mask with all others.
    /// The encoder is then unchanged.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &AdditiveBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its kernels and binds its tensors. [`Prepared::record`] then records
    /// it any number of times.
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

    /// Checks a call, before its pipelines are compiled.
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
        tensors.require_gradients("no gradient is requested; set `d_q`, `d_k`, `d_v` or `d_score_vector`")?;
        if config.kernel_options.matrix_units == MatrixUnits::Always {
            let why = "additive scores are sums of `tanh`, not products; set `MatrixUnits::Auto`";
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
            lists: None,
            mask,
            dropout,
            scale: 1.0,
            softcap: None,
            kernel_options: config.kernel_options,
        };
        Ok(AdditiveProblem { problem, score_vector, d_score_vector })
    }
}
