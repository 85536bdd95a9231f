//! The norm operator: LayerNorm and RMSNorm, with an optional residual sum before them, or a
//! gate.

mod backward;
pub(crate) mod config;
pub(crate) mod dispatch;
mod gate;
pub(crate) mod kernels;
pub(crate) mod reference;
mod weights;

pub use backward::NormBackward;
use config::NormConfig;
use dispatch::{NormInputs, NormOp};
pub use gate::NormGate;
pub(crate) use weights::OwnedNorm;
pub use weights::{NormGradients, NormWeights};

use std::sync::Arc;

use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, KernelOptions, Pipelines, Prepared, Recorder};
use crate::matmul::projection::check_summed_rows;
use crate::tensor::{CallTensors, Element, Error, TensorView};

/// One call of a norm. It processes every row of `[batch, heads, length, features]` separately.
/// Activations are `[batch, 1, length, features]`, see [`TensorView::sequence`]. Queries and keys
/// can be normalised per head.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct NormForward<'a> {
    inputs: NormInputs<'a>,
    out: TensorView<'a>,
    sum: Option<TensorView<'a>>,
}

impl<'a> NormForward<'a> {
    /// Normalises the rows of `x` and writes them to `out`. Both are `[batch, heads, length,
    /// features]`, each F32, F16 or BF16.
    pub fn new(x: TensorView<'a>, out: TensorView<'a>) -> Self {
        NormForward { inputs: NormInputs::new(x), out, sum: None }
    }

    /// Adds `residual` before the norm: `norm(x + residual)`, in f32. It has the shape of `x`; F32,
    /// F16 or BF16.
    pub fn residual(mut self, residual: impl Into<Option<TensorView<'a>>>) -> Self {
        self.inputs.residual = residual.into();
        self
    }

    /// Multiplies the normalised rows by `weight`, `[features]` as [`TensorView::vector`]; F32, F16
    /// or BF16.
    pub fn weight(mut self, weight: impl Into<Option<TensorView<'a>>>) -> Self {
        self.inputs.weight = weight.into();
        self
    }

    /// Adds `bias`, `[features]`, after the weight.
    pub fn bias(mut self, bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.inputs.bias = bias.into();
        self
    }

    /// Multiplies by an activated gate before or after the norm. Its tensor has the shape of `x`;
    /// F32, F16 or BF16. A call with a gate has no residual and no sum.
    pub fn gate(mut self, gate: impl Into<Option<NormGate<TensorView<'a>>>>) -> Self {
        self.inputs.gate = gate.into();
        self
    }

    /// Also writes `x + residual` to `sum`, which has the shape of `x`. This is the residual stream
    /// of a stack with pre-norm. The norm uses the sum before it is rounded to its type.
    pub fn sum(mut self, sum: impl Into<Option<TensorView<'a>>>) -> Self {
        self.sum = sum.into();
        self
    }

    /// Checks the input tensors.
    fn check_inputs<'d>(&self, device: &'d DeviceFacts) -> Result<CallTensors<'a, 'd>, Error> {
        let mut tensors = CallTensors::new(device);
        let NormInputs { x, residual, weight, bias, gate } = self.inputs;
        let shape = x.shape();
        let of_features = [1, 1, 1, shape[3]];
        tensors.read("x", x, Element::Float, shape)?;
        tensors.read("residual", residual, Element::Float, shape)?;
        tensors.read("weight", weight, Element::Float, of_features)?;
        tensors.read("bias", bias, Element::Float, of_features)?;
        tensors.read("gate", gate.map(|gate| gate.gate), Element::Float, shape)?;
        if gate.is_some() && (residual.is_some() || self.sum.is_some()) {
            let why = "they cannot be combined; record two calls";
            return Err(Error::Unsupported { what: "`gate` with `residual` or `sum`", why });
        }
        check_summed_rows("x", &x, shape[1])?;
        Ok(tensors)
    }

    fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let mut tensors = self.check_inputs(device)?;
        let shape = self.inputs.x.shape();
        tensors.write("out", self.out, Element::Float, shape)?;
        tensors.write("sum", self.sum, Element::Float, shape)?;
        tensors.finish()
    }

    pub(crate) fn op(&self, config: NormConfig) -> NormOp<'a> {
        NormOp { config, inputs: self.inputs }
    }
}

/// LayerNorm and RMSNorm of `x` or `x + residual`, in one dispatch, with an optional gate.
///
/// ```no_run
/// # use wgpu_attention::{Error, TensorView, wgpu};
/// # use wgpu_attention::rows::{Norm, NormConfig, NormForward};
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, tensors: [TensorView; 5]) -> Result<(), Error> {
/// # let [x, attended, weight, bias, out] = tensors;
/// // norm(x + attention(x)), as after the attention of an encoder's layer.
/// let norm = Norm::new(device, NormConfig::layer())?;
/// norm.forward(encoder, &NormForward::new(x, out).residual(attended).weight(weight).bias(bias))
/// # }
/// ```
///
/// Statistics are computed in f32, in two passes over a row. A mean far from zero loses no more
/// digits than by its own rounding.
///
/// The operator stores the bindings of recent forward calls, so that a repeated call creates
/// nothing. The bindings keep some buffers alive: see [`forget`](Self::forget). The scratch stores
/// the bindings of backward calls.
#[doc(alias = "LayerNorm")]
#[doc(alias = "RMSNorm")]
#[doc(alias = "layer_norm")]
#[doc(alias = "rms_norm")]
#[derive(Clone, Debug)]
pub struct Norm {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
    config: NormConfig,
    kernel_options: KernelOptions,
}

impl Norm {
    /// Creates a norm with separate pipelines.
    ///
    /// # Errors
    /// An `eps` that is below 0 or not finite.
    pub fn new(device: &wgpu::Device, config: NormConfig) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// Creates a norm with pipelines that other operators of the device share.
    ///
    /// # Errors
    /// See [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: NormConfig) -> Result<Self, Error> {
        config.check()?;
        Ok(Norm {
            pipelines: pipelines.clone(),
            bindings: Arc::default(),
            config,
            kernel_options: KernelOptions::new(),
        })
    }

    /// The pipelines of the operator, to share with other operators.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of past forward calls, and with them the references to their buffers.
    /// Clones share the bindings.
    ///
    /// Without this call, unused bindings are dropped after a few calls, at most 64. Until then,
    /// the buffers that only these bindings keep alive are limited. They have at most twice the
    /// bytes of the last call's buffers, or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// Sets the class of kernels, and [`KernelOptions::batch_invariant`]. The other options do not
    /// apply to this operator.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Shapes that do not match, written tensors that overlap other tensors, and every
    /// other [`Error`] of tensors. After an error nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &NormForward) -> Result<(), Error> {
        self.prepare(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare(&self, call: &NormForward) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        call.check(device)?;
        let dispatch = call.op(self.config).forward(call.out, call.sum, &self.kernel_options, device);
        self.pipelines.bind("norm", &[dispatch], &self.bindings)
    }
}
