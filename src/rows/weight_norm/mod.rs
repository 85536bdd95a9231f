//! The weight-normalisation operator: `gain · x / |x|`.

pub(crate) mod kernels;
pub(crate) mod reference;

use kernels::weight_norm::WeightNormCall;
use kernels::weight_norm_backward::WeightNormBackwardCall;

use std::sync::Arc;

use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, Dispatch, Pipelines, Prepared, Recorder};
use crate::tensor::{CallTensors, DType, Element, Error, TensorView};

/// One forward call: `out = gain · vector / |vector|` for each head.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `vector` | `[1, heads, 1, hidden]`, or one head for all | F32, F16 or BF16 |
/// | `gain` | `[1, heads or 1, 1, 1]`, the length | as `vector` |
/// | `out` | as `vector` | F32 |
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct WeightNormForward<'a> {
    vector: TensorView<'a>,
    gain: TensorView<'a>,
    out: TensorView<'a>,
}

impl<'a> WeightNormForward<'a> {
    /// Scales each `vector` to the length `gain`, and writes it to `out`, which may not overlap an
    /// input.
    pub fn new(vector: TensorView<'a>, gain: TensorView<'a>, out: TensorView<'a>) -> Self {
        WeightNormForward { vector, gain, out }
    }
}

/// One backward call. All its gradients, `d_out` included, are F32. `d_vector` has the shape of
/// `vector`, and `d_gain` has the shape of `gain`. `d_gain` is summed over the heads that share a
/// gain.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct WeightNormBackward<'a> {
    forward: WeightNormForward<'a>,
    d_out: TensorView<'a>,
    d_vector: TensorView<'a>,
    d_gain: TensorView<'a>,
    accumulates: bool,
}

impl<'a> WeightNormBackward<'a> {
    /// The backward pass of `forward`. It reads the inputs of `forward`. `d_out` is the gradient of
    /// its `out`. `d_vector` and `d_gain` are the outputs for the gradients of the inputs.
    pub fn new(
        forward: WeightNormForward<'a>,
        d_out: TensorView<'a>,
        [d_vector, d_gain]: [TensorView<'a>; 2],
    ) -> Self {
        WeightNormBackward { forward, d_out, d_vector, d_gain, accumulates: false }
    }

    /// Adds the gradients to the outputs instead of overwriting them.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }
}

/// Weight normalisation (Salimans and Kingma 2016, "Weight normalization: a simple
/// reparameterization to accelerate training of deep neural networks"). It scales vectors to a
/// length. A vector of zeros stays zero and has no gradient.
///
/// Use it for normalised Bahdanau attention, `g · v / |v| · tanh(W_q q + W_k k + b)`
/// (`normalize=True` in TensorFlow's `BahdanauAttention`). The output is then the `score_vector` of
/// [`AdditiveAttention`](crate::additive::AdditiveAttention).
/// [`d_score_vector`](crate::additive::AdditiveBackward::d_score_vector) is the gradient of the
/// output.
///
/// The operator stores the bindings of recent calls, so that a repeated call creates nothing. The
/// bindings keep some buffers alive: see [`forget`](Self::forget).
#[derive(Clone, Debug)]
pub struct WeightNorm {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
}

impl WeightNorm {
    /// Creates the operator with separate pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates the operator with pipelines that other operators of the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        WeightNorm { pipelines: pipelines.clone(), bindings: Arc::default() }
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
    /// Every [`Error`] of tensors. After an error nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &WeightNormForward) -> Result<(), Error> {
        self.prepare(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare(&self, call: &WeightNormForward) -> Result<Prepared, Error> {
        let call = call.dispatch(&self.pipelines.facts())?;
        self.pipelines.bind("weight norm", &[call], &self.bindings)
    }

    /// Records the gradients of a forward call into an encoder or a pass. The same call gives the
    /// same bits on every run.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn backward(&self, into: &mut impl Recorder, call: &WeightNormBackward) -> Result<(), Error> {
        self.prepare_backward(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &WeightNormBackward) -> Result<Prepared, Error> {
        let call = call.dispatch(&self.pipelines.facts())?;
        self.pipelines.bind("weight norm backward", &[call], &self.bindings)
    }
}

fn check_inputs<'a, 'd>(
    vector: TensorView<'a>,
    gain: TensorView<'a>,
    device: &'d DeviceFacts,
) -> Result<CallTensors<'a, 'd>, Error> {
    let mut tensors = CallTensors::new(device);
    let [_, heads, _, hidden] = vector.shape();
    tensors.read("vector", vector, Element::Float, [1, heads, 1, hidden])?;
    tensors.read_broadcast("gain", gain, vector.dtype(), [1, heads, 1, 1])?;
    Ok(tensors)
}

impl<'a> WeightNormForward<'a> {
    fn dispatch(&self, device: &DeviceFacts) -> Result<Dispatch<'a>, Error> {
        let WeightNormForward { vector, gain, out } = *self;
        let mut tensors = check_inputs(vector, gain, device)?;
        tensors.write("out", out, DType::F32, vector.shape())?;
        tensors.finish()?;
        let [_, heads, _, dim] = vector.shape();
        let call = WeightNormCall { x: vector, gain, out, dim: dim as u32 };
        Ok(call.dispatch([heads, 1, 1], device))
    }
}

impl<'a> WeightNormBackward<'a> {
    fn dispatch(&self, device: &DeviceFacts) -> Result<Dispatch<'a>, Error> {
        let WeightNormBackward { forward, d_out, d_vector, d_gain, accumulates } = *self;
        let WeightNormForward { vector, gain, .. } = forward;
        let mut tensors = check_inputs(vector, gain, device)?;
        tensors.read("d_out", d_out, DType::F32, vector.shape())?;
        tensors.write("d_vector", d_vector, DType::F32, vector.shape())?;
        tensors.write("d_gain", d_gain, DType::F32, gain.shape())?;
        tensors.finish()?;
        let ([_, heads, _, dim], gains) = (vector.shape(), gain.shape()[1]);
        let call = WeightNormBackwardCall {
            x: vector,
            gain,
            d_out,
            d_x: d_vector,
            d_gain,
            dim: dim as u32,
            heads: (heads / gains) as u32,
            accumulates,
        };
        Ok(call.dispatch([gains, 1, 1], device))
    }
}
