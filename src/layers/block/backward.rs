//! What the backward passes of stacks share: each part of a layer, computed once more and then backwards.

use super::config::TransformerLayerConfig;
use super::{FeedForward, Rows, Workspace};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, ScratchSize, Slot, in_scratch};
use crate::layers::multi_head::backward::Plan as BackwardPlan;
use crate::layers::multi_head::{
    LinearGradients, MultiHeadAttention, MultiHeadBackward, MultiHeadForward, MultiHeadGradients,
    Plan as AttentionPlan, joined_heads,
};
use crate::matmul::projection::dispatch_backward::{self, Gradient, LinearBackward};
use crate::matmul::projection::{OwnedLinear, check_vector, check_weight};
use crate::rows::elementwise::dispatch::ElementwiseOp;
use crate::rows::norm::dispatch::NormGradients as NormTargets;
use crate::rows::norm::{NormGradients, OwnedNorm};
use crate::tensor::{Access, DType, Error, Shape, TensorView, check_float, count, expect_shape};

/// Where the gradients of [`FeedForwardWeights`](crate::layers::FeedForwardWeights) go: nowhere by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct FeedForwardGradients<'a> {
    /// Of [`FeedForwardWeights::up`](crate::layers::FeedForwardWeights::up).
    pub up: LinearGradients<'a>,
    /// Of [`FeedForwardWeights::gate`](crate::layers::FeedForwardWeights::gate).
    pub gate: LinearGradients<'a>,
    /// Of [`FeedForwardWeights::down`](crate::layers::FeedForwardWeights::down).
    pub down: LinearGradients<'a>,
}

/// Gradients that are written, each with its name.
pub(crate) type WrittenGradients<'a> = Vec<(&'static str, TensorView<'a>)>;

/// The gradient of a tensor that the stack has not.
fn without(what: &'static str) -> Error {
    Error::Unsupported { what, why: "the stack was made without it: leave its gradient out" }
}

impl OwnedNorm {
    pub fn check_gradients<'a>(
        &self,
        gradients: &NormGradients<'a>,
        features: usize,
        written: &mut WrittenGradients<'a>,
        device: &DeviceFacts,
    ) -> Result<(), Error> {
        let all =
            [("d_norm.weight", gradients.weight, &self.weight), ("d_norm.bias", gradients.bias, &self.bias)];
        for (name, gradient, own) in all {
            let Some(gradient) = gradient else { continue };
            if own.is_none() {
                return Err(without(name));
            }
            check_vector(name, &gradient, features, Access::Write, device)?;
            written.push((name, gradient));
        }
        Ok(())
    }
}

/// Checks the gradients of a norm that stands after the last layer, or does not.
pub(crate) fn check_final_gradients<'a>(
    norm: Option<&OwnedNorm>,
    gradients: &NormGradients<'a>,
    features: usize,
    written: &mut WrittenGradients<'a>,
    device: &DeviceFacts,
) -> Result<(), Error> {
    match norm {
        Some(norm) => norm.check_gradients(gradients, features, written, device),
        None if gradients.weight.is_some() || gradients.bias.is_some() => Err(without("d_final_norm")),
        None => Ok(()),
    }
}

/// Checks the gradient of an input, which is shaped as that.
pub(crate) fn check_input_gradient<'a>(
    name: &'static str,
    gradient: Option<TensorView<'a>>,
    input: &TensorView,
    written: &mut WrittenGradients<'a>,
    device: &DeviceFacts,
) -> Result<(), Error> {
    let Some(gradient) = gradient else { return Ok(()) };
    check_float(name, &gradient)?;
    gradient.check(name, Access::Write, device)?;
    expect_shape(name, gradient.shape(), input.shape())?;
    written.push((name, gradient));
    Ok(())
}

impl FeedForward {
    pub fn check_gradients<'a>(
        &self,
        gradients: &FeedForwardGradients<'a>,
        written: &mut WrittenGradients<'a>,
        device: &DeviceFacts,
    ) -> Result<(), Error> {
        let all = [
            ("d_feed_forward.up", Some(&self.up), gradients.up),
            ("d_feed_forward.gate", self.gate.as_ref(), gradients.gate),
            ("d_feed_forward.down", Some(&self.down), gradients.down),
        ];
        for (name, own, LinearGradients { weight, bias }) in all {
            let own_bias = own.and_then(|own| own.bias.as_ref());
            if weight.is_some() && own.is_none() || bias.is_some() && own_bias.is_none() {
                return Err(without(name));
            }
            if let (Some(weight), Some(own)) = (weight, own) {
                check_weight(name, &weight, own.weight.layout.shape, Access::Write, device)?;
                written.push((name, weight));
            }
            if let (Some(bias), Some(own)) = (bias, own_bias) {
                check_vector(name, &bias, own.layout.shape[3], Access::Write, device)?;
                written.push((name, bias));
            }
        }
        Ok(())
    }
}

/// An attention of a layer, whose results are kept from when it is computed again until its gradients are done.
#[derive(Clone, Copy)]
pub(crate) struct AttentionPart<'a> {
    pub layer: &'a MultiHeadAttention,
    /// Where the gradients of its weights go.
    pub to: MultiHeadGradients<'a>,
    /// Those of them that are asked for in this layer: keys' weights may be those of an earlier layer.
    pub own: MultiHeadGradients<'a>,
    /// Whether gradients of keys' weights are added to those of later layers.
    pub adds_keys: bool,
    /// Where the heads' outputs are kept, and their log-sum-exp.
    pub slots: [Slot; 2],
}

/// How an attention is computed once more, and how its gradients are.
pub(crate) struct AttentionPlans {
    again: AttentionPlan,
    backward: BackwardPlan,
    pub size: ScratchSize,
}

/// Where the gradients of an attention's inputs go; of self-attention both to the same.
#[derive(Clone, Copy)]
pub(crate) struct InputGradients<'a> {
    pub queries: Gradient<'a>,
    /// The sum over keys and values, if it is wanted.
    pub keys: Option<Gradient<'a>>,
}

impl<'a> AttentionPart<'a> {
    /// An attention that shares nothing with other layers.
    pub fn new(layer: &'a MultiHeadAttention, to: MultiHeadGradients<'a>, slots: [Slot; 2]) -> Self {
        AttentionPart { layer, to, own: to, adds_keys: false, slots }
    }

    /// The call with places for what is kept, each in a `part` of the scratch.
    fn keeping(
        &self,
        call: MultiHeadForward<'a>,
        shape: &Shape,
        part: impl Fn(Slot) -> Result<&'a wgpu::Buffer, Error>,
    ) -> Result<MultiHeadForward<'a>, Error> {
        let [context, lse] = self.slots;
        let context = in_scratch(part(context)?, call.out.dtype(), joined_heads(shape), 0);
        Ok(call.context(context).lse(in_scratch(part(lse)?, DType::F32, shape.lse(), 0)))
    }

    fn call(
        &self,
        forward: MultiHeadForward<'a>,
        d_out: TensorView<'a>,
        d_inputs: InputGradients<'a>,
    ) -> MultiHeadBackward<'a> {
        let InputGradients { queries, keys } = d_inputs;
        let of_keys = keys.map(|keys| keys.view);
        MultiHeadBackward::new(forward, d_out)
            .d_query(queries.view)
            .d_key(of_keys)
            .d_value(of_keys)
            .d_weights(self.to)
            .inputs_accumulate([queries.accumulates, keys.is_some_and(|keys| keys.accumulates)])
            .keys_accumulate(self.adds_keys)
    }

    /// The plans of `call`, whose mask and gradients of weights are checked, and the latter put among what is `written`. `stand_in` is
    /// laid out as the gradients of rows are.
    pub fn plan(
        &self,
        call: MultiHeadForward<'a>,
        (stand_in, wants_keys): (TensorView<'a>, bool),
        dims: [usize; 3],
        written: &mut WrittenGradients<'a>,
        device: &DeviceFacts,
    ) -> Result<AttentionPlans, Error> {
        let shape = self.layer.shape_of(dims);
        // Where there is no scratch yet, any buffer stands for it: plans look at layouts.
        let call = self.keeping(call, &shape, |_| Ok(stand_in.buffer))?;
        let again = self.layer.plan_of(&call, dims, device)?;
        let queries = Gradient { view: stand_in, accumulates: false };
        let d_inputs = InputGradients { queries, keys: wants_keys.then_some(queries) };
        let call = self.call(call, stand_in, d_inputs);
        let backward = self.layer.backward_plan_of(&call, dims, device)?;
        written.extend(self.layer.written_weights(&call.d_weights(self.own)));
        let [context, lse] = self.slots;
        let kept = ScratchSize::default()
            .with(context, self.layer.context_bytes(&shape))
            .with(lse, 4 * count(shape.lse()) as u64);
        let size = kept.max(again.size).max(backward.size);
        Ok(AttentionPlans { again, backward, size })
    }

    /// Computes `call` once more. Gives it with what is kept.
    pub fn again(
        &self,
        call: MultiHeadForward<'a>,
        plans: &AttentionPlans,
        work: &Workspace<'a>,
        dispatches: &mut Dispatches<'a>,
    ) -> Result<MultiHeadForward<'a>, Error> {
        let call = self.keeping(call, &plans.again.shape, |slot| work.scratch.buffer(slot))?;
        dispatches.extend(self.layer.dispatches(&call, &plans.again, work.scratch, work.device)?);
        Ok(call)
    }

    /// From `d_out` to the gradients of the inputs of `forward`, which has kept its results, and of the weights.
    pub fn backward(
        &self,
        forward: MultiHeadForward<'a>,
        d_out: TensorView<'a>,
        d_inputs: InputGradients<'a>,
        plans: &AttentionPlans,
        work: &Workspace<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let call = self.call(forward, d_out, d_inputs).accumulate(work.accumulates);
        self.layer.backward_dispatches(&call, &plans.backward, work.scratch, work.device)
    }
}

impl<'a> Workspace<'a> {
    /// A gradient of weights.
    fn gradient_of(&self, view: Option<TensorView<'a>>) -> Option<Gradient<'a>> {
        view.map(|view| Gradient { view, accumulates: self.accumulates })
    }

    /// From `d_out` of `norm(x + residual)` to the gradient of that sum, which `d_sum` is added to, in `d_x`; they may be one.
    pub fn norm_backward(
        &self,
        (norm, to): (&'a OwnedNorm, NormGradients<'a>),
        (x, residual): (TensorView<'a>, Option<TensorView<'a>>),
        [d_out, d_x]: [TensorView<'a>; 2],
        d_sum: Option<TensorView<'a>>,
    ) -> Result<Dispatches<'a>, Error> {
        let in_place = d_sum.is_some_and(|d_sum| d_sum.buffer == d_x.buffer);
        let targets = NormTargets {
            d_out,
            d_sum: d_sum.filter(|_| !in_place),
            d_x: Some(Gradient { view: d_x, accumulates: in_place }),
            d_weight: self.gradient_of(to.weight),
            d_bias: self.gradient_of(to.bias),
        };
        norm.op(self.config.norm, x, residual).backward(
            &targets,
            self.scratch,
            self.kernel_options,
            self.device,
        )
    }

    /// Of a product `x → y`: the gradients of `linear`, and that of x.
    fn linear_backward(
        &self,
        (linear, to): (&'a OwnedLinear, LinearGradients<'a>),
        [x, d_y]: [TensorView<'a>; 2],
        d_x: Gradient<'a>,
    ) -> LinearBackward<'a> {
        LinearBackward {
            w: linear.weight.view(),
            d_y,
            d_x: Some(d_x),
            d_w: self.gradient_of(to.weight).map(|d_w| (x, d_w)),
            d_b: self.gradient_of(to.bias),
            narrow: false,
        }
    }

    /// From `d_out` of the feed-forward layer to the gradient of its input `x`, `d_x`, after [`feed_hidden`](Self::feed_hidden) of x.
    pub fn feed_backward(
        &self,
        (layer, to): (&'a FeedForward, FeedForwardGradients<'a>),
        [x, d_out]: [TensorView<'a>; 2],
        d_x: Gradient<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let width = self.config.hidden_features;
        let d_hidden = self.gradient(Slot::HiddenGradient, width)?;
        let d_up = self.gradient(Slot::ProductsGradient, width)?;
        let bytes = 4 * count(self.rows.shape(width)) as u64;
        let d_gate = d_up.with_offset((gate_gradient_offset(bytes) / 4) as usize);
        let written = Gradient { view: d_hidden, accumulates: false };
        let down = self.linear_backward((&layer.down, to.down), [self.hidden()?, d_out], written);
        let mut dispatches = dispatch_backward::dispatches(&[down], self.kernel_options, self.device)?;
        let op = self.activated(layer)?;
        dispatches.push(match &layer.gate {
            Some(_) => op.backward(d_hidden, Some(d_gate), Some(d_up), false, self.device),
            None => op.backward(d_hidden, Some(d_up), None, false, self.device),
        });
        let mut products = vec![self.linear_backward((&layer.up, to.up), [x, d_up], d_x)];
        if let Some(gate) = &layer.gate {
            let more = Gradient { accumulates: true, ..d_x };
            products.push(self.linear_backward((gate, to.gate), [x, d_gate], more));
        }
        dispatches.extend(dispatch_backward::dispatches(&products, self.kernel_options, self.device)?);
        Ok(dispatches)
    }

    /// Brings a gradient out of the scratch.
    pub fn hand_over(&self, d: TensorView<'a>, to: TensorView<'a>) -> Dispatch<'a> {
        let copy = ElementwiseOp { activation: None, x: d, multiply: None, residual: None };
        copy.backward(d, Some(to), None, self.accumulates, self.device)
    }
}

/// Where the gradient of the gate's product begins, in bytes, after that of up's.
fn gate_gradient_offset(bytes: u64) -> u64 {
    bytes.next_multiple_of(256)
}

/// The scratch of the gradients between the parts of layers, and of those of norms.
pub(crate) fn backward_size(
    config: &TransformerLayerConfig,
    rows: &Rows,
    norm: &OwnedNorm,
    x: TensorView,
) -> ScratchSize {
    let wide = 4 * count(rows.shape(config.features())) as u64;
    let hidden = 4 * count(rows.shape(config.hidden_features)) as u64;
    let products = gate_gradient_offset(hidden) * u64::from(config.gated) + hidden;
    let size = ScratchSize::default()
        .with(Slot::StreamGradient, wide)
        .with(Slot::MiddleGradient, wide)
        .with(Slot::BranchGradient, wide)
        .with(Slot::HiddenGradient, hidden)
        .with(Slot::ProductsGradient, products);
    // Any norm's: they differ in nothing that matters here.
    size.max(norm.op(config.norm, x, None).sums_size())
}
