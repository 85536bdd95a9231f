//! The elementwise operator: activations, gated activations and residual sums.

mod backward;
pub(crate) mod dispatch;
pub(crate) mod kernels;
pub(crate) mod reference;

pub use backward::ElementwiseBackward;
use dispatch::ElementwiseOp;

use std::sync::Arc;

use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, Dispatch, Pipelines, Prepared, Recorder};
use crate::matmul::Activation;
use crate::tensor::{CallTensors, Element, Error, TensorView};

/// One call: `f(x)`, `f(x) · multiply` or `f(x) + residual`, element by element. All tensors have
/// the same shape.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct ElementwiseForward<'a> {
    pub(crate) x: TensorView<'a>,
    pub(crate) out: TensorView<'a>,
    pub(crate) activation: Option<Activation>,
    pub(crate) multiply: Option<TensorView<'a>>,
    pub(crate) residual: Option<TensorView<'a>>,
}

impl<'a> ElementwiseForward<'a> {
    /// Copies `x` to `out`, both `[batch, heads, length, dim]`, each F32, F16 or BF16. The other
    /// methods add operations.
    pub fn new(x: TensorView<'a>, out: TensorView<'a>) -> Self {
        ElementwiseForward { x, out, activation: None, multiply: None, residual: None }
    }

    /// Applies an activation to `x`.
    pub fn activation(mut self, activation: impl Into<Option<Activation>>) -> Self {
        self.activation = activation.into();
        self
    }

    /// Multiplies by `multiply`, which has the shape of `x`. This is a gated activation: SwiGLU
    /// with [`Activation::Silu`].
    #[doc(alias = "glu")]
    pub fn multiply(mut self, multiply: impl Into<Option<TensorView<'a>>>) -> Self {
        self.multiply = multiply.into();
        self
    }

    /// Adds `residual`, which has the shape of `x`. It cannot be combined with
    /// [`multiply`](Self::multiply).
    pub fn residual(mut self, residual: impl Into<Option<TensorView<'a>>>) -> Self {
        self.residual = residual.into();
        self
    }

    /// Checks the input tensors.
    fn check_inputs<'d>(&self, device: &'d DeviceFacts) -> Result<CallTensors<'a, 'd>, Error> {
        let mut tensors = CallTensors::new(device);
        for (name, t) in [("x", Some(self.x)), ("multiply", self.multiply), ("residual", self.residual)] {
            tensors.read(name, t, Element::Float, self.x.shape())?;
        }
        if self.multiply.is_some() && self.residual.is_some() {
            let why = "they cannot be combined; record two calls";
            return Err(Error::Unsupported { what: "`multiply` with `residual`", why });
        }
        Ok(tensors)
    }

    fn op(&self) -> ElementwiseOp<'a> {
        let ElementwiseForward { x, activation, multiply, residual, .. } = *self;
        ElementwiseOp { activation, x, multiply, residual }
    }
}

/// Elementwise operations between the products of a block: activations, gated activations and
/// residual sums. Each call is one dispatch.
///
/// ```no_run
/// # use wgpu_attention::{Error, TensorView, wgpu};
/// # use wgpu_attention::matmul::Activation;
/// # use wgpu_attention::rows::{Elementwise, ElementwiseForward};
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, tensors: [TensorView; 3]) -> Result<(), Error> {
/// # let [gate, up, out] = tensors;
/// // SwiGLU: silu(gate) · up
/// let call = ElementwiseForward::new(gate, out).activation(Activation::Silu).multiply(up);
/// Elementwise::new(device).forward(encoder, &call)
/// # }
/// ```
///
/// A NaN in an input gives a NaN in the output.
///
/// The operator stores the bindings of recent calls, so that a repeated call creates nothing. The
/// bindings keep some buffers alive: see [`forget`](Self::forget).
#[doc(alias = "SwiGLU")]
#[doc(alias = "gelu")]
#[doc(alias = "relu")]
#[doc(alias = "silu")]
#[derive(Clone, Debug)]
pub struct Elementwise {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
}

impl Elementwise {
    /// Creates the operator with separate pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates the operator with pipelines that other operators of the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        Elementwise { pipelines: pipelines.clone(), bindings: Arc::default() }
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

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Shapes that do not match, an `out` that overlaps an input, and every other
    /// [`Error`] of tensors. After an error nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &ElementwiseForward) -> Result<(), Error> {
        self.prepare(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare(&self, call: &ElementwiseForward) -> Result<Prepared, Error> {
        let call = dispatch_of(call, &self.pipelines.facts())?;
        self.pipelines.bind("elementwise", &[call], &self.bindings)
    }
}

fn dispatch_of<'a>(call: &ElementwiseForward<'a>, device: &DeviceFacts) -> Result<Dispatch<'a>, Error> {
    let mut tensors = call.check_inputs(device)?;
    tensors.write("out", call.out, Element::Float, call.x.shape())?;
    tensors.finish()?;
    Ok(call.op().forward(call.out, device))
}
