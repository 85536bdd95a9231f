//! The operator: hidden states → `S · sigmoid(v · tanh(W h + b))`.

use super::dispatch::Predicted;
use crate::device::DeviceFacts;
use crate::kernel::{
    Dispatches, KernelOptions, Pipelines, Prepared, Recorder, Scratch, ScratchSize, Slot, fits, in_scratch,
};
use crate::matmul::Linear;
use crate::matmul::projection::check_summed_rows;
use crate::matmul::projection::dispatch::{self, LinearOp};
use crate::matmul::projection::dispatch_backward::{self, Gradient, LinearBackward};
use crate::tensor::{Access, CallTensors, DType, Element, Error, TensorView, count};

/// One forward call of a [`PositionPredictor`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct PredictorForward<'a> {
    hidden: TensorView<'a>,
    linear: Linear<'a>,
    vector: TensorView<'a>,
    kv_len: usize,
    lengths: Option<TensorView<'a>>,
    positions: TensorView<'a>,
}

impl<'a> PredictorForward<'a> {
    /// `hidden` states `[batch, 1, q_len, features]`, F32, F16 or BF16; `linear` with W `[units,
    /// features]`, and a bias if there is one; `vector` `[units]`, as [`TensorView::vector`], F32,
    /// F16 or BF16; `kv_len` source positions; to `positions` `[batch, 1, q_len, 1]`, F32.
    pub fn new(
        hidden: TensorView<'a>,
        linear: Linear<'a>,
        vector: TensorView<'a>,
        kv_len: usize,
        positions: TensorView<'a>,
    ) -> Self {
        PredictorForward { hidden, linear, vector, kv_len, lengths: None, positions }
    }

    /// S of each batch entry in place of `kv_len`, `[batch or 1, 1, 1, 1]`, U32.
    pub fn lengths(mut self, lengths: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lengths = lengths.into();
        self
    }

    /// `positions` are these, or their gradient.
    fn check<'d>(
        &self,
        (name, positions, access): (&'static str, TensorView<'a>, Access),
        device: &'d DeviceFacts,
    ) -> Result<CallTensors<'a, 'd>, Error> {
        let PredictorForward { hidden, linear, vector, kv_len, lengths, .. } = self;
        let mut tensors = CallTensors::new(device);
        let [batch, _, q_len, features] = hidden.shape();
        let units = linear.weight.shape()[2];
        tensors.read("hidden", *hidden, Element::Float, [batch, 1, q_len, features])?;
        tensors.read("linear.weight", linear.weight, Element::Float, [1, 1, units, features])?;
        tensors.read("vector", *vector, Element::Float, [1, 1, 1, units])?;
        tensors.read("linear.bias", linear.bias, Element::Float, [1, 1, 1, units])?;
        tensors.add(access, name, positions, DType::F32, [batch, 1, q_len, 1])?;
        tensors.read_broadcast("lengths", *lengths, DType::U32, [batch, 1, 1, 1])?;
        if u32::try_from(*kv_len).is_err() {
            let expected = "below 2^32";
            return Err(Error::Option { option: "kv_len", value: *kv_len as f64, expected });
        }
        Ok(tensors)
    }

    /// `[batch, 1, q_len, units]`.
    fn inner(&self) -> [usize; 4] {
        let [batch, _, q_len, _] = self.hidden.shape();
        [batch, 1, q_len, self.linear.weight.shape()[2]]
    }

    fn inner_bytes(&self, device: &DeviceFacts) -> Result<u64, Error> {
        fits(count(self.inner()) as u64, 4, device)
    }

    /// `W h + b` into `x`.
    fn products(
        &self,
        x: TensorView<'a>,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<(Dispatches<'a>, Predicted<'a>), Error> {
        let PredictorForward { hidden, linear, vector, kv_len, lengths, .. } = *self;
        let Linear { weight: w, bias } = linear;
        let op = LinearOp { x: hidden, w, bias, y: x, narrow: false, activation: None };
        Ok((dispatch::dispatches(&[op], kernel_options, device)?, Predicted { x, vector, lengths, kv_len }))
    }
}

/// One backward call: a [`PredictorForward`], whose inputs are read, the gradient of the positions,
/// and where the gradients go, each shaped as what it is of; F32, F16 or BF16.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct PredictorBackward<'a> {
    forward: PredictorForward<'a>,
    d_positions: TensorView<'a>,
    d_hidden: Option<TensorView<'a>>,
    d_weight: Option<TensorView<'a>>,
    d_bias: Option<TensorView<'a>>,
    d_vector: Option<TensorView<'a>>,
    accumulates: bool,
}

impl<'a> PredictorBackward<'a> {
    /// `forward` as it was made and the gradient of its positions, as
    /// [`LocalBackward::d_positions`](crate::local::LocalBackward::d_positions) wrote it. No gradient is written until
    /// it is asked for.
    pub fn new(forward: PredictorForward<'a>, d_positions: TensorView<'a>) -> Self {
        let [d_hidden, d_weight, d_bias, d_vector] = [None; 4];
        PredictorBackward { forward, d_positions, d_hidden, d_weight, d_bias, d_vector, accumulates: false }
    }

    /// Writes the gradient of the hidden states there.
    pub fn d_hidden(mut self, d_hidden: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_hidden = d_hidden.into();
        self
    }

    /// Writes the gradient of W there.
    pub fn d_weight(mut self, d_weight: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_weight = d_weight.into();
        self
    }

    /// Writes the gradient of the bias there, `[units]`.
    pub fn d_bias(mut self, d_bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_bias = d_bias.into();
        self
    }

    /// Writes the gradient of the vector there.
    pub fn d_vector(mut self, d_vector: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_vector = d_vector.into();
        self
    }

    /// Adds the gradients to what is there instead, rounding once to their type.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }

    fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let PredictorBackward { forward, d_positions, d_hidden, d_weight, d_bias, d_vector, .. } = *self;
        let PredictorForward { hidden, linear, vector, .. } = forward;
        let mut tensors = forward.check(("d_positions", d_positions, Access::Read), device)?;
        check_summed_rows("hidden", &hidden, 1)?;
        tensors.write("d_hidden", d_hidden, Element::Float, hidden.shape())?;
        tensors.write("d_weight", d_weight, Element::Float, linear.weight.shape())?;
        tensors.write("d_bias", d_bias, Element::Float, vector.shape())?;
        tensors.write("d_vector", d_vector, Element::Float, vector.shape())?;
        tensors
            .require_gradients("nothing is asked for: give `d_hidden`, `d_weight`, `d_bias` or `d_vector`")?;
        tensors.check_aliasing()
    }
}

/// Positions predicted from hidden states: `S · sigmoid(v · tanh(W h + b))` (Luong et al. 2015,
/// equation 9, which has no b), for
/// [`LocalAttention`](super::LocalAttention), with the gradient of each. S is the number of source positions.
#[derive(Clone, Debug)]
pub struct PositionPredictor {
    pipelines: Pipelines,
    kernel_options: KernelOptions,
}

impl PositionPredictor {
    /// A predictor with pipelines of its own.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// A predictor that shares pipelines with other operators on the device.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        PositionPredictor { pipelines: pipelines.clone(), kernel_options: KernelOptions::new() }
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// How the products are computed, not what, as of a [`Projection`](crate::Projection).
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// The temporary memory that `call` needs: 4 bytes for each unit of each hidden state.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &PredictorForward) -> Result<ScratchSize, Error> {
        let device = &self.pipelines.facts();
        call.check(("positions", call.positions, Access::Write), device)?.finish()?;
        Ok(ScratchSize::default().with(Slot::Projected, call.inner_bytes(device)?))
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors and scratch; then nothing has been recorded.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &PredictorForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &PredictorForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        scratch.check(self.scratch_size(call)?)?;
        let x = in_scratch(scratch.buffer(Slot::Projected)?, DType::F32, call.inner(), 0);
        let (mut dispatches, predicted) = call.products(x, &self.kernel_options, device)?;
        dispatches.push(predicted.forward(call.positions, device));
        self.pipelines.bind("predicted positions", &dispatches, scratch.bindings())
    }
}

/// Gradients, without atomics: the same inputs on the same device give the same bits.
impl PositionPredictor {
    /// The temporary memory that `call` needs: three times the forward call's.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &PredictorBackward) -> Result<ScratchSize, Error> {
        let device = &self.pipelines.facts();
        call.check(device)?;
        let bytes = call.forward.inner_bytes(device)?;
        let slots = [Slot::Projected, Slot::ProjectedGradients, Slot::GradientTerms];
        Ok(slots.into_iter().fold(ScratchSize::default(), |size, slot| size.with(slot, bytes)))
    }

    /// Records the gradients of a forward call into an encoder or a pass.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors and scratch; [`Error::Unsupported`] if no gradient is asked for. Then nothing has been
    /// recorded.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &PredictorBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(
        &self,
        call: &PredictorBackward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        scratch.check(self.backward_scratch_size(call)?)?;
        let inner = |slot| Ok(in_scratch(scratch.buffer(slot)?, DType::F32, call.forward.inner(), 0));
        let [x, d_x, terms] =
            [inner(Slot::Projected)?, inner(Slot::ProjectedGradients)?, inner(Slot::GradientTerms)?];
        let (mut dispatches, predicted) = call.forward.products(x, &self.kernel_options, device)?;
        dispatches.push(predicted.backward(call.d_positions, [d_x, terms], device));
        let gradient = |view| Gradient { view, accumulates: call.accumulates };
        let hidden = call.forward.hidden;
        let of_products = LinearBackward {
            w: call.forward.linear.weight,
            d_y: d_x,
            d_x: call.d_hidden.map(gradient),
            d_w: call.d_weight.map(|d_weight| (hidden, gradient(d_weight))),
            d_b: call.d_bias.map(gradient),
            narrow: false,
        };
        // Of columns, as a bias is.
        let of_vector = LinearBackward {
            d_y: terms,
            d_x: None,
            d_w: None,
            d_b: call.d_vector.map(gradient),
            ..of_products
        };
        dispatches.extend(dispatch_backward::dispatches(
            &[of_products, of_vector],
            &self.kernel_options,
            device,
        )?);
        self.pipelines.bind("predicted positions backward", &dispatches, scratch.bindings())
    }
}
