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
    /// Takes the tensors of a call, and writes `positions`:
    ///
    /// - `hidden`: the hidden states, `[batch, 1, q_len, features]`, F32, F16 or BF16.
    /// - `linear`: W `[units, features]`, and a bias if there is one.
    /// - `vector`: `[units]`, a [`TensorView::vector`], F32, F16 or BF16.
    /// - `kv_len`: the number of source positions.
    /// - `positions`: `[batch, 1, q_len, 1]`, F32.
    pub fn new(
        hidden: TensorView<'a>,
        linear: Linear<'a>,
        vector: TensorView<'a>,
        kv_len: usize,
        positions: TensorView<'a>,
    ) -> Self {
        PredictorForward { hidden, linear, vector, kv_len, lengths: None, positions }
    }

    /// The number S of source positions of each batch entry, `[batch or 1, 1, 1, 1]`, U32. It
    /// replaces `kv_len`.
    pub fn lengths(mut self, lengths: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lengths = lengths.into();
        self
    }

    /// Checks the call. `positions` is the tensor of positions, or its gradient.
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

    /// Records the products `W h + b`, written to `x`.
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

/// One backward call. It reads the inputs of a [`PredictorForward`] and the gradient of the
/// positions, and writes the gradients of the inputs. Each gradient has the shape of its tensor,
/// and is F32, F16 or BF16.
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
    /// Takes `forward`, unchanged, and the gradient of its positions.
    /// [`LocalBackward::d_positions`](crate::local::LocalBackward::d_positions) writes this
    /// gradient. The call writes only the gradients that you request.
    pub fn new(forward: PredictorForward<'a>, d_positions: TensorView<'a>) -> Self {
        let [d_hidden, d_weight, d_bias, d_vector] = [None; 4];
        PredictorBackward { forward, d_positions, d_hidden, d_weight, d_bias, d_vector, accumulates: false }
    }

    /// Writes the gradient of the hidden states to `d_hidden`.
    pub fn d_hidden(mut self, d_hidden: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_hidden = d_hidden.into();
        self
    }

    /// Writes the gradient of W to `d_weight`.
    pub fn d_weight(mut self, d_weight: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_weight = d_weight.into();
        self
    }

    /// Writes the gradient of the bias to `d_bias`, `[units]`.
    pub fn d_bias(mut self, d_bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_bias = d_bias.into();
        self
    }

    /// Writes the gradient of the vector to `d_vector`.
    pub fn d_vector(mut self, d_vector: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_vector = d_vector.into();
        self
    }

    /// Adds the gradients to the contents of their tensors, and rounds each sum once to its type.
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
        tensors.require_gradients(
            "no gradient is requested; set `d_hidden`, `d_weight`, `d_bias` or `d_vector`",
        )?;
        tensors.check_aliasing()
    }
}

/// Positions predicted from hidden states: `S · sigmoid(v · tanh(W h + b))` (Luong et al. 2015,
/// equation 9, which has no b). S is the number of source positions. Use them with
/// [`LocalAttention`](super::LocalAttention). The backward pass gives the gradient of each input.
#[derive(Clone, Debug)]
pub struct PositionPredictor {
    pipelines: Pipelines,
    kernel_options: KernelOptions,
}

impl PositionPredictor {
    /// Creates a predictor with new pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates a predictor with pipelines that other operators on the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        PositionPredictor { pipelines: pipelines.clone(), kernel_options: KernelOptions::new() }
    }

    /// Returns the pipelines, for other operators to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// The options that select the kernels of the products without changing the result, as for a
    /// [`Projection`](crate::Projection).
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Returns the temporary memory that `call` needs: 4 bytes for each unit of each hidden state.
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
    /// Any error that [`Error`] lists for tensors and scratch. The encoder is then unchanged.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &PredictorForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its kernels and binds its tensors. [`Prepared::record`] then records
    /// it any number of times.
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

/// The backward pass. It uses no atomics: the same inputs on the same device give the same bits.
impl PositionPredictor {
    /// Returns the temporary memory that `call` needs: three times the memory of the forward call.
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
    /// Any error that [`Error`] lists for tensors and scratch, and [`Error::Unsupported`] if the
    /// call requests no gradient. The encoder is then unchanged.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &PredictorBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its kernels and binds its tensors. [`Prepared::record`] then records
    /// it any number of times.
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
        // The gradient of the vector sums columns, as the gradient of a bias does.
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
