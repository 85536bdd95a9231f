//! The gradients of causal convolutions.

use super::dispatch::{CausalConvGradients, CausalConvOp};
use super::{CausalConv, CausalConvForward};
use crate::device::DeviceFacts;
use crate::kernel::{Prepared, Recorder, Scratch, ScratchSize};
use crate::matmul::projection::dispatch_backward::Gradient;
use crate::tensor::{Element, Error, TensorView};

/// The gradients of one causal convolution. Only the requested gradients are computed.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct CausalConvBackward<'a> {
    forward: CausalConvForward<'a>,
    d_out: TensorView<'a>,
    d_final_state: Option<TensorView<'a>>,
    d_x: Option<TensorView<'a>>,
    d_weight: Option<TensorView<'a>>,
    d_bias: Option<TensorView<'a>>,
    d_initial_state: Option<TensorView<'a>>,
    accumulate: bool,
}

impl<'a> CausalConvBackward<'a> {
    /// The backward pass of `forward`. It reads the inputs of `forward` again. `d_out` is the
    /// gradient of its `out`, with the same shape; F32, F16 or BF16.
    pub fn new(forward: CausalConvForward<'a>, d_out: TensorView<'a>) -> Self {
        let [d_final_state, d_x, d_weight, d_bias, d_initial_state] = [None; 5];
        CausalConvBackward {
            forward,
            d_out,
            d_final_state,
            d_x,
            d_weight,
            d_bias,
            d_initial_state,
            accumulate: false,
        }
    }

    /// Sets the gradient of the final state, with the shape of
    /// [`final_state`](CausalConvForward::final_state); F32, F16 or BF16.
    pub fn d_final_state(mut self, d_final_state: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_final_state = d_final_state.into();
        self
    }

    /// Sets the output for the gradient of `x`, with its shape; F32, F16 or BF16. Rows outside all
    /// sequences get zeros.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_x = d_x.into();
        self
    }

    /// Sets the output for the gradient of the weight, with its shape; F32, F16 or BF16.
    pub fn d_weight(mut self, d_weight: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_weight = d_weight.into();
        self
    }

    /// Sets the output for the gradient of the bias, with its shape; F32, F16 or BF16.
    pub fn d_bias(mut self, d_bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_bias = d_bias.into();
        self
    }

    /// Sets the output for the gradient of the initial state, with its shape; F32, F16 or BF16.
    pub fn d_initial_state(mut self, d_initial_state: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_initial_state = d_initial_state.into();
        self
    }

    /// Adds the gradients to the outputs instead of overwriting them. Each sum is rounded to the
    /// gradient's type: choose F32 to add many gradients.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }

    fn check(&self, device: &DeviceFacts) -> Result<CausalConvOp<'a>, Error> {
        let CausalConvBackward { forward, d_out, d_final_state, .. } = *self;
        if forward.state.is_some() {
            let why = "the call overwrites its state; set `initial_state` and `final_state` instead";
            return Err(Error::Unsupported { what: "the backward pass of a call with `state`", why });
        }
        let (mut tensors, op) = forward.check_inputs(device)?;
        let shape = op.x.shape();
        tensors.read("d_out", d_out, Element::Float, shape)?;
        if d_final_state.is_some() || self.d_initial_state.is_some() {
            forward.check_has_states()?;
        }
        let state = forward.state_shape(op.sequences);
        tensors.read("d_final_state", d_final_state, Element::Float, state)?;
        tensors.write("d_x", self.d_x, Element::Float, shape)?;
        let vector = [1, 1, 1, shape[3]];
        for (name, gradient, of, shape) in [
            ("d_weight", self.d_weight, Some(op.weight), op.weight.shape()),
            ("d_bias", self.d_bias, op.bias, vector),
            ("d_initial_state", self.d_initial_state, op.initial, state),
        ] {
            if gradient.is_some() && of.is_none() {
                let why = "the forward call has no such tensor; omit this gradient";
                return Err(Error::Unsupported { what: name, why });
            }
            tensors.write(name, gradient, Element::Float, shape)?;
        }
        let why = "no gradient is requested; set `d_x`, `d_weight`, `d_bias` or `d_initial_state`";
        tensors.require_gradients(why)?;
        tensors.finish()?;
        Ok(op)
    }

    fn gradients(&self) -> CausalConvGradients<'a> {
        let gradient =
            |t: Option<TensorView<'a>>| t.map(|view| Gradient { view, accumulates: self.accumulate });
        CausalConvGradients {
            d_out: self.d_out,
            d_final: self.d_final_state,
            d_x: gradient(self.d_x),
            d_weight: gradient(self.d_weight),
            d_bias: gradient(self.d_bias),
            d_initial: gradient(self.d_initial_state),
        }
    }

    fn scratch_size(&self, op: &CausalConvOp, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let sums = self.d_weight.is_some() || self.d_bias.is_some();
        if sums { op.sums_size(device) } else { Ok(ScratchSize::default()) }
    }
}

impl CausalConv {
    /// The temporary memory that `call` needs. `d_x` and `d_initial_state` need none. `d_weight`
    /// and `d_bias` need at most 256 partial sums of `width + 1` numbers for each channel.
    ///
    /// # Errors
    /// See [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &CausalConvBackward) -> Result<ScratchSize, Error> {
        let device = &self.pipelines.facts();
        call.scratch_size(&call.check(device)?, device)
    }

    /// Records the gradients of a causal convolution into an encoder or a pass. Sums over rows are
    /// added from partial sums, in order, so the bits are the same on every run.
    ///
    /// # Errors
    /// Shapes that do not match, gradients that overlap an input, and a scratch that is too small.
    /// [`Error::Unsupported`] if no gradient is requested, or the gradient of a tensor that the
    /// call does not have. Every other [`Error`] of tensors. After an error nothing has been
    /// recorded.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &CausalConvBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`backward`](Self::backward).
    pub fn prepare_backward(
        &self,
        call: &CausalConvBackward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let op = call.check(device)?;
        scratch.check(call.scratch_size(&op, device)?)?;
        let scratch: &Scratch = scratch;
        let dispatches = op.backward(&call.gradients(), scratch, &self.kernel_options, device)?;
        self.pipelines.bind("causal convolution backward", &dispatches, scratch.bindings())
    }
}
