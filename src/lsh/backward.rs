//! The backward pass of attention within buckets.

use super::dispatch::{LshRounds, LshSizes};
use super::{LshAttention, LshForward, Sorted};
use crate::attention::dispatch::backward::{self, BackwardPlans};
use crate::attention::dispatch::{AddedGradients, BackwardProblem};
use crate::attention::{required_lse, scale_in_f32};
use crate::device::DeviceFacts;
use crate::kernel::{Prepared, Recorder, Scratch, ScratchSize, Slot, fits, in_scratch};
use crate::matmul::projection::dispatch_backward::Gradient;
use crate::tensor::{CallTensors, DType, Element, Error, TensorView, count};

/// One backward call. It reads the inputs and outputs of an [`LshForward`], buckets included, and
/// the gradient of its output. It writes `d_qk` and `d_v`, which have the shapes of qk and v. They
/// are F32, F16 or BF16.
///
/// The call sorts the tokens and computes the scores again. The score of a token with itself is a
/// constant and has no gradient.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LshBackward<'a> {
    forward: LshForward<'a>,
    d_out: TensorView<'a>,
    d_lse: Option<TensorView<'a>>,
    d_qk: Option<TensorView<'a>>,
    d_v: Option<TensorView<'a>>,
    accumulates: bool,
}

impl<'a> LshBackward<'a> {
    /// Takes `forward`, unchanged and with its [`lse`](LshForward::lse), and the gradient of its
    /// `out`. The call writes only the gradients that you request.
    pub fn new(forward: LshForward<'a>, d_out: TensorView<'a>) -> Self {
        LshBackward { forward, d_out, d_lse: None, d_qk: None, d_v: None, accumulates: false }
    }

    /// The gradient of `lse`, if the loss depends on `lse` too.
    pub fn d_lse(mut self, d_lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_lse = d_lse.into();
        self
    }

    /// Writes the gradient of qk to `d_qk`, as queries and as keys.
    pub fn d_qk(mut self, d_qk: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_qk = d_qk.into();
        self
    }

    /// Writes the gradient of the values to `d_v`.
    pub fn d_v(mut self, d_v: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_v = d_v.into();
        self
    }

    /// Adds the gradients to the contents of their tensors, and rounds each sum once to its type.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }
}

/// The intermediate tensors in scratch, in bucket order.
#[derive(Clone, Copy)]
struct Between<'a> {
    sorted: Sorted<'a>,
    out: TensorView<'a>,
    lse: TensorView<'a>,
    d_lse: Option<TensorView<'a>>,
    d_out: TensorView<'a>,
    d_q: TensorView<'a>,
    d_k: TensorView<'a>,
    d_v: TensorView<'a>,
}

/// A checked backward call.
struct Plan {
    sizes: LshSizes,
    plans: BackwardPlans,
    size: ScratchSize,
}

/// The backward pass. It uses no atomics: the same inputs on the same device with the same plan
/// give the same bits.
impl LshAttention {
    /// Returns the temporary memory that `call` needs: the memory of the forward call and the
    /// gradients. Each token, head and round needs the gradients of query, key and value in F32. It
    /// also needs the gradient of the output, and 20 bytes.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &LshBackward) -> Result<ScratchSize, Error> {
        Ok(self.check_backward(call, &self.pipelines.facts())?.size)
    }

    /// Records the gradients of a forward call into an encoder or a pass.
    ///
    /// # Errors
    /// Any error that [`Error`] lists for tensors and scratch. [`Error::Unsupported`] if the call
    /// requests no gradient, or if the forward call has no `lse`. The encoder is then unchanged.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &LshBackward,
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
    pub fn prepare_backward(&self, call: &LshBackward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let scratch: &Scratch = scratch;
        let Plan { sizes, plans, size } = self.check_backward(call, device)?;
        scratch.check(size)?;
        // No dispatch uses a missing part, so any buffer can stand in.
        let LshForward { qk, buckets, out, lse, lengths, .. } = call.forward;
        let part = |slot| Ok(scratch.buffer(slot).unwrap_or(qk.buffer));
        let rounds = LshRounds::new(sizes, buckets, lengths, &part)?;
        let between = self.between(call, &sizes, &part)?;
        let mut dispatches = rounds.dispatches(part, device)?;
        dispatches.extend(between.sorted.gather(&call.forward, &rounds, device));
        dispatches.extend([
            rounds.gather(out, between.out, false, device),
            rounds.gather(required_lse(lse)?, between.lse, false, device),
            rounds.gather(call.d_out, between.d_out, false, device),
        ]);
        let of_lse = call.d_lse.zip(between.d_lse);
        dispatches.extend(of_lse.map(|(d_lse, sorted)| rounds.gather(d_lse, sorted, false, device)));
        let problem = self.backward_problem(call, &rounds, &between);
        dispatches.extend(backward::dispatches(&problem, &plans, plans.memory(scratch)?, device));
        let gradient = |view| Gradient { view, accumulates: call.accumulates };
        if let Some(d_qk) = call.d_qk {
            let queries = Some((qk, between.d_q));
            dispatches.push(rounds.gradients(between.d_k, queries, gradient(d_qk), device));
        }
        if let Some(d_v) = call.d_v {
            dispatches.push(rounds.gradients(between.d_v, None, gradient(d_v), device));
        }
        self.pipelines.bind("lsh attention backward", &dispatches, scratch.bindings())
    }

    fn between<'a>(
        &self,
        call: &LshBackward<'a>,
        sizes: &LshSizes,
        part: &impl Fn(Slot) -> Result<&'a wgpu::Buffer, Error>,
    ) -> Result<Between<'a>, Error> {
        let [out, lse] = self.parts(sizes, part)?;
        let d_lse = in_scratch(lse.buffer, DType::F32, lse.shape(), aligned(sizes));
        let f32 = |slot, ahead, dim| Ok(in_scratch(part(slot)?, DType::F32, sizes.sorted(ahead, dim), 0));
        Ok(Between {
            sorted: self.sorted(sizes, part)?,
            out,
            lse,
            d_lse: call.d_lse.map(|_| d_lse),
            d_out: in_scratch(part(Slot::ContextGradient)?, out.dtype, out.shape(), 0),
            d_q: f32(Slot::ProjectedGradients, 0, sizes.head_dim)?,
            d_k: f32(Slot::SortedKeyGradients, sizes.ahead(), sizes.head_dim)?,
            d_v: f32(Slot::SortedValueGradients, sizes.ahead(), sizes.value_dim)?,
        })
    }

    fn between_size(
        &self,
        call: &LshBackward,
        sizes: &LshSizes,
        device: &DeviceFacts,
    ) -> Result<ScratchSize, Error> {
        let of = |elements: usize| fits(elements as u64, 4, device);
        let f32 = |ahead, dim| of(count(sizes.sorted(ahead, dim)));
        let mut size = self.sorted_size(sizes, device)?.max(self.parts_size(sizes, device)?);
        let out = count(sizes.sorted(0, sizes.value_dim)) as u64;
        size = size.with(Slot::ContextGradient, fits(out, self.config.dtype.bytes() as u64, device)?);
        if call.d_lse.is_some() {
            size = size.with(Slot::Lse, of(aligned(sizes).saturating_add(count(sizes.sorted(0, 1))))?);
        }
        if call.d_qk.is_some() {
            size = size.with(Slot::ProjectedGradients, f32(0, sizes.head_dim)?);
            size = size.with(Slot::SortedKeyGradients, f32(sizes.ahead(), sizes.head_dim)?);
        }
        if call.d_v.is_some() {
            size = size.with(Slot::SortedValueGradients, f32(sizes.ahead(), sizes.value_dim)?);
        }
        Ok(size)
    }

    fn backward_problem<'a>(
        &self,
        call: &LshBackward<'a>,
        rounds: &LshRounds<'a>,
        between: &Between<'a>,
    ) -> BackwardProblem<'a> {
        let Between { sorted, out, lse, d_lse, d_out, d_q, d_k, d_v } = *between;
        let shape = self.shape(&rounds.sizes);
        BackwardProblem {
            shape,
            appended: 0,
            q: sorted.q,
            k: sorted.k,
            v: sorted.v,
            out,
            lse,
            d_out,
            d_lse,
            d_q: call.d_qk.map(|_| d_q),
            d_k: call.d_qk.map(|_| d_k),
            d_v: call.d_v.map(|_| d_v),
            d_added: AddedGradients::default(),
            accumulates: false,
            adds_to_added: false,
            mask: self.mask(rounds),
            dropout: None,
            // The weights of a round are shares of the sum over all rounds.
            partial: true,
            lists: None,
            scale: scale_in_f32(self.config.scale, shape.head_dim),
            softcap: None,
            kernel_options: self.config.kernel_options,
        }
    }

    fn check_backward(&self, call: &LshBackward, device: &DeviceFacts) -> Result<Plan, Error> {
        let LshBackward { forward, d_out, d_lse, d_qk, d_v, .. } = *call;
        let LshForward { qk, v, buckets, lengths, out, lse, .. } = forward;
        let mut tensors = CallTensors::new(device);
        let sizes = self.check_inputs(&forward, &mut tensors)?;
        let LshSizes { batch, heads, length, .. } = sizes;
        tensors.read("buckets", buckets, DType::U32, sizes.hashes())?;
        tensors.read("out", out, self.config.dtype, v.shape())?;
        tensors.read("d_out", d_out, self.config.dtype, v.shape())?;
        tensors.read("lse", required_lse(lse)?, DType::F32, [batch, heads, length, 1])?;
        tensors.read("d_lse", d_lse, DType::F32, [batch, heads, length, 1])?;
        tensors.write("d_qk", d_qk, Element::Float, qk.shape())?;
        tensors.write("d_v", d_v, Element::Float, v.shape())?;
        tensors.require_gradients("no gradient is requested; set `d_qk` or `d_v`")?;
        tensors.check_aliasing()?;
        // There is no scratch yet. Plans read only layouts, so any buffer can stand in.
        let part = |_| Ok(qk.buffer);
        let rounds = LshRounds::new(sizes, buckets, lengths, &part)?;
        let size = rounds.scratch_size(device)?.max(self.between_size(call, &sizes, device)?);
        let problem = self.backward_problem(call, &rounds, &self.between(call, &sizes, &part)?);
        let plans = backward::plan(&problem, device)?;
        let size = size.max(plans.scratch_size());
        Ok(Plan { sizes, plans, size })
    }
}

/// Returns the elements from the log-sum-exp of all rounds to its gradient.
fn aligned(sizes: &LshSizes) -> usize {
    count(sizes.sorted(0, 1)).next_multiple_of(64)
}
