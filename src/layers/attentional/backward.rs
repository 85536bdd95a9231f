//! The gradients of attentional vectors.

use super::kernels::tanh_backward::{TanhBackwardCall, WORKGROUP};
use super::{AttentionalForward, AttentionalVector, check_inputs, columns};
use crate::device::DeviceFacts;
use crate::kernel::{Prepared, Recorder, Scratch, ScratchSize, Slot, in_scratch};
use crate::matmul::Linear;
use crate::matmul::projection::check_summed_rows;
use crate::matmul::projection::dispatch_backward::{self, Gradient, LinearBackward};
use crate::tensor::{CallTensors, DType, Element, Error, TensorView, count};

/// One backward call of the attentional vector, and places for its gradients.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct AttentionalBackward<'a> {
    forward: AttentionalForward<'a>,
    d_out: TensorView<'a>,
    d_context: Option<TensorView<'a>>,
    d_hidden: Option<TensorView<'a>>,
    d_weight: Option<TensorView<'a>>,
    d_bias: Option<TensorView<'a>>,
    accumulates: bool,
}

impl<'a> AttentionalBackward<'a> {
    /// `forward` is the unchanged forward call, whose inputs and `out` are read. `d_out` is the
    /// gradient of its `out`. Only the gradients that you set are written.
    pub fn new(forward: AttentionalForward<'a>, d_out: TensorView<'a>) -> Self {
        let [d_context, d_hidden, d_weight, d_bias] = [None; 4];
        AttentionalBackward { forward, d_out, d_context, d_hidden, d_weight, d_bias, accumulates: false }
    }

    /// Writes the gradient of the context to `d_context`, with the shape of the context. All
    /// gradients are F32, F16 or BF16.
    pub fn d_context(mut self, d_context: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_context = d_context.into();
        self
    }

    /// Writes the gradient of the hidden state to `d_hidden`, with the shape of the hidden state.
    /// It contains the part of the attentional vector only, not the part of the queries of
    /// attention.
    pub fn d_hidden(mut self, d_hidden: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_hidden = d_hidden.into();
        self
    }

    /// Writes the gradient of the weight to `d_weight`, with the shape of the weight.
    pub fn d_weight(mut self, d_weight: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_weight = d_weight.into();
        self
    }

    /// Writes the gradient of the bias to `d_bias`, `[1, 1, 1, out]`.
    pub fn d_bias(mut self, d_bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_bias = d_bias.into();
        self
    }

    /// Adds the gradients to the values of their tensors, and rounds once to their type.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }

    fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let AttentionalBackward { forward, d_out, d_context, d_hidden, d_weight, d_bias, .. } = *self;
        let AttentionalForward { context, hidden, linear: Linear { weight, .. }, out } = forward;
        let mut tensors = CallTensors::new(device);
        let shape = check_inputs(context, hidden, weight, &mut tensors)?;
        tensors.read("out", out, Element::Float, shape)?;
        tensors.read("d_out", d_out, Element::Float, shape)?;
        check_summed_rows("context", &context, 1)?;
        tensors.write("d_context", d_context, Element::Float, context.shape())?;
        tensors.write("d_hidden", d_hidden, Element::Float, hidden.shape())?;
        tensors.write("d_weight", d_weight, Element::Float, weight.shape())?;
        tensors.write("d_bias", d_bias, Element::Float, [1, 1, 1, shape[3]])?;
        tensors.require_gradients(
            "no gradient is requested; set `d_context`, `d_hidden`, `d_weight` or `d_bias`",
        )?;
        tensors.check_aliasing()
    }
}

impl AttentionalVector {
    /// Returns the size of the temporary memory that `call` needs: 4 bytes for each element of the
    /// output.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &AttentionalBackward) -> Result<ScratchSize, Error> {
        call.check(&self.pipelines.facts())?;
        Ok(ScratchSize::default().with(Slot::ProjectedGradients, 4 * count(call.forward.out.shape()) as u64))
    }

    /// Records the gradients of a forward call into an encoder or a pass. The same call gives the
    /// same bits on every run.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors and scratch, and [`Error::Unsupported`] if the
    /// call sets no gradient. On an error the call records nothing.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &AttentionalBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its pipelines and binds its tensors. [`Prepared::record`] can then
    /// record it many times.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(
        &self,
        call: &AttentionalBackward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        scratch.check(self.backward_scratch_size(call)?)?;
        let AttentionalBackward { forward, d_out, accumulates, .. } = *call;
        let AttentionalForward { context, hidden, linear: Linear { weight, .. }, out } = forward;
        let [batch, _, length, channels] = out.shape();
        let d_sum = in_scratch(scratch.buffer(Slot::ProjectedGradients)?, DType::F32, out.shape(), 0);
        let of_tanh = TanhBackwardCall { out, d_out, d_sum, channels: channels as u32 };
        let mut dispatches = vec![of_tanh.dispatch([channels.div_ceil(WORKGROUP), length, batch], device)];
        let gradient = |view| Gradient { view, accumulates };
        let weights = columns(weight, &context, &hidden);
        let d_weights = call.d_weight.map(|d_weight| columns(d_weight, &context, &hidden));
        let side = |n: usize, x| LinearBackward {
            w: weights[n],
            d_y: d_sum,
            d_x: None,
            d_w: d_weights.map(|d_weights| (x, gradient(d_weights[n]))),
            d_b: None,
            narrow: false,
        };
        let sides = [
            LinearBackward {
                d_x: call.d_context.map(gradient),
                d_b: call.d_bias.map(gradient),
                ..side(0, context)
            },
            LinearBackward { d_x: call.d_hidden.map(gradient), ..side(1, hidden) },
        ];
        dispatches.extend(dispatch_backward::dispatches(&sides, &self.kernel_options, device)?);
        self.pipelines.bind("attentional vector backward", &dispatches, scratch.bindings())
    }
}
