//! The gradients of activations and gated activations.

use super::{Elementwise, ElementwiseForward};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Prepared, Recorder};
use crate::tensor::{Element, Error, TensorView};

/// The gradients of one call. Only the requested gradients are computed. The gradient of
/// [`ElementwiseForward::residual`] is `d_out`.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct ElementwiseBackward<'a> {
    forward: ElementwiseForward<'a>,
    d_out: TensorView<'a>,
    d_x: Option<TensorView<'a>>,
    d_multiply: Option<TensorView<'a>>,
    accumulate: bool,
}

impl<'a> ElementwiseBackward<'a> {
    /// The backward pass of `forward`. It reads the inputs of `forward` again. `d_out` is the
    /// gradient of its `out`, with the same shape; F32, F16 or BF16.
    pub fn new(forward: ElementwiseForward<'a>, d_out: TensorView<'a>) -> Self {
        ElementwiseBackward { forward, d_out, d_x: None, d_multiply: None, accumulate: false }
    }

    /// Sets the output for the gradient of `x`, with the shape of `x`; F32, F16 or BF16.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_x = d_x.into();
        self
    }

    /// Sets the output for the gradient of `multiply`, with the shape of `multiply`; F32, F16 or
    /// BF16.
    pub fn d_multiply(mut self, d_multiply: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_multiply = d_multiply.into();
        self
    }

    /// Adds the gradients to the outputs instead of overwriting them. Each sum is rounded to the
    /// gradient's type: choose F32 to add many gradients.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }

    fn dispatch(&self, device: &DeviceFacts) -> Result<Dispatch<'a>, Error> {
        let ElementwiseBackward { forward, d_out, d_x, d_multiply, accumulate } = *self;
        let mut tensors = forward.check_inputs(device)?;
        if d_multiply.is_some() && forward.multiply.is_none() {
            let why = "the forward call has no such tensor; omit this gradient";
            return Err(Error::Unsupported { what: "d_multiply", why });
        }
        let shape = forward.x.shape();
        tensors.read("d_out", d_out, Element::Float, shape)?;
        tensors.write("d_x", d_x, Element::Float, shape)?;
        tensors.write("d_multiply", d_multiply, Element::Float, shape)?;
        tensors.require_gradients("no gradient is requested; set `d_x` or `d_multiply`")?;
        tensors.finish()?;
        Ok(forward.op().backward(d_out, d_x, d_multiply, accumulate, device))
    }
}

impl Elementwise {
    /// Records the gradients of a call into an encoder or a pass.
    ///
    /// # Errors
    /// Shapes that do not match, and gradients that overlap an input.
    /// [`Error::Unsupported`] if no gradient is requested, or the gradient of a tensor that the
    /// call does not have. Every other [`Error`] of tensors. After an error nothing has been
    /// recorded.
    pub fn backward(&self, into: &mut impl Recorder, call: &ElementwiseBackward) -> Result<(), Error> {
        self.prepare_backward(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &ElementwiseBackward) -> Result<Prepared, Error> {
        let call = call.dispatch(&self.pipelines.facts())?;
        self.pipelines.bind("elementwise backward", &[call], &self.bindings)
    }
}
