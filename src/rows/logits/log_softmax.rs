//! Logarithms of the softmax of rows, and their gradients.

use std::sync::Arc;

use super::dispatch;
use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, Dispatch, KernelOptions, Pipelines, Prepared, Recorder};
use crate::matmul::projection::check_summed_rows;
use crate::tensor::{Access, CallTensors, Element, Error, TensorView};

/// One call: every row of `[batch, heads, length, columns]` for itself.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LogSoftmaxForward<'a> {
    x: TensorView<'a>,
    out: TensorView<'a>,
}

impl<'a> LogSoftmaxForward<'a> {
    /// The logarithms of the softmax of the rows of `x`, into `out`, shaped as it; F32, F16 or BF16
    /// each. F16 and BF16 have few digits for a gradient to be taken from.
    pub fn new(x: TensorView<'a>, out: TensorView<'a>) -> Self {
        LogSoftmaxForward { x, out }
    }
}

/// The gradient of one call.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LogSoftmaxBackward<'a> {
    forward: LogSoftmaxForward<'a>,
    d_out: TensorView<'a>,
    d_x: TensorView<'a>,
    accumulate: bool,
}

impl<'a> LogSoftmaxBackward<'a> {
    /// `forward` as it was made, whose `out` is read and whose `x` is not, the gradient of `out`,
    /// and where the gradient of `x` goes; all of one shape, F32, F16 or BF16 each.
    pub fn new(forward: LogSoftmaxForward<'a>, d_out: TensorView<'a>, d_x: TensorView<'a>) -> Self {
        LogSoftmaxBackward { forward, d_out, d_x, accumulate: false }
    }

    /// Adds the gradient to what is there instead of writing over it, rounded to its type.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }
}

/// `x − ln Σ exp(x)` of rows of any length, from the row's maximum on, and its gradient.
///
/// Where `x` is −∞ so is what comes out, and its gradient has no part of the others'. A row with a
/// NaN or ∞ in it, or of −∞ alone, is
/// NaN: as PyTorch has it.
///
/// It keeps the bindings of recent calls, so that the same call again creates nothing. They keep
/// some buffers alive: see
/// [`forget`](Self::forget).
#[derive(Clone, Debug)]
pub struct LogSoftmax {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
    kernel_options: KernelOptions,
}

impl LogSoftmax {
    /// The operator with pipelines of its own.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// The operator with pipelines that it shares with others on the device.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        LogSoftmax {
            pipelines: pipelines.clone(),
            bindings: Arc::default(),
            kernel_options: KernelOptions::new(),
        }
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of its calls, and with them the references to their buffers. Clones share
    /// them.
    ///
    /// Without this, bindings that are not used any more go after a few calls, at most 64. Until
    /// then, the buffers that only they keep alive have at most twice the bytes of the last call's,
    /// or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// The form of kernels; the rest of [`KernelOptions`] does not concern it.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Shapes that differ, an `out` that shares a buffer with `x`, and everything else that [`Error`] lists for tensors; then nothing
    /// has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &LogSoftmaxForward) -> Result<(), Error> {
        self.prepare(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &LogSoftmaxForward) -> Result<Prepared, Error> {
        let call = self.forward_dispatch(call)?;
        self.pipelines.bind("log softmax", &[call], &self.bindings)
    }

    /// Records the gradient of a call into an encoder or a pass.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), of `d_x`.
    pub fn backward(&self, into: &mut impl Recorder, call: &LogSoftmaxBackward) -> Result<(), Error> {
        self.prepare_backward(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &LogSoftmaxBackward) -> Result<Prepared, Error> {
        let call = self.backward_dispatch(call)?;
        self.pipelines.bind("log softmax backward", &[call], &self.bindings)
    }

    fn forward_dispatch<'a>(&self, call: &LogSoftmaxForward<'a>) -> Result<Dispatch<'a>, Error> {
        let device = &self.pipelines.facts();
        let LogSoftmaxForward { x, out } = *call;
        check_rows(&[("x", x, Access::Read), ("out", out, Access::Write)], device)?;
        Ok(dispatch::log_softmax(x, out, &self.kernel_options, device))
    }

    fn backward_dispatch<'a>(&self, call: &LogSoftmaxBackward<'a>) -> Result<Dispatch<'a>, Error> {
        let device = &self.pipelines.facts();
        let LogSoftmaxBackward { forward: LogSoftmaxForward { out, .. }, d_out, d_x, accumulate } = *call;
        let tensors =
            [("out", out, Access::Read), ("d_out", d_out, Access::Read), ("d_x", d_x, Access::Write)];
        check_rows(&tensors, device)?;
        Ok(dispatch::log_softmax_backward([out, d_out, d_x], accumulate, &self.kernel_options, device))
    }
}

/// Checks the tensors of a call, which have one shape.
fn check_rows(all: &[(&'static str, TensorView, Access)], device: &DeviceFacts) -> Result<(), Error> {
    let mut tensors = CallTensors::new(device);
    for (name, view, access) in all {
        tensors.add(*access, name, *view, Element::Float, all[0].1.shape())?;
        check_summed_rows(name, view, view.shape()[1])?;
    }
    tensors.finish()
}
