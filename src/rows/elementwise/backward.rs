//! The gradients of activations and of gated ones.

use super::{Elementwise, ElementwiseForward};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Prepared, Recorder};
use crate::tensor::{Element, Error, TensorView};

/// The gradients of one call, each written where it is asked for. That of
/// [`ElementwiseForward::residual`] is `d_out` itself.
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
    /// `forward` as it was made, whose inputs are read again, and the gradient of its `out`, shaped
    /// as that, F32, F16 or BF16.
    pub fn new(forward: ElementwiseForward<'a>, d_out: TensorView<'a>) -> Self {
        ElementwiseBackward { forward, d_out, d_x: None, d_multiply: None, accumulate: false }
    }

    /// Writes the gradient of `x` there, shaped as that, F32, F16 or BF16.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_x = d_x.into();
        self
    }

    /// Writes the gradient of `multiply` there, shaped as that, F32, F16 or BF16.
    pub fn d_multiply(mut self, d_multiply: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_multiply = d_multiply.into();
        self
    }

    /// Adds the gradients to what is there instead of writing over it, each rounded to its type:
    /// choose F32 for many.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }

    fn dispatch(&self, device: &DeviceFacts) -> Result<Dispatch<'a>, Error> {
        let ElementwiseBackward { forward, d_out, d_x, d_multiply, accumulate } = *self;
        let mut tensors = forward.check_inputs(device)?;
        if d_multiply.is_some() && forward.multiply.is_none() {
            let why = "the forward call has no such tensor: leave its gradient out";
            return Err(Error::Unsupported { what: "d_multiply", why });
        }
        let shape = forward.x.shape();
        tensors.read("d_out", d_out, Element::Float, shape)?;
        tensors.write("d_x", d_x, Element::Float, shape)?;
        tensors.write("d_multiply", d_multiply, Element::Float, shape)?;
        tensors.require_gradients("nothing is asked for: give `d_x` or `d_multiply`")?;
        tensors.finish()?;
        Ok(forward.op().backward(d_out, d_x, d_multiply, accumulate, device))
    }
}

impl Elementwise {
    /// Records the gradients of a call into an encoder or a pass.
    ///
    /// # Errors
    /// Shapes that differ, gradients that share a buffer with an input, [`Error::Unsupported`] if none is asked for or that of a
    /// tensor which there is not, and everything else that [`Error`] lists for tensors; then nothing has been recorded.
    pub fn backward(&self, into: &mut impl Recorder, call: &ElementwiseBackward) -> Result<(), Error> {
        self.prepare_backward(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &ElementwiseBackward) -> Result<Prepared, Error> {
        let call = call.dispatch(&self.pipelines.facts())?;
        self.pipelines.bind("elementwise backward", &[call], &self.bindings)
    }
}
