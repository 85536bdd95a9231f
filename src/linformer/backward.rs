//! The backward pass of attention over projected keys and values.

use super::dispatch::{LowRank, keep_rows};
use super::{Linformer, LinformerForward, Projected, aligned, product_tuning};
use crate::attention::dispatch::BackwardProblem;
use crate::attention::dispatch::backward::{self, BackwardPlans};
use crate::attention::required_lse;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Prepared, Recorder, Scratch, ScratchSize, Slot, in_scratch};
use crate::matmul::projection::dispatch_backward::Gradient;
use crate::tensor::{Access, CallTensors, DType, Element, Error, Shape, TensorView, count};

/// One backward call. It reads the inputs and outputs of a [`LinformerForward`], and the gradient
/// of its output. It writes the gradients of the inputs. Each gradient has the shape of its tensor.
/// `d_q` has the configured type or F32. The other gradients are F32, F16 or BF16.
///
/// The call projects keys and values again. The forward pass must store `out` and `lse`.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LinformerBackward<'a> {
    forward: LinformerForward<'a>,
    d_out: TensorView<'a>,
    d_lse: Option<TensorView<'a>>,
    d_q: Option<TensorView<'a>>,
    /// The gradients of k, v, e, f.
    gradients: [Option<TensorView<'a>>; 4],
    accumulates: bool,
}

impl<'a> LinformerBackward<'a> {
    /// Takes `forward`, unchanged and with its [`lse`](LinformerForward::lse), and the gradient of
    /// its `out`. The call writes only the gradients that you request.
    pub fn new(forward: LinformerForward<'a>, d_out: TensorView<'a>) -> Self {
        LinformerBackward { forward, d_out, d_lse: None, d_q: None, gradients: [None; 4], accumulates: false }
    }

    /// The gradient of `lse`, if the loss depends on `lse` too.
    pub fn d_lse(mut self, d_lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_lse = d_lse.into();
        self
    }

    /// Writes the gradient of the queries to `d_q`.
    pub fn d_q(mut self, d_q: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_q = d_q.into();
        self
    }

    /// Writes the gradient of the keys to `d_k`; masked keys have the gradient 0.
    pub fn d_k(mut self, d_k: impl Into<Option<TensorView<'a>>>) -> Self {
        self.gradients[0] = d_k.into();
        self
    }

    /// Writes the gradient of the values to `d_v`; masked values have the gradient 0.
    pub fn d_v(mut self, d_v: impl Into<Option<TensorView<'a>>>) -> Self {
        self.gradients[1] = d_v.into();
        self
    }

    /// Writes the gradient of `e` to `d_e`, summed over the batch and over the heads that share it.
    /// If `e` projects values too, both gradients are added, the second to the stored first: choose
    /// F32.
    pub fn d_e(mut self, d_e: impl Into<Option<TensorView<'a>>>) -> Self {
        self.gradients[2] = d_e.into();
        self
    }

    /// Writes the gradient of `f` to `d_f`, summed as the gradient of `e`.
    pub fn d_f(mut self, d_f: impl Into<Option<TensorView<'a>>>) -> Self {
        self.gradients[3] = d_f.into();
        self
    }

    /// Adds the gradients to the contents of their tensors, and rounds each sum to its type. Choose
    /// F32 if you add many.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }

    /// Returns true for keys, and for values, if the gradient of their projection is needed.
    fn through(&self) -> [bool; 2] {
        let [d_k, d_v, d_e, d_f] = self.gradients.map(|view| view.is_some());
        [d_k || d_e, d_v || d_f || d_e && self.forward.f.is_none()]
    }
}

/// A checked backward call.
struct Plan {
    shape: Shape,
    /// The plan of each of `backward_problems`.
    plans: Vec<BackwardPlans>,
    size: ScratchSize,
}

/// The gradients of projected keys and values, and the gradient of masked keys or values, in F32.
#[derive(Clone, Copy)]
struct Between<'a> {
    low: [TensorView<'a>; 2],
    kept: Option<TensorView<'a>>,
}

/// The backward pass. It uses no atomics: the same inputs on the same device with the same plan
/// give the same bits.
impl Linformer {
    /// Returns the temporary memory that `call` needs. It has projected keys and values, and their
    /// gradients in F32. With a key mask it also has copies of keys and values, and a gradient of
    /// them in F32. Each query needs 16 bytes.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &LinformerBackward) -> Result<ScratchSize, Error> {
        Ok(self.check_backward(call, &self.pipelines.facts())?.size)
    }

    /// Records the gradients of a forward call into an encoder or a pass.
    ///
    /// # Errors
    /// Any error that [`Error`] lists for tensors, options and scratch. [`Error::Unsupported`] if
    /// the call requests no gradient, or the gradient of an absent `f`. [`Error::Unsupported`] too
    /// if the forward call has no `lse`. The encoder is then unchanged.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &LinformerBackward,
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
        call: &LinformerBackward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let scratch: &Scratch = scratch;
        let Plan { shape, plans, size } = self.check_backward(call, device)?;
        scratch.check(size)?;
        // No dispatch uses a missing part, so any buffer can stand in.
        let part = |slot| Ok(scratch.buffer(slot).unwrap_or(call.forward.q.buffer));
        let projected = self.projected(&call.forward, &shape, part)?;
        let between = self.between(call, &shape, part)?;
        let mut dispatches = projected.dispatches(&call.forward, &self.config, device)?;
        let problems = self.backward_problems(call, shape, &projected, &between)?;
        for (problem, plans) in problems.iter().zip(&plans) {
            dispatches.extend(backward::dispatches(problem, plans, plans.memory(scratch)?, device));
        }
        dispatches.extend(self.products(call, &projected, &between, device)?);
        self.pipelines.bind("linformer backward", &dispatches, scratch.bindings())
    }

    fn between<'a>(
        &self,
        call: &LinformerBackward<'a>,
        shape: &Shape,
        part: impl Fn(Slot) -> Result<&'a wgpu::Buffer, Error>,
    ) -> Result<Between<'a>, Error> {
        let low = self.low(*shape);
        let buffer = part(Slot::ProjectedGradients)?;
        let low_v = in_scratch(buffer, DType::F32, low.v(), aligned(count(low.k())));
        let kept = match call.forward.key_mask {
            // As large as the larger of keys and values.
            Some(_) => {
                let widest = if shape.head_dim > shape.value_dim { shape.k() } else { shape.v() };
                Some(in_scratch(part(Slot::ContextGradient)?, DType::F32, widest, 0))
            }
            None => None,
        };
        Ok(Between { low: [in_scratch(buffer, DType::F32, low.k(), 0), low_v], kept })
    }

    /// Returns the attention problems whose gradients the call needs. The gradients of projected
    /// keys and values are overwritten. If the call accumulates, the gradient of queries is thus a
    /// separate problem.
    fn backward_problems<'a>(
        &self,
        call: &LinformerBackward<'a>,
        shape: Shape,
        projected: &Projected<'a>,
        between: &Between<'a>,
    ) -> Result<Vec<BackwardProblem<'a>>, Error> {
        let LinformerBackward { forward, d_out, d_lse, d_q, .. } = *call;
        let LinformerForward { q, out, lse, dropout, .. } = forward;
        let [k, v] = projected.low.map(|low| low.low);
        let [keys, values] = call.through();
        let results = [out, required_lse(lse)?, d_out];
        let all = BackwardProblem {
            d_lse,
            d_q,
            d_k: keys.then_some(between.low[0]),
            d_v: values.then_some(between.low[1]),
            dropout,
            ..self.config.backward_problem(self.low(shape), [q, k, v], results)
        };
        let of_keys = BackwardProblem { d_q: None, ..all };
        let of_queries = BackwardProblem { d_k: None, d_v: None, accumulates: call.accumulates, ..all };
        Ok(match (d_q.is_some(), keys || values) {
            (true, true) if !call.accumulates => vec![all],
            (true, true) => vec![of_queries, of_keys],
            (true, false) => vec![of_queries],
            _ => vec![of_keys],
        })
    }

    /// Records the gradients of the inputs, from the gradients of projected keys and values.
    fn products<'a>(
        &self,
        call: &LinformerBackward<'a>,
        projected: &Projected<'a>,
        between: &Between<'a>,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let kernel_options = &product_tuning(&self.config);
        let mut dispatches = Dispatches::new();
        for side in 0..2 {
            let low = LowRank { low: between.low[side], ..projected.low[side] };
            if let Some(view) = call.gradients[side] {
                let wanted = Gradient { view, accumulates: call.accumulates };
                match (between.kept, call.forward.key_mask) {
                    (Some(kept), Some(key_mask)) => {
                        let all = in_scratch(kept.buffer, DType::F32, view.shape(), 0);
                        dispatches.extend(low.d_x(
                            Gradient { view: all, accumulates: false },
                            kernel_options,
                            device,
                        )?);
                        dispatches.push(keep_rows(all, key_mask, wanted, device));
                    }
                    _ => dispatches.extend(low.d_x(wanted, kernel_options, device)?),
                }
            }
            let shares = side == 1 && call.forward.f.is_none();
            if let Some(view) = call.gradients[if shares { 2 } else { 2 + side }] {
                let wanted = Gradient { view, accumulates: call.accumulates || shares };
                dispatches.push(low.d_projection(wanted, kernel_options, device)?);
            }
        }
        Ok(dispatches)
    }

    fn check_backward(&self, call: &LinformerBackward, device: &DeviceFacts) -> Result<Plan, Error> {
        let LinformerBackward { forward, d_out, d_lse, d_q, .. } = *call;
        let LinformerForward { q, e, f, lse, dropout, .. } = forward;
        let dtype = self.config.dtype;
        let mut tensors = CallTensors::new(device);
        let shape = self.check_tensors(&forward, Access::Read, &mut tensors)?;
        tensors.read("d_out", d_out, dtype, shape.out())?;
        tensors.read("lse", required_lse(lse)?, DType::F32, shape.lse())?;
        tensors.read("d_lse", d_lse, DType::F32, shape.lse())?;
        let [d_k, d_v, d_e, d_f] = call.gradients;
        if d_f.is_some() && f.is_none() {
            let why = "there is no `f`; `e` also projects values, and `d_e` contains both gradients";
            return Err(Error::Unsupported { what: "d_f", why });
        }
        tensors.write("d_q", d_q, Element::Float, shape.q())?;
        tensors.write("d_k", d_k, Element::Float, shape.k())?;
        tensors.write("d_v", d_v, Element::Float, shape.v())?;
        tensors.write("d_e", d_e, Element::Float, e.shape())?;
        tensors.write("d_f", d_f, Element::Float, f.unwrap_or(e).shape())?;
        tensors.require_gradients("no gradient is requested; set `d_q`, `d_k`, `d_v`, `d_e` or `d_f`")?;
        if let Some(d_q) = d_q.filter(|d_q| ![DType::F32, dtype].contains(&d_q.dtype)) {
            let expected = if dtype == DType::F32 { "F32".into() } else { format!("F32 or {dtype:?}") };
            return Err(Error::Type { tensor: "d_q", expected, got: d_q.dtype });
        }
        if let Some(dropout) = &dropout {
            dropout.check_for(self.low(shape).weights(), &mut tensors)?;
        }
        tensors.check_aliasing()?;

        let low = self.low(shape);
        let mut size = self.projected_size(&forward, &shape)?;
        size = size.with(Slot::ProjectedGradients, self.bytes([low.k(), low.v()], DType::F32)?);
        if forward.key_mask.is_some() {
            let widest = if shape.head_dim > shape.value_dim { shape.k() } else { shape.v() };
            size = size.with(Slot::ContextGradient, self.bytes([widest, [0; 4]], DType::F32)?);
        }
        // There is no scratch yet. Plans read only layouts, so any buffer can stand in.
        let any = |_| Ok(q.buffer);
        let projected = self.projected(&forward, &shape, any)?;
        let between = self.between(call, &shape, any)?;
        let problems = self.backward_problems(call, shape, &projected, &between)?;
        let plans: Vec<_> =
            problems.iter().map(|problem| backward::plan(problem, device)).collect::<Result<_, _>>()?;
        self.products(call, &projected, &between, device)?;
        let size = plans.iter().fold(size, |size, plans| size.max(plans.scratch_size()));
        Ok(Plan { shape, plans, size })
    }
}
