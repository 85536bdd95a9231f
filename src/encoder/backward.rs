//! The gradients of a stack: each layer computed once more from what the one before it gave, the last one first, then backwards
//! through its parts.

use super::{EncoderForward, EncoderLayer, Plan as ForwardPlan, TransformerEncoder};
use crate::bindings::BoundDispatch;
use crate::block::{FeedForward, OwnedNorm, Rows, Workspace, forward_size};
use crate::block_config::NormOrder;
use crate::device::DeviceFacts;
use crate::error::Error;
use crate::multi_head::{
    BackwardPlan as AttentionBackwardPlan, LayerBackward, LayerForward, LayerGradients, LinearGradients,
    Plan as AttentionPlan, joined_heads,
};
use crate::path::norm::NormGradients as NormTargets;
use crate::path::pointwise::PointwiseOp;
use crate::path::project_backward::{self, Gradient, LinearBackward};
use crate::path::{self, Dispatches, in_scratch};
use crate::projection::{OwnedLinear, check_summed_rows, check_vector, check_weight};
use crate::record::{dispatch, pass};
use crate::scratch::{Scratch, ScratchSize, Slot};
use crate::tensor::{Access, DType, TensorView, check_aliasing, check_float, count, expect_shape};

/// Where the gradients of [`NormWeights`](crate::NormWeights) go, `[features]` each: nowhere by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct NormGradients<'a> {
    /// Of the weight; F32, F16 or BF16.
    pub weight: Option<TensorView<'a>>,
    /// Of the bias; F32, F16 or BF16.
    pub bias: Option<TensorView<'a>>,
}

/// Where the gradients of [`FeedForwardWeights`](crate::FeedForwardWeights) go: nowhere by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct FeedForwardGradients<'a> {
    /// Of [`FeedForwardWeights::up`](crate::FeedForwardWeights::up).
    pub up: LinearGradients<'a>,
    /// Of [`FeedForwardWeights::gate`](crate::FeedForwardWeights::gate).
    pub gate: LinearGradients<'a>,
    /// Of [`FeedForwardWeights::down`](crate::FeedForwardWeights::down).
    pub down: LinearGradients<'a>,
}

/// Where the gradients of [`EncoderLayerWeights`](crate::EncoderLayerWeights) go: nowhere by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct EncoderLayerGradients<'a> {
    /// Of its self-attention.
    pub attention: LayerGradients<'a>,
    /// Of its feed-forward layer.
    pub feed_forward: FeedForwardGradients<'a>,
    /// Of the norms of its attention and of its feed-forward layer.
    pub norms: [NormGradients<'a>; 2],
}

/// One backward call of an encoder: the forward call as it was made, the gradient of its output, and where gradients go.
///
/// # What is kept
///
/// Of the forward call its input, and [`EncoderForward::hidden`] if it was given; else what each layer gives is computed once more,
/// and takes as much scratch. The rest of a layer is computed again when its turn comes, whose scratch does not grow with the number
/// of layers (Chen et al. 2016, "Training deep nets with sublinear memory cost").
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct EncoderBackward<'a> {
    forward: EncoderForward<'a>,
    d_out: TensorView<'a>,
    d_x: Option<TensorView<'a>>,
    d_layers: &'a [EncoderLayerGradients<'a>],
    d_final_norm: NormGradients<'a>,
    accumulate: bool,
}

impl<'a> EncoderBackward<'a> {
    /// `forward` as it was made, whose `out` and weights are not read, and the gradient of that, shaped as it, of the stack's dtype.
    pub fn new(forward: EncoderForward<'a>, d_out: TensorView<'a>) -> Self {
        let d_final_norm = NormGradients::default();
        let forward = EncoderForward { weights: None, ..forward };
        EncoderBackward { forward, d_out, d_x: None, d_layers: &[], d_final_norm, accumulate: false }
    }

    /// Writes the gradient of `x` there, shaped as that, F32, F16 or BF16.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_x = d_x.into();
        self
    }

    /// Writes the gradients of the layers' weights there: one entry for each layer, or none.
    pub fn d_layers(mut self, d_layers: &'a [EncoderLayerGradients<'a>]) -> Self {
        self.d_layers = d_layers;
        self
    }

    /// Writes the gradients of the final norm's weights there.
    pub fn d_final_norm(mut self, d_final_norm: NormGradients<'a>) -> Self {
        self.d_final_norm = d_final_norm;
        self
    }

    /// Adds the gradients to what is there instead of writing over it, each rounded to its type: choose F32 for many.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }

    fn gradient(&self, view: Option<TensorView<'a>>) -> Option<Gradient<'a>> {
        view.map(|view| Gradient { view, accumulates: self.accumulate })
    }
}

/// A checked backward call.
struct Plan {
    rows: Rows,
    /// Of all layers once more, where the forward pass has not kept what they give.
    forward: AttentionPlan,
    /// Of one layer, whose attention's results are kept until its gradients are done.
    again: AttentionPlan,
    /// Of its gradients; one for each layer, of whose weights others may be wanted.
    attention: Vec<AttentionBackwardPlan>,
    size: ScratchSize,
}

/// Where the attention of the layer in turn keeps its results.
fn kept<'a>(
    plan: &AttentionPlan,
    dtype: DType,
    part: impl Fn(Slot) -> &'a wgpu::Buffer,
) -> [TensorView<'a>; 2] {
    let context = in_scratch(part(Slot::Context), dtype, joined_heads(&plan.shape), 0);
    [context, in_scratch(part(Slot::Lse), DType::F32, plan.shape.lse(), 0)]
}

/// The tensors of a layer's backward pass.
struct Turn<'a> {
    /// What the layer takes.
    x: TensorView<'a>,
    /// The gradient of what it gives.
    d: TensorView<'a>,
    gradients: EncoderLayerGradients<'a>,
    accumulates: bool,
    forward: EncoderForward<'a>,
}

impl TransformerEncoder {
    /// The temporary memory that `call` needs. It grows with the number of layers only by what they give, and only where the forward
    /// call has not kept that ([`EncoderForward::hidden`]).
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &EncoderBackward) -> Result<ScratchSize, Error> {
        Ok(self.check_backward(call, &self.pipelines.facts())?.size)
    }

    /// Records the gradients of a forward call into `encoder`, in a compute pass of their own: of its input and of all weights, in any
    /// order of norms, gated or not, under every mask. Gradients of the mask's own tensors are
    /// [`MultiHeadAttention::backward`](crate::MultiHeadAttention::backward)'s.
    ///
    /// Sums are f32, and so are gradients between the parts of layers. No atomics: the same bits every time.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors, masks, options and scratch; gradients that share a buffer with an input or overlap;
    /// [`Error::Unsupported`] if none is asked for, or that of a tensor which the stack has not. Then nothing has been recorded.
    pub fn backward(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        call: &EncoderBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let label = "transformer encoder backward";
        self.record_backward(call, scratch, |bound| dispatch(&mut pass(encoder, label), bound))
    }

    /// [`backward`](Self::backward) into a compute pass of the caller's, which is left with another pipeline and bind group 0.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_in_pass(
        &self,
        pass: &mut wgpu::ComputePass,
        call: &EncoderBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.record_backward(call, scratch, |bound| dispatch(pass, bound))
    }

    /// Compiles and binds what `call` needs, so that its first recording does neither.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &EncoderBackward, scratch: &mut Scratch) -> Result<(), Error> {
        self.record_backward(call, scratch, |_| ())
    }

    fn record_backward(
        &self,
        call: &EncoderBackward,
        scratch: &mut Scratch,
        emit: impl FnOnce(&[(BoundDispatch, [u32; 3])]),
    ) -> Result<(), Error> {
        let device = &self.pipelines.facts();
        let plan = path::within(device, |device| {
            let plan = self.check_backward(call, device)?;
            scratch.check(plan.size).map(|()| plan)
        })?;
        let scratch: &Scratch = scratch;
        let work = Workspace { config: &self.config, rows: plan.rows, scratch, tuning: &self.tuning, device };
        let dispatches = self.backward_dispatches(call, &work, &plan)?;
        let bound = self.pipelines.bind(&dispatches, scratch.bindings())?;
        emit(&bound);
        Ok(())
    }

    fn backward_dispatches<'a>(
        &'a self,
        call: &EncoderBackward<'a>,
        work: &Workspace<'a>,
        plan: &Plan,
    ) -> Result<Dispatches<'a>, Error> {
        let mut dispatches = Dispatches::new();
        let mut forward = call.forward;
        if forward.hidden.is_none() && self.hidden_len() > 0 {
            let shape = self.hidden_shape(&plan.rows);
            let hidden =
                in_scratch(work.scratch.buffer(Slot::BlockOutputs)?, self.config.attention.dtype, shape, 0);
            forward = EncoderForward { out: work.features(Slot::Stream)?, hidden: Some(hidden), ..forward };
            dispatches.extend(self.dispatches(&forward, work, &plan.forward)?);
        }
        let features = self.config.features();
        let mut d = call.d_out;
        if let Some(norm) = &self.final_norm {
            let x = self.given(self.layers.len() - 1, &forward, work)?;
            let d_x = work.gradient(Slot::StreamGradient, features)?;
            let targets = NormTargets {
                d_out: d,
                d_sum: None,
                d_x: Some(Gradient { view: d_x, accumulates: false }),
                d_weight: call.gradient(call.d_final_norm.weight),
                d_bias: call.gradient(call.d_final_norm.bias),
            };
            let op = norm.op(self.config.norm, x, None);
            dispatches.extend(op.backward(&targets, work.scratch, work.tuning, work.device)?);
            d = d_x;
        }
        for (n, layer) in self.layers.iter().enumerate().rev() {
            let x = if n == 0 { forward.x } else { self.given(n - 1, &forward, work)? };
            let gradients = call.d_layers.get(n).copied().unwrap_or_default();
            let turn = Turn { x, d, gradients, accumulates: call.accumulate, forward };
            let plans = (&plan.again, &plan.attention[n]);
            match self.config.order {
                NormOrder::Post => layer.post_backward(&turn, work, plans, &mut dispatches)?,
                NormOrder::Pre => layer.pre_backward(&turn, work, plans, &mut dispatches)?,
            }
            d = work.gradient(Slot::StreamGradient, features)?;
        }
        if let Some(d_x) = call.d_x {
            let copy = PointwiseOp { activation: None, x: d, times: None, plus: None };
            dispatches.push(copy.backward(d, Some(d_x), None, call.accumulate, work.device));
        }
        Ok(dispatches)
    }

    /// How many layers' outputs there is a place for.
    pub(super) fn hidden_len(&self) -> usize {
        self.layers.len() - usize::from(self.final_norm.is_none())
    }

    pub(super) fn hidden_shape(&self, rows: &Rows) -> [usize; 4] {
        let [batch, one, length, features] = rows.shape(self.config.features());
        [batch.saturating_mul(self.hidden_len()), one, length, features]
    }

    fn check_backward(&self, call: &EncoderBackward, device: &DeviceFacts) -> Result<Plan, Error> {
        let forward = &call.forward;
        let ForwardPlan { rows, attention, size } = self.check_inputs(forward, device)?;
        self.check_output("d_out", &call.d_out, forward, Access::Read, device)?;
        check_summed_rows("x", &forward.x, 1)?;
        let mut read = self.inputs(forward);
        read.push(("d_out", call.d_out));
        if let Some(hidden) = forward.hidden {
            self.check_hidden(&hidden, &rows, Access::Read, device)?;
            read.push(("hidden", hidden));
        }
        let mut written = Vec::new();
        if let Some(d_x) = call.d_x {
            check_float("d_x", &d_x)?;
            d_x.check("d_x", Access::Write, device)?;
            expect_shape("d_x", d_x.shape(), forward.x.shape())?;
            written.push(("d_x", d_x));
        }
        let given = call.d_layers.len();
        if given != 0 && given != self.layers.len() {
            return Err(Error::Length { tensor: "d_layers", expected: self.layers.len(), got: given });
        }
        let features = self.config.features();
        for (layer, gradients) in self.layers.iter().zip(call.d_layers) {
            layer.feed_forward.check_gradients(&gradients.feed_forward, &mut written, device)?;
            for (norm, gradients) in layer.norms.iter().zip(&gradients.norms) {
                norm.check_gradients(gradients, features, &mut written, device)?;
            }
        }
        match &self.final_norm {
            Some(norm) => norm.check_gradients(&call.d_final_norm, features, &mut written, device)?,
            None if call.d_final_norm.weight.is_some() || call.d_final_norm.bias.is_some() => {
                return Err(without("d_final_norm"));
            }
            None => {}
        }
        let dtype = self.config.attention.dtype;
        // Where there is no scratch yet, any buffer stands for it: plans look at layouts.
        let [context, lse] = kept(&attention, dtype, |_| call.d_out.buffer);
        let dims = [rows.batch, rows.length, rows.length];
        let inner =
            LayerForward::self_attention(forward.x, forward.x).mask(forward.mask).context(context).lse(lse);
        let mut again = self.layers[0].attention.plan_of(&inner, dims, device)?;
        let lse_bytes = 4 * count(again.shape.lse()) as u64;
        let results = ScratchSize::default()
            .with(Slot::Context, self.layers[0].attention.context_bytes(&again.shape))
            .with(Slot::Lse, lse_bytes);
        again.size = again.size.max(results);
        let gradient = in_scratch(call.d_out.buffer, DType::F32, rows.shape(features), 0);
        let mut plans = Vec::with_capacity(self.layers.len());
        for (n, layer) in self.layers.iter().enumerate() {
            let gradients = call.d_layers.get(n).copied().unwrap_or_default();
            let inner = LayerBackward::new(inner, gradient).d_weights(gradients.attention);
            written.extend(layer.attention.written_weights(&inner));
            let inner = inner.d_query(gradient).d_key(gradient).d_value(gradient);
            plans.push(layer.attention.backward_plan_of(&inner, dims, device)?);
        }
        if written.is_empty() {
            let why = "nothing is asked for: give `d_x`, `d_layers` or `d_final_norm`";
            return Err(Error::Unsupported { what: "a backward pass without gradients", why });
        }
        check_aliasing(&written, &read)?;

        let config = &self.config;
        let mut size = size.max(again.size);
        for plan in &plans {
            size = size.max(plan.size);
        }
        let streams = [Slot::Stream, Slot::Middle, Slot::Branch, Slot::Normed];
        size = size.max(forward_size(config, &rows, true, &streams));
        let wide = 4 * count(rows.shape(features)) as u64;
        let hidden = 4 * count(rows.shape(config.hidden_features)) as u64;
        size = size.max(
            ScratchSize::default()
                .with(Slot::StreamGradient, wide)
                .with(Slot::MiddleGradient, wide)
                .with(Slot::BranchGradient, wide)
                .with(Slot::HiddenGradient, hidden)
                .with(
                    Slot::ProductsGradient,
                    gate_gradient_offset(hidden) * u64::from(config.gated) + hidden,
                ),
        );
        // Any norm's: they differ in nothing that matters here.
        let norm = self.layers[0].norms[0].op(config.norm, forward.x, None);
        size = size.max(norm.sums_size());
        if forward.hidden.is_none() && self.hidden_len() > 0 {
            let bytes = count(self.hidden_shape(&rows)) as u64 * dtype.bytes() as u64;
            size = size.max(ScratchSize::default().with(Slot::BlockOutputs, bytes.next_multiple_of(4)));
        }
        Ok(Plan { rows, forward: attention, again, attention: plans, size })
    }
}

/// Where the gradient of the gate's product begins, in bytes, after that of up's.
fn gate_gradient_offset(bytes: u64) -> u64 {
    bytes.next_multiple_of(256)
}

/// The gradient of a tensor that the stack has not.
fn without(what: &'static str) -> Error {
    Error::Unsupported { what, why: "the stack was made without it: leave its gradient out" }
}

impl OwnedNorm {
    fn check_gradients<'a>(
        &self,
        gradients: &NormGradients<'a>,
        features: usize,
        written: &mut Vec<(&'static str, TensorView<'a>)>,
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

impl FeedForward {
    fn check_gradients<'a>(
        &self,
        gradients: &FeedForwardGradients<'a>,
        written: &mut Vec<(&'static str, TensorView<'a>)>,
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

impl<'a> Turn<'a> {
    fn gradient(&self, view: Option<TensorView<'a>>) -> Option<Gradient<'a>> {
        view.map(|view| Gradient { view, accumulates: self.accumulates })
    }

    /// What the gradients of a norm go to; that of its input to `d_x`.
    fn norm(
        &self,
        n: usize,
        d_out: TensorView<'a>,
        d_sum: Option<TensorView<'a>>,
        d_x: TensorView<'a>,
    ) -> NormTargets<'a> {
        let NormGradients { weight, bias } = self.gradients.norms[n];
        NormTargets {
            d_out,
            d_sum,
            d_x: Some(Gradient { view: d_x, accumulates: false }),
            d_weight: self.gradient(weight),
            d_bias: self.gradient(bias),
        }
    }

    /// Of a product `x → y`: the gradients of `linear`, and that of x, if any.
    fn linear(
        &self,
        linear: &'a OwnedLinear,
        to: LinearGradients<'a>,
        x: TensorView<'a>,
        d_y: TensorView<'a>,
        d_x: Gradient<'a>,
    ) -> LinearBackward<'a> {
        LinearBackward {
            w: linear.weight.view(),
            d_y,
            d_x: Some(d_x),
            d_w: self.gradient(to.weight).map(|d_w| (x, d_w)),
            d_b: self.gradient(to.bias),
            narrow: false,
        }
    }
}

type Plans<'p> = (&'p AttentionPlan, &'p AttentionBackwardPlan);

impl EncoderLayer {
    /// The attention of `x`, whose results are kept, into `out`.
    fn attend_again<'a>(
        &'a self,
        turn: &Turn<'a>,
        [x, out]: [TensorView<'a>; 2],
        work: &Workspace<'a>,
        (plan, _): Plans,
    ) -> Result<(LayerForward<'a>, Dispatches<'a>), Error> {
        let [context, lse] = [work.scratch.buffer(Slot::Context)?, work.scratch.buffer(Slot::Lse)?];
        let dtype = work.config.attention.dtype;
        let [context, lse] = kept(plan, dtype, |slot| if slot == Slot::Lse { lse } else { context });
        let call = LayerForward::self_attention(x, out).mask(turn.forward.mask).context(context).lse(lse);
        let dispatches = self.attention.dispatches(&call, plan, work.scratch, work.device)?;
        Ok((call, dispatches))
    }

    /// From `d_out` of attention to the gradient of its input, `d_x`, added to what is there or not.
    fn attention_backward<'a>(
        &'a self,
        turn: &Turn<'a>,
        forward: LayerForward<'a>,
        d_out: TensorView<'a>,
        d_x: Gradient<'a>,
        work: &Workspace<'a>,
        (_, plan): Plans,
    ) -> Result<Dispatches<'a>, Error> {
        let call = LayerBackward::new(forward, d_out)
            .d_query(d_x.view)
            .d_key(d_x.view)
            .d_value(d_x.view)
            .d_weights(turn.gradients.attention)
            .accumulate(turn.accumulates)
            .inputs_accumulate(d_x.accumulates);
        self.attention.backward_dispatches(&call, plan, work.scratch, work.device)
    }

    /// From `d_out` of the feed-forward layer to the gradient of its input `x`, `d_x`, added to what is there or not.
    fn feed_backward<'a>(
        &'a self,
        turn: &Turn<'a>,
        x: TensorView<'a>,
        d_out: TensorView<'a>,
        d_x: Gradient<'a>,
        work: &Workspace<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let width = work.config.hidden_features;
        let layer = &self.feed_forward;
        let to = turn.gradients.feed_forward;
        let d_hidden = work.gradient(Slot::HiddenGradient, width)?;
        let d_up = work.gradient(Slot::ProductsGradient, width)?;
        let bytes = 4 * count(work.rows.shape(width)) as u64;
        let d_gate = d_up.with_offset((gate_gradient_offset(bytes) / 4) as usize);
        let written = Gradient { view: d_hidden, accumulates: false };
        let down = turn.linear(&layer.down, to.down, work.hidden()?, d_out, written);
        let mut dispatches = project_backward::dispatches(&[down], work.tuning, work.device)?;
        let op = work.activated(layer)?;
        dispatches.push(match &layer.gate {
            Some(_) => op.backward(d_hidden, Some(d_gate), Some(d_up), false, work.device),
            None => op.backward(d_hidden, Some(d_up), None, false, work.device),
        });
        let mut products = vec![turn.linear(&layer.up, to.up, x, d_up, d_x)];
        if let Some(gate) = &layer.gate {
            let more = Gradient { accumulates: true, ..d_x };
            products.push(turn.linear(gate, to.gate, x, d_gate, more));
        }
        dispatches.extend(project_backward::dispatches(&products, work.tuning, work.device)?);
        Ok(dispatches)
    }

    /// Of `middle = norm(x + attention(x))`, `norm(middle + feed_forward(middle))`; d_x goes to the stream's gradient.
    fn post_backward<'a>(
        &'a self,
        turn: &Turn<'a>,
        work: &Workspace<'a>,
        plans: Plans,
        dispatches: &mut Dispatches<'a>,
    ) -> Result<(), Error> {
        let x = turn.x;
        let [middle, branch] = [work.features(Slot::Middle)?, work.features(Slot::Branch)?];
        let fed = work.features(Slot::Normed)?;
        let (attended, again) = self.attend_again(turn, [x, branch], work, plans)?;
        dispatches.extend(again);
        dispatches.push(work.norm(&self.norms[0], x, Some(branch), middle, None));
        dispatches.extend(work.feed_forward(&self.feed_forward, middle, fed, true)?);

        let features = work.config.features();
        let d_middle = work.gradient(Slot::MiddleGradient, features)?;
        let d_x = work.gradient(Slot::StreamGradient, features)?;
        let second = self.norms[1].op(work.config.norm, middle, Some(fed));
        let targets = turn.norm(1, turn.d, None, d_middle);
        dispatches.extend(second.backward(&targets, work.scratch, work.tuning, work.device)?);
        let more = Gradient { view: d_middle, accumulates: true };
        dispatches.extend(self.feed_backward(turn, middle, d_middle, more, work)?);
        let first = self.norms[0].op(work.config.norm, x, Some(branch));
        let targets = turn.norm(0, d_middle, None, d_x);
        dispatches.extend(first.backward(&targets, work.scratch, work.tuning, work.device)?);
        let more = Gradient { view: d_x, accumulates: true };
        dispatches.extend(self.attention_backward(turn, attended, d_x, more, work, plans)?);
        Ok(())
    }

    /// Of `middle = x + attention(norm(x))`, `middle + feed_forward(norm(middle))`; d_x goes to the stream's gradient.
    fn pre_backward<'a>(
        &'a self,
        turn: &Turn<'a>,
        work: &Workspace<'a>,
        plans: Plans,
        dispatches: &mut Dispatches<'a>,
    ) -> Result<(), Error> {
        let x = turn.x;
        let [normed, branch] = [work.features(Slot::Normed)?, work.features(Slot::Branch)?];
        // What goes into the feed-forward layer, which gives nothing that is needed.
        let [fed, unused] = [work.features(Slot::Middle)?, work.features(Slot::Stream)?];
        dispatches.push(work.norm(&self.norms[0], x, None, normed, None));
        let (attended, again) = self.attend_again(turn, [normed, branch], work, plans)?;
        dispatches.extend(again);
        dispatches.push(work.norm(&self.norms[1], x, Some(branch), fed, None));
        dispatches.extend(work.feed_forward(&self.feed_forward, fed, unused, true)?);

        let features = work.config.features();
        let d_branch = work.gradient(Slot::BranchGradient, features)?;
        let d_middle = work.gradient(Slot::MiddleGradient, features)?;
        let d_x = work.gradient(Slot::StreamGradient, features)?;
        let written = Gradient { view: d_branch, accumulates: false };
        dispatches.extend(self.feed_backward(turn, fed, turn.d, written, work)?);
        let second = self.norms[1].op(work.config.norm, x, Some(branch));
        let targets = turn.norm(1, d_branch, Some(turn.d), d_middle);
        dispatches.extend(second.backward(&targets, work.scratch, work.tuning, work.device)?);
        dispatches.extend(self.attention_backward(turn, attended, d_middle, written, work, plans)?);
        let first = self.norms[0].op(work.config.norm, x, None);
        let targets = turn.norm(0, d_branch, Some(d_middle), d_x);
        dispatches.extend(first.backward(&targets, work.scratch, work.tuning, work.device)?);
        Ok(())
    }
}
