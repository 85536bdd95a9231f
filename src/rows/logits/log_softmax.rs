//! Log-softmax of rows, and its gradient.

use std::sync::Arc;

use super::dispatch;
use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, Dispatch, KernelOptions, Pipelines, Prepared, Recorder};
use crate::matmul::projection::check_summed_rows;
use crate::tensor::{Access, CallTensors, Element, Error, TensorView};

/// One call. It processes every row of `[batch, heads, length, columns]` separately.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LogSoftmaxForward<'a> {
    x: TensorView<'a>,
    out: TensorView<'a>,
}

impl<'a> LogSoftmaxForward<'a> {
    /// Writes the log-softmax of the rows of `x` to `out`. Both have the same shape, and are F32,
    /// F16 or BF16. For training, F16 and BF16 outputs have few digits for the gradient.
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
    /// The backward pass of `forward`. It reads the `out` of `forward`, but not its `x`. `d_out` is
    /// the gradient of `out`, and `d_x` is the output for the gradient of `x`. All have the same
    /// shape, and are F32, F16 or BF16.
    pub fn new(forward: LogSoftmaxForward<'a>, d_out: TensorView<'a>, d_x: TensorView<'a>) -> Self {
        LogSoftmaxBackward { forward, d_out, d_x, accumulate: false }
    }

    /// Adds the gradient to `d_x` instead of overwriting it. The sum is rounded to the type of
    /// `d_x`.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }
}

/// `x − ln Σ exp(x)` of rows of any length, and its gradient. The row's maximum is subtracted
/// first.
///
/// If an element of `x` is −∞, its output is −∞, and its gradient does not depend on the other
/// elements. As in PyTorch, a row is NaN if it contains NaN or ∞, or if all its elements are −∞.
///
/// The operator stores the bindings of recent calls, so that a repeated call creates nothing. The
/// bindings keep some buffers alive: see [`forget`](Self::forget).
#[doc(alias = "log_softmax")]
#[derive(Clone, Debug)]
pub struct LogSoftmax {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
    kernel_options: KernelOptions,
}

impl LogSoftmax {
    /// Creates the operator with separate pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates the operator with pipelines that other operators of the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        LogSoftmax {
            pipelines: pipelines.clone(),
            bindings: Arc::default(),
            kernel_options: KernelOptions::new(),
        }
    }

    /// The pipelines of the operator, to share with other operators.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of past calls, and with them the references to their buffers. Clones
    /// share the bindings.
    ///
    /// Without this call, unused bindings are dropped after a few calls, at most 64. Until then,
    /// the buffers that only these bindings keep alive are limited. They have at most twice the
    /// bytes of the last call's buffers, or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// Sets the class of kernels. The other [`KernelOptions`] do not apply to this operator.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Shapes that do not match, an `out` that overlaps `x`, and every other [`Error`]
    /// of tensors. After an error nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &LogSoftmaxForward) -> Result<(), Error> {
        self.prepare(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare(&self, call: &LogSoftmaxForward) -> Result<Prepared, Error> {
        let call = self.forward_dispatch(call)?;
        self.pipelines.bind("log softmax", &[call], &self.bindings)
    }

    /// Records the gradient of a call into an encoder or a pass.
    ///
    /// # Errors
    /// See [`forward`](Self::forward), with `d_x` as the output.
    pub fn backward(&self, into: &mut impl Recorder, call: &LogSoftmaxBackward) -> Result<(), Error> {
        self.prepare_backward(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`backward`](Self::backward).
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

/// Checks the tensors of a call. All have the same shape.
fn check_rows(all: &[(&'static str, TensorView, Access)], device: &DeviceFacts) -> Result<(), Error> {
    let mut tensors = CallTensors::new(device);
    for (name, view, access) in all {
        tensors.add(*access, name, *view, Element::Float, all[0].1.shape())?;
        check_summed_rows(name, view, view.shape()[1])?;
    }
    tensors.finish()
}
