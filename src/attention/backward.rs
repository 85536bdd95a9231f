//! The backward pass: gradients of queries, keys, values and of the mask's tensors.

use super::call::KeyInput;
use super::dispatch::{AddedGradients, BackwardProblem, backward};
use super::plan::Added;
use super::{Attention, Forward, required_lse};
use crate::kernel::{Prepared, Recorder, Scratch, ScratchSize};
use crate::tensor::{Access, CallTensors, DType, Error, Shape, TensorView, check_apart};

/// One backward call: a [`Forward`], the gradient of its result and the tensors for the gradients.
/// The call reads the inputs, `out` and `lse` of the [`Forward`].
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q`, `d_q` | `[batch, heads, q_len, head_dim]` | the configured; gradients also F32 |
/// | `k`, `d_k` | `[batch, kv_heads, kv_len, head_dim]` | the configured; gradients also F32 |
/// | `v`, `d_v` | `[batch, kv_heads, kv_len, value_dim]` | the configured; gradients also F32 |
/// | `out`, `d_out` | `[batch, heads, q_len, value_dim]` | the configured |
/// | `lse`, `d_lse` | `[batch, heads, q_len, 1]` | F32 |
/// | `d_bias`, `d_slopes`, `d_relative`, `d_sinks` | as the mask's tensor | the tensor's, or F32 |
///
/// If an axis of the mask's tensor is 1, its gradient is summed over that axis.
///
/// The configuration must be the forward call's. The kernels compute scores again from q and k, and
/// dropout from seed and position. The caller therefore stores only `out` and `lse` of the forward
/// pass, not a score matrix. A query that sees no key has a gradient of zero and adds nothing to
/// other gradients. A key that no query sees has a gradient of zero too.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Backward<'a> {
    forward: Forward<'a>,
    d_out: TensorView<'a>,
    d_lse: Option<TensorView<'a>>,
    d_q: Option<TensorView<'a>>,
    d_k: Option<TensorView<'a>>,
    d_v: Option<TensorView<'a>>,
    d_added: AddedGradients<'a>,
    accumulates: bool,
    partial: bool,
}

impl<'a> Backward<'a> {
    /// Takes the forward call, unchanged, and the gradient of its `out`. Its keys and values must
    /// be tensors, and it must have [`lse`](Forward::lse). No gradient is written unless the caller
    /// requests it.
    pub fn new(forward: Forward<'a>, d_out: TensorView<'a>) -> Self {
        let [d_lse, d_q, d_k, d_v] = [None; 4];
        let d_added = AddedGradients::default();
        Backward { forward, d_out, d_lse, d_q, d_k, d_v, d_added, accumulates: false, partial: false }
    }

    /// The gradient of `lse`. Set it if the loss depends on `lse` too.
    pub fn d_lse(mut self, d_lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_lse = d_lse.into();
        self
    }

    /// Writes the gradient of the queries to `d_q`.
    pub fn d_q(mut self, d_q: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_q = d_q.into();
        self
    }

    /// Writes the gradient of the keys to `d_k`, summed over the query heads that share them.
    pub fn d_k(mut self, d_k: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_k = d_k.into();
        self
    }

    /// Writes the gradient of the values to `d_v`, summed over the query heads that share them.
    pub fn d_v(mut self, d_v: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_v = d_v.into();
        self
    }

    /// Writes the gradient of [`Mask::bias`](crate::Mask::bias) to `d_bias`, which has the bias's
    /// shape. Where an axis of 1 repeats, its gradients are summed. A pair in a full block of a
    /// [block map](crate::Mask::blocks) has no bias, so it adds nothing.
    pub fn d_bias(self, d_bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_added(Added::Bias, d_bias.into())
    }

    /// Writes the gradient of the slopes of [`Mask::alibi`](crate::Mask::alibi) or of
    /// [`Mask::alibi_symmetric`](crate::Mask::alibi_symmetric) to `d_slopes`. It is shaped and
    /// summed as the slopes are.
    pub fn d_slopes(self, d_slopes: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_added(Added::Slopes, d_slopes.into())
    }

    /// Writes the gradient of the table of [`Mask::relative`](crate::Mask::relative) to
    /// `d_relative`. It is shaped and summed as the table is. The outermost entries include the
    /// gradients of all larger distances.
    pub fn d_relative(self, d_relative: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_added(Added::Relative, d_relative.into())
    }

    /// Writes the gradient of [`Mask::sink_logits`](crate::Mask::sink_logits) to `d_sinks`. It is
    /// shaped and summed as the logits are. For a query that sees no key but has a sink, only its
    /// `d_lse` counts, not its `d_out`.
    pub fn d_sinks(self, d_sinks: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_added(Added::Sinks, d_sinks.into())
    }

    /// Writes the gradients of the tensors that the mask's [`ScoreMod`](crate::mask::ScoreMod)
    /// captures. `d_captured` has one entry for each captured tensor, in their order, with that
    /// tensor's shape. `None` means that a gradient is not wanted. Where an axis of 1 repeats, its
    /// gradients are summed.
    ///
    /// The crate derives these gradients from the text of the function, like the derivative by the
    /// score. Every 2048 elements of a tensor cost a pass over all pairs.
    pub fn d_captured(mut self, d_captured: &[Option<TensorView<'a>>]) -> Self {
        self.d_added.set_captured(d_captured);
        self
    }

    fn d_added(mut self, of: Added, gradient: Option<TensorView<'a>>) -> Self {
        self.d_added.set(of, gradient);
        self
    }

    /// Adds the gradients to the tensors' previous values, and rounds the sums once to their type.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }

    /// True if `out` and `lse` cover more keys than this call does, for example keys of several
    /// devices. A weight is then exp(score − lse). Otherwise the kernels also divide the weights of
    /// a query by their sum, because lse is one rounded number.
    pub fn partial(mut self, partial: bool) -> Self {
        self.partial = partial;
        self
    }
}

/// Gradients of tensors, without a score matrix and without atomics. The same inputs, device and
/// plan give the same bits.
impl Attention {
    /// The temporary memory that `call` needs. It is 16 bytes for each query of each head. The
    /// gradients of a mask's tensors need at most 1 MiB more.
    ///
    /// # Errors
    /// The errors of [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &Backward) -> Result<ScratchSize, Error> {
        let problem = self.check_backward(call)?;
        Ok(backward::plan(&problem, &self.pipelines.facts())?.scratch_size())
    }

    /// Records the gradients of a forward call into an encoder or a pass (Dao 2023,
    /// "FlashAttention-2").
    ///
    /// ```no_run
    /// # fn f(attention: &wgpu_attention::Attention, encoder: &mut wgpu::CommandEncoder,
    /// #      tensors: [wgpu_attention::TensorView; 9]) -> Result<(), wgpu_attention::Error> {
    /// # let [q, k, v, out, lse, d_out, d_q, d_k, d_v] = tensors;
    /// # let device = attention.pipelines().device();
    /// use wgpu_attention::{Backward, Forward, Mask, Scratch};
    ///
    /// let forward = Forward::new(q, k, v, out).lse(lse).mask(Mask::causal());
    /// let backward = Backward::new(forward, d_out).d_q(d_q).d_k(d_k).d_v(d_v);
    /// let size = attention.scratch_size(&forward)?.max(attention.backward_scratch_size(&backward)?);
    /// let mut scratch = Scratch::new(device, size)?;
    /// attention.forward(encoder, &forward, &mut scratch)?;
    /// // … what gives d_out …
    /// attention.backward(encoder, &backward, &mut scratch)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns the errors that [`Error`] lists for tensors, masks, options and scratch. It returns
    /// [`Error::Unsupported`] if:
    ///
    /// - no gradient is requested,
    /// - a gradient is requested of a tensor that the mask does not have,
    /// - the forward call has no `lse` or reads a cache.
    ///
    /// [`Error::Limit`] means that the device cannot bind so many tensors of a mask together with
    /// the other tensors. After an error, nothing has been recorded.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &Backward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, and compiles and binds its kernels. [`Prepared::record`] then records it any
    /// number of times.
    ///
    /// # Errors
    /// The errors of [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &Backward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let problem = self.check_backward(call)?;
        self.pipelines.with_fallbacks(|| {
            let device = &self.pipelines.facts();
            let plans = backward::plan(&problem, device)?;
            let memory = plans.memory(scratch)?;
            let dispatches = backward::dispatches(&problem, &plans, memory, device);
            self.pipelines.bind("attention.backward", &dispatches, scratch.bindings())
        })
    }

    /// Checks everything about a call that does not need its pipelines.
    pub(crate) fn check_backward<'a>(&self, call: &Backward<'a>) -> Result<BackwardProblem<'a>, Error> {
        let device = &self.pipelines.facts();
        let config = &self.config;
        let Backward { forward, d_out, d_lse, d_q, d_k, d_v, d_added, accumulates, partial } = *call;
        let Forward { q, keys, out, mask, lse, dropout, .. } = forward;
        let KeyInput::Tensors { k, v } = keys else {
            let why = "cached keys and values have no gradient; pass keys and values as tensors";
            return Err(Error::Unsupported { what: "the backward pass of attention to a cache", why });
        };
        let lse = required_lse(lse)?;
        let mut tensors = CallTensors::new(device);
        let out_view = ("out", out, Access::Read);
        let shape = Shape::of(&mut tensors, config.dtype, config.dims(), [q, k, v], out_view)?;
        tensors.read("lse", lse, DType::F32, shape.lse())?;
        tensors.read("d_out", d_out, config.dtype, shape.out())?;
        tensors.read("d_lse", d_lse, DType::F32, shape.lse())?;
        tensors.gradient("d_q", d_q, config.dtype, shape.q())?;
        tensors.gradient("d_k", d_k, config.dtype, shape.k())?;
        tensors.gradient("d_v", d_v, config.dtype, shape.v())?;
        check_apart(tensors.written(), device)?;
        mask.check(&shape, device)?;
        mask.mods().check_slope()?;
        tensors.read_checked(mask.tensors());
        d_added.check(&mask, &mut tensors)?;
        tensors.require_gradients(
            "no gradient is requested; set `d_q`, `d_k`, `d_v` or a gradient of the mask",
        )?;
        if let Some(dropout) = &dropout {
            dropout.check_for(shape.weights(), &mut tensors)?;
        }
        tensors.check_aliasing()?;
        Ok(BackwardProblem {
            d_lse,
            d_q,
            d_k,
            d_v,
            d_added,
            accumulates,
            adds_to_added: accumulates,
            mask,
            dropout,
            partial,
            ..config.backward_problem(shape, [q, k, v], [out, lse, d_out])
        })
    }
}
