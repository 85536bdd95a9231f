//! The backward pass: gradients of queries, keys, values and of what their scores are changed by.

use super::call::KeyInput;
use super::dispatch::{AddedGradients, BackwardProblem, backward};
use super::plan::Added;
use super::{Attention, Forward, required_lse, scale_in_f32};
use crate::kernel::{Prepared, Recorder, Scratch, ScratchSize};
use crate::tensor::{Access, CallTensors, DType, Error, Shape, TensorView, check_apart};

/// One backward call: a [`Forward`], whose inputs, `out` and `lse` are read, the gradient of its
/// result, and where the gradients go.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q`, `d_q` | `[batch, heads, q_len, head_dim]` | the configured; of the gradient F32 too |
/// | `k`, `d_k` | `[batch, kv_heads, kv_len, head_dim]` | the configured; of the gradient F32 too |
/// | `v`, `d_v` | `[batch, kv_heads, kv_len, value_dim]` | the configured; of the gradient F32 too |
/// | `out`, `d_out` | `[batch, heads, q_len, value_dim]` | the configured |
/// | `lse`, `d_lse` | `[batch, heads, q_len, 1]` | F32 |
/// | `d_bias`, `d_slopes`, `d_relative`, `d_sinks` | as the mask's own tensor, whose axes of 1 are summed over | the mask's tensor's, or F32 |
///
/// The configuration must be the forward call's: scores are computed again from q and k, and
/// dropout from seed and position. What the forward pass must keep is therefore `out` and `lse`, no
/// score matrix. A query that sees no key has a gradient of zero and gives none to others; so has a
/// key that no query sees.
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
    /// `forward` as it was made, of keys and values that are tensors, with its
    /// [`lse`](Forward::lse), and the gradient of its `out`. No gradient is written until it is
    /// asked for.
    pub fn new(forward: Forward<'a>, d_out: TensorView<'a>) -> Self {
        let [d_lse, d_q, d_k, d_v] = [None; 4];
        let d_added = AddedGradients::default();
        Backward { forward, d_out, d_lse, d_q, d_k, d_v, d_added, accumulates: false, partial: false }
    }

    /// The gradient of `lse`, where the loss depends on that too.
    pub fn d_lse(mut self, d_lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_lse = d_lse.into();
        self
    }

    /// Writes the gradient of the queries there.
    pub fn d_q(mut self, d_q: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_q = d_q.into();
        self
    }

    /// Writes the gradient of the keys there: summed over the query heads that share them.
    pub fn d_k(mut self, d_k: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_k = d_k.into();
        self
    }

    /// Writes the gradient of the values there: summed over the query heads that share them.
    pub fn d_v(mut self, d_v: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_v = d_v.into();
        self
    }

    /// Writes the gradient of [`Mask::bias`](crate::Mask::bias) there, shaped as the bias: where an
    /// axis of 1 repeats, its gradients are summed. A pair in a full block of a [block
    /// map](crate::Mask::blocks) has no bias and gives it nothing.
    pub fn d_bias(self, d_bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_added(Added::Bias, d_bias.into())
    }

    /// Writes the gradient of the slopes of [`Mask::alibi`](crate::Mask::alibi) or of
    /// [`Mask::alibi_symmetric`](crate::Mask::alibi_symmetric) there, shaped and summed as the slopes are.
    pub fn d_slopes(self, d_slopes: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_added(Added::Slopes, d_slopes.into())
    }

    /// Writes the gradient of the table of [`Mask::relative`](crate::Mask::relative) there, shaped
    /// and summed as the table is. The outermost entries have the gradients of all that are
    /// further.
    pub fn d_relative(self, d_relative: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_added(Added::Relative, d_relative.into())
    }

    /// Writes the gradient of [`Mask::sink_logits`](crate::Mask::sink_logits) there, shaped and
    /// summed as they are. A query that sees no key but has a sink gives it what its `d_lse` says,
    /// and its `d_out` nothing.
    pub fn d_sinks(self, d_sinks: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_added(Added::Sinks, d_sinks.into())
    }

    /// Writes the gradients of the tensors that the mask's [`ScoreMod`](crate::mask::ScoreMod)
    /// captures there, in their order, each shaped as its tensor: where an axis of 1 repeats, its
    /// gradients are summed. `None` for those that are not wanted. They come from the text, as the
    /// derivative by the score does; each 2048 elements of a tensor cost a pass over all pairs.
    pub fn d_captured(mut self, d_captured: &[Option<TensorView<'a>>]) -> Self {
        self.d_added.set_captured(d_captured);
        self
    }

    fn d_added(mut self, of: Added, gradient: Option<TensorView<'a>>) -> Self {
        self.d_added.set(of, gradient);
        self
    }

    /// Adds the gradients to what is there instead, rounding once to their type.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }

    /// True if `out` and `lse` are of more keys than this call's, as where several devices share
    /// the keys: then a weight is exp(score − lse). Otherwise the weights of a query are divided by
    /// their sum too, as lse is one rounded number.
    pub fn partial(mut self, partial: bool) -> Self {
        self.partial = partial;
        self
    }
}

/// Gradients of tensors, without a score matrix and without atomics: the same inputs on the same
/// device by the same plan give the same bits.
impl Attention {
    /// The temporary memory that `call` needs: 16 bytes for each query of each head, and at most 1
    /// MiB for the gradients of a mask's tensors.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
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
    /// Everything that [`Error`] lists for tensors, masks, options and scratch; [`Error::Unsupported`] if no gradient
    /// is asked for, or that of a tensor which the mask has not, or the forward call has no `lse` or reads a cache;
    /// [`Error::Limit`] if the device cannot bind so many tensors of a mask beside the others. Then nothing has been
    /// recorded.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &Backward,
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

    /// Everything that can be said of a call before its pipelines.
    fn check_backward<'a>(&self, call: &Backward<'a>) -> Result<BackwardProblem<'a>, Error> {
        let device = &self.pipelines.facts();
        let config = &self.config;
        let Backward { forward, d_out, d_lse, d_q, d_k, d_v, d_added, accumulates, partial } = *call;
        let Forward { q, keys, out, mask, lse, dropout, .. } = forward;
        let KeyInput::Tensors { k, v } = keys else {
            let why = "a cache's keys and values have no gradient: give the forward call keys and values as tensors";
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
            "nothing is asked for: give `d_q`, `d_k`, `d_v` or a gradient of the mask's",
        )?;
        if let Some(dropout) = &dropout {
            dropout.check_for(shape.weights(), &mut tensors)?;
        }
        tensors.check_aliasing()?;
        let scale = scale_in_f32(config.scale, shape.head_dim);
        let softcap = config.softcap.map(|c| c as f32);
        let kernel_options = config.kernel_options;
        Ok(BackwardProblem {
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
            d_added,
            accumulates,
            adds_to_added: accumulates,
            mask,
            dropout,
            partial,
            scale,
            softcap,
            kernel_options,
        })
    }
}
