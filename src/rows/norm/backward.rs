//! The gradients of norms.

use super::dispatch::{NormGradients, NormInputs};
use super::{Norm, NormForward};
use crate::device::DeviceFacts;
use crate::kernel::{Prepared, Recorder, Scratch, ScratchSize};
use crate::matmul::projection::dispatch_backward::Gradient;
use crate::tensor::{Element, Error, TensorView};

/// The gradients of one norm. Only the requested gradients are computed.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct NormBackward<'a> {
    forward: NormForward<'a>,
    d_out: TensorView<'a>,
    d_sum: Option<TensorView<'a>>,
    d_x: Option<TensorView<'a>>,
    d_gate: Option<TensorView<'a>>,
    d_weight: Option<TensorView<'a>>,
    d_bias: Option<TensorView<'a>>,
    accumulate: bool,
}

impl<'a> NormBackward<'a> {
    /// The backward pass of `forward`. It reads the inputs of `forward` again.
    /// `d_out` is the gradient of its `out`, with the same shape; F32, F16 or BF16.
    pub fn new(forward: NormForward<'a>, d_out: TensorView<'a>) -> Self {
        let [d_sum, d_x, d_gate, d_weight, d_bias] = [None; 5];
        NormBackward { forward, d_out, d_sum, d_x, d_gate, d_weight, d_bias, accumulate: false }
    }

    /// Sets another gradient of `x + residual`, from the operators that read [`NormForward::sum`].
    /// The kernel adds it to `d_x`. It has the shape of `x`; F32, F16 or BF16.
    pub fn d_sum(mut self, d_sum: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_sum = d_sum.into();
        self
    }

    /// Sets the output for the gradient of `x`, with the shape of `x`; F32, F16 or BF16. The
    /// gradient of `residual` is the same.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_x = d_x.into();
        self
    }

    /// Sets the output for the gradient of the gate's tensor, with the shape of `x`; F32, F16 or
    /// BF16.
    pub fn d_gate(mut self, d_gate: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_gate = d_gate.into();
        self
    }

    /// Sets the output for the gradient of the weight, summed over all rows: `[features]`, F32, F16
    /// or BF16.
    pub fn d_weight(mut self, d_weight: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_weight = d_weight.into();
        self
    }

    /// Sets the output for the gradient of the bias, summed over all rows: `[features]`, F32, F16
    /// or BF16.
    pub fn d_bias(mut self, d_bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_bias = d_bias.into();
        self
    }

    /// Adds the gradients to the outputs instead of overwriting them. Each sum is rounded to the
    /// gradient's type: choose F32 to add many gradients.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }

    fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let NormBackward { forward, d_out, d_sum, d_x, d_gate, d_weight, d_bias, .. } = *self;
        let mut tensors = forward.check_inputs(device)?;
        let NormInputs { x, weight, bias, gate, .. } = forward.inputs;
        let (shape, vector) = (x.shape(), [1, 1, 1, x.shape()[3]]);
        tensors.read("d_out", d_out, Element::Float, shape)?;
        tensors.read("d_sum", d_sum, Element::Float, shape)?;
        if gate.is_some() && d_sum.is_some() {
            let why = "a call with a gate has no `sum`; omit this gradient";
            return Err(Error::Unsupported { what: "`d_sum`", why });
        }
        tensors.write("d_x", d_x, Element::Float, shape)?;
        for (name, gradient, of, shape) in [
            ("d_gate", d_gate, gate.map(|gate| gate.gate), shape),
            ("d_weight", d_weight, weight, vector),
            ("d_bias", d_bias, bias, vector),
        ] {
            if gradient.is_some() && of.is_none() {
                let why = "the forward call has no such tensor; omit this gradient";
                return Err(Error::Unsupported { what: name, why });
            }
            tensors.write(name, gradient, Element::Float, shape)?;
        }
        tensors.require_gradients("no gradient is requested; set `d_x`, `d_gate`, `d_weight` or `d_bias`")?;
        tensors.finish()
    }

    fn gradients(&self) -> NormGradients<'a> {
        let gradient =
            |t: Option<TensorView<'a>>| t.map(|view| Gradient { view, accumulates: self.accumulate });
        NormGradients {
            d_out: self.d_out,
            d_sum: self.d_sum,
            d_x: gradient(self.d_x),
            d_gate: gradient(self.d_gate),
            d_weight: gradient(self.d_weight),
            d_bias: gradient(self.d_bias),
        }
    }

    fn scratch_size(&self, norm: &Norm) -> ScratchSize {
        let sums = self.d_weight.is_some() || self.d_bias.is_some();
        if sums { self.forward.op(norm.config).sums_size() } else { ScratchSize::default() }
    }
}

impl Norm {
    /// The temporary memory that `call` needs. `d_x` and `d_gate` need none. `d_weight` and
    /// `d_bias` need 12 bytes for each row. They also need at most 32 KiB plus 8 bytes for each
    /// feature.
    ///
    /// # Errors
    /// See [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &NormBackward) -> Result<ScratchSize, Error> {
        call.check(&self.pipelines.facts())?;
        Ok(call.scratch_size(self))
    }

    /// Records the gradients of a norm into an encoder or a pass. Sums over rows are added from
    /// partial sums, in order, so the bits are the same on every run.
    ///
    /// # Errors
    /// Shapes that do not match, gradients that overlap an input, and a scratch that is
    /// too small. [`Error::Unsupported`] if no gradient is requested, or the gradient of a tensor
    /// that the call does not have. Every other [`Error`] of tensors. After an error nothing has
    /// been recorded.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &NormBackward,
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
    pub fn prepare_backward(&self, call: &NormBackward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        call.check(device)?;
        scratch.check(call.scratch_size(self))?;
        let scratch: &Scratch = scratch;
        let op = call.forward.op(self.config);
        let dispatches = op.backward(&call.gradients(), scratch, &self.kernel_options, device)?;
        self.pipelines.bind("norm backward", &dispatches, scratch.bindings())
    }
}
