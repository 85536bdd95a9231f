//! The operator: `gain · x / |x|`.

pub(crate) mod kernels;
pub(crate) mod reference;

use kernels::weight_norm::WeightNormCall;
use kernels::weight_norm_backward::WeightNormBackwardCall;

use std::sync::Arc;

use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, Dispatch, Pipelines, Prepared, Recorder};
use crate::tensor::{CallTensors, DType, Element, Error, TensorView};

/// One forward call: `out = gain · vector / |vector|`, of each head.
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
    /// Vectors and their lengths, to `out`, whose buffer may hold neither.
    pub fn new(vector: TensorView<'a>, gain: TensorView<'a>, out: TensorView<'a>) -> Self {
        WeightNormForward { vector, gain, out }
    }
}

/// One backward call: a forward call, the gradient of its result, and where the gradients go, all
/// of these F32: `d_vector` as `vector`, `d_gain` as `gain`, summed over the heads that share it.
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
    /// `forward` as it was made, whose inputs are read, the gradient of its `out`, and where the
    /// gradients of both inputs go.
    pub fn new(
        forward: WeightNormForward<'a>,
        d_out: TensorView<'a>,
        [d_vector, d_gain]: [TensorView<'a>; 2],
    ) -> Self {
        WeightNormBackward { forward, d_out, d_vector, d_gain, accumulates: false }
    }

    /// Adds the gradients to what is there instead.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }
}

/// Weight normalisation (Salimans and Kingma 2016, "Weight normalization: a simple
/// reparameterization to accelerate training of deep neural networks"): vectors of given lengths.
/// With it, [`AdditiveAttention`](crate::additive::AdditiveAttention) is normalised Bahdanau
/// attention, `g · v / |v| · tanh(W_q q + W_k k + b)` (`normalize=True` in TensorFlow's
/// `BahdanauAttention`): its output is the `score_vector`, and the
/// [`d_score_vector`](crate::additive::AdditiveBackward::d_score_vector) is its gradient. A vector of zeros stays zero and has no gradient.
///
/// It keeps the bindings of recent calls, so that the same call again creates nothing. They keep
/// some buffers alive: see
/// [`forget`](Self::forget).
#[derive(Clone, Debug)]
pub struct WeightNorm {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
}

impl WeightNorm {
    /// The operator with pipelines of its own.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// The operator with pipelines that it shares with others on the device.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        WeightNorm { pipelines: pipelines.clone(), bindings: Arc::default() }
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

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors; then nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &WeightNormForward) -> Result<(), Error> {
        self.prepare(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &WeightNormForward) -> Result<Prepared, Error> {
        let call = call.dispatch(&self.pipelines.facts())?;
        self.pipelines.bind("weight norm", &[call], &self.bindings)
    }

    /// Records the gradients of a forward call into an encoder or a pass. The same call gives the
    /// same bits.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(&self, into: &mut impl Recorder, call: &WeightNormBackward) -> Result<(), Error> {
        self.prepare_backward(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
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
