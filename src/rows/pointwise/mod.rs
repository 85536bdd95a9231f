//! The operator: activations, gated ones, residual sums.

mod backward;
pub(crate) mod dispatch;
pub(crate) mod kernels;
pub(crate) mod reference;

pub use backward::PointwiseBackward;
use dispatch::PointwiseOp;

use std::sync::Arc;

use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, BoundDispatch, Dispatch, Pipelines, pass, record};
use crate::matmul::Activation;
use crate::tensor::{Access, Error, TensorView, check_aliasing, check_float, expect_shape};

/// One call: `f(x)`, `f(x) · times` or `f(x) + plus`, element by element, of tensors of one shape.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct PointwiseForward<'a> {
    pub(crate) x: TensorView<'a>,
    pub(crate) out: TensorView<'a>,
    pub(crate) activation: Option<Activation>,
    pub(crate) times: Option<TensorView<'a>>,
    pub(crate) plus: Option<TensorView<'a>>,
}

impl<'a> PointwiseForward<'a> {
    /// Copies `x` to `out`, both `[batch, heads, length, dim]`, each F32, F16 or BF16, unless more is said.
    pub fn new(x: TensorView<'a>, out: TensorView<'a>) -> Self {
        PointwiseForward { x, out, activation: None, times: None, plus: None }
    }

    /// What `x` becomes.
    pub fn activation(mut self, activation: impl Into<Option<Activation>>) -> Self {
        self.activation = activation.into();
        self
    }

    /// Multiplies by `times`, shaped as `x`: a gated activation, SwiGLU with [`Activation::Silu`].
    #[doc(alias = "glu")]
    pub fn times(mut self, times: impl Into<Option<TensorView<'a>>>) -> Self {
        self.times = times.into();
        self
    }

    /// Adds `plus`, shaped as `x`: a residual sum. Not beside [`times`](Self::times).
    #[doc(alias = "residual")]
    pub fn plus(mut self, plus: impl Into<Option<TensorView<'a>>>) -> Self {
        self.plus = plus.into();
        self
    }

    fn inputs(&self) -> Vec<(&'static str, TensorView<'a>)> {
        let all = [("x", Some(self.x)), ("times", self.times), ("plus", self.plus)];
        all.into_iter().filter_map(|(name, t)| Some((name, t?))).collect()
    }

    fn check_inputs(&self, device: &DeviceFacts) -> Result<(), Error> {
        for (name, t) in self.inputs() {
            check_float(name, &t)?;
            t.check(name, Access::Read, device)?;
            expect_shape(name, t.shape(), self.x.shape())?;
        }
        if self.times.is_some() && self.plus.is_some() {
            let why = "one call has one second tensor: record two";
            return Err(Error::Unsupported { what: "`times` beside `plus`", why });
        }
        Ok(())
    }

    fn op(&self) -> PointwiseOp<'a> {
        let PointwiseForward { x, activation, times, plus, .. } = *self;
        PointwiseOp { activation, x, times, plus }
    }
}

/// What stands between the products of a block: activations, gated ones, residual sums, one dispatch each.
///
/// ```no_run
/// # use wgpu_attention::{Error, TensorView, wgpu};
/// # use wgpu_attention::matmul::Activation;
/// # use wgpu_attention::rows::{Pointwise, PointwiseForward};
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, tensors: [TensorView; 3]) -> Result<(), Error> {
/// # let [gate, up, out] = tensors;
/// // SwiGLU: silu(gate) · up
/// let call = PointwiseForward::new(gate, out).activation(Activation::Silu).times(up);
/// Pointwise::new(device).forward(encoder, &call)
/// # }
/// ```
///
/// A NaN in gives a NaN out.
///
/// It keeps the bindings of recent calls, so that the same call again creates nothing. They keep some buffers alive: see
/// [`forget`](Self::forget).
#[derive(Clone, Debug)]
pub struct Pointwise {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
}

impl Pointwise {
    /// The operator with pipelines of its own.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// The operator with pipelines that it shares with others on the device.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        Pointwise { pipelines: pipelines.clone(), bindings: Arc::default() }
    }

    /// Drops the bindings of its calls, and with them the references to their buffers. Clones share them.
    ///
    /// Without this, bindings that are not used any more go after a few calls, at most 64. Until then, the buffers that only they keep
    /// alive have at most twice the bytes of the last call's, or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// Records `call` into `encoder`, in a compute pass of its own.
    ///
    /// # Errors
    /// Shapes that differ, an `out` that shares a buffer with an input, and everything else that [`Error`] lists for tensors; then
    /// nothing has been recorded.
    pub fn forward(&self, encoder: &mut wgpu::CommandEncoder, call: &PointwiseForward) -> Result<(), Error> {
        let call = dispatch_of(call, &self.pipelines.facts())?;
        self.record(call, |bound| record(&mut pass(encoder, "pointwise"), bound))
    }

    /// Records `call` into a compute pass of the caller's, which is left with another pipeline and bind group 0.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_in_pass(
        &self,
        pass: &mut wgpu::ComputePass,
        call: &PointwiseForward,
    ) -> Result<(), Error> {
        let call = dispatch_of(call, &self.pipelines.facts())?;
        self.record(call, |bound| record(pass, bound))
    }

    fn record(&self, call: Dispatch, emit: impl FnOnce(&[(BoundDispatch, [u32; 3])])) -> Result<(), Error> {
        let bound = self.pipelines.bind(&[call], &self.bindings)?;
        emit(&bound);
        Ok(())
    }
}

fn dispatch_of<'a>(call: &PointwiseForward<'a>, device: &DeviceFacts) -> Result<Dispatch<'a>, Error> {
    call.check_inputs(device)?;
    check_float("out", &call.out)?;
    call.out.check("out", Access::Write, device)?;
    expect_shape("out", call.out.shape(), call.x.shape())?;
    check_aliasing(&[("out", call.out)], &call.inputs())?;
    Ok(call.op().forward(call.out, device))
}
