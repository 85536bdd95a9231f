//! The gradients of a stack, from its last layer to its first. Each layer is computed again from
//! its input. Then the gradients go backwards through its parts.

use super::attention_part::{AttentionPart, AttentionPlans, InputGradients};
use super::call::StackForward;
use super::config::NormOrder;
use super::feed_forward::FeedForwardGradients;
use super::forward::Plan as ForwardPlan;
use super::gradients::{WrittenGradients, check_final_gradients, check_input_gradient};
use super::hidden::Hidden;
use super::memory::MemoryCall;
use super::self_attention::check_no_cache;
use super::shared_keys::KeysTurn;
use super::workspace::{Workspace, backward_size, check_rows_of, forward_size};
use super::{Layer, Stack};
use crate::attention::dispatch;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Prepared, Scratch, ScratchSize, Slot, in_scratch};
use crate::layers::multi_head::{MultiHeadForward, MultiHeadGradients};
use crate::layers::{DecoderLayerGradients, EncoderLayerGradients};
use crate::matmul::projection::check_summed_rows;
use crate::matmul::projection::dispatch_backward::Gradient;
use crate::rows::norm::NormGradients;
use crate::tensor::{Access, DType, Error, TensorView, check_aliasing, count, expect, expect_shape};

/// Inputs of the parts of a layer. With norms after each sum, the first part's input is the layer's
/// input instead.
const INPUTS: [Slot; 3] = [Slot::Normed, Slot::Stream, Slot::Fed];
/// Results of the parts with norms after each sum. With norms before each part, all parts use the
/// first slot in turn.
const RESULTS: [Slot; 3] = [Slot::Branch, Slot::Normed, Slot::Middle];
/// Gradients of the inputs of the parts with norms after each sum.
const GRADIENTS: [Slot; 3] = [Slot::StreamGradient, Slot::MiddleGradient, Slot::BranchGradient];

/// Places for the gradients of a layer's weights.
#[derive(Clone, Copy, Default)]
struct LayerGradients<'a> {
    attention: MultiHeadGradients<'a>,
    /// Gradients of attention to a memory.
    cross: MultiHeadGradients<'a>,
    feed_forward: FeedForwardGradients<'a>,
    /// Gradients of the norm of each part.
    norms: [NormGradients<'a>; 3],
}

/// Places for the gradients of all layers' weights: one entry for each layer, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LayersGradients<'a> {
    Encoder(&'a [EncoderLayerGradients<'a>]),
    Decoder(&'a [DecoderLayerGradients<'a>]),
}

impl<'a> LayersGradients<'a> {
    fn len(&self) -> usize {
        match self {
            LayersGradients::Encoder(layers) => layers.len(),
            LayersGradients::Decoder(layers) => layers.len(),
        }
    }

    /// The places of layer `n`, if it has any.
    fn layer(&self, n: usize) -> LayerGradients<'a> {
        let layer = match self {
            LayersGradients::Encoder(layers) => layers.get(n).map(|layer| {
                let EncoderLayerGradients { attention, feed_forward, norms: [first, last] } = *layer;
                let norms = [first, last, NormGradients::default()];
                LayerGradients { attention, cross: MultiHeadGradients::default(), feed_forward, norms }
            }),
            LayersGradients::Decoder(layers) => layers.get(n).map(|layer| {
                let DecoderLayerGradients { self_attention, cross_attention: cross, feed_forward, norms } =
                    *layer;
                LayerGradients { attention: self_attention, cross, feed_forward, norms }
            }),
        };
        layer.unwrap_or_default()
    }
}

/// One backward call of a stack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StackBackward<'a> {
    pub forward: StackForward<'a>,
    pub d_out: TensorView<'a>,
    pub d_x: Option<TensorView<'a>>,
    pub d_memory: Option<TensorView<'a>>,
    pub d_layers: LayersGradients<'a>,
    pub d_final_norm: NormGradients<'a>,
    pub accumulate: bool,
}

impl<'a> StackBackward<'a> {
    pub fn new(forward: StackForward<'a>, d_out: TensorView<'a>, d_layers: LayersGradients<'a>) -> Self {
        let d_final_norm = NormGradients::default();
        let forward = StackForward { weights: None, ..forward };
        StackBackward { forward, d_out, d_x: None, d_memory: None, d_layers, d_final_norm, accumulate: false }
    }
}

/// A checked backward call.
struct Plan<'a> {
    /// The forward call, which is computed again if it has not stored the layers' outputs.
    forward: ForwardPlan<'a>,
    /// The self-attention of each layer, and its attention to a memory.
    attention: Vec<(AttentionPlans, Option<AttentionPlans>)>,
    size: ScratchSize,
}

impl Stack {
    /// The temporary memory that `call` needs.
    pub fn backward_scratch_size(&self, call: &StackBackward) -> Result<ScratchSize, Error> {
        Ok(self.check_backward(call, &self.pipelines.facts())?.size)
    }

    /// Checks `call`, compiles its pipelines and binds its tensors.
    pub fn prepare_backward(
        &self,
        label: &'static str,
        call: &StackBackward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let plan = dispatch::within(device, |device| {
            let plan = self.check_backward(call, device)?;
            scratch.check(plan.size).map(|()| plan)
        })?;
        let (config, rows, kernel_options) = (&self.config, plan.forward.rows, &self.kernel_options);
        let work = Workspace { config, rows, scratch, kernel_options, device, accumulates: call.accumulate };
        self.pipelines.bind(label, &self.backward_dispatches(call, &work, &plan)?, scratch.bindings())
    }

    fn backward_dispatches<'a>(
        &'a self,
        call: &StackBackward<'a>,
        work: &Workspace<'a>,
        plan: &Plan<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let mut dispatches = Dispatches::new();
        let mut forward = call.forward;
        let hidden = Hidden::of(self, &work.rows);
        if forward.hidden.is_none() && hidden.layers > 0 {
            // Only `hidden` is needed from this pass. Its scratch is separate from the forward
            // pass's scratch.
            let (out, hidden) = (work.features(self.last_input())?, Some(hidden.in_scratch(work)?));
            forward = StackForward { out, hidden, ..forward };
            dispatches.extend(self.dispatches(&forward, work, &plan.forward)?);
        }
        let input = |n: usize| match forward.hidden {
            Some(hidden) if n > 0 => work.given(hidden, n - 1),
            // Without `hidden` there is one layer and no final norm: no later input is read.
            _ => forward.x,
        };
        let stream = work.gradient(Slot::StreamGradient, self.config.features())?;
        let mut d = call.d_out;
        if let Some(norm) = &self.final_norm {
            let (norm, x) = ((norm, call.d_final_norm), input(self.layers.len()));
            dispatches.extend(work.norm_backward(norm, (x, None), [d, stream], None)?);
            d = stream;
        }
        let memory = forward.memory.as_ref().and_then(|memory| memory.rows).zip(call.d_memory);
        let memory = memory.map(|(memory, d_memory)| {
            let buffer = work.scratch.buffer(Slot::MemoryGradient)?;
            Ok((in_scratch(buffer, DType::F32, memory.shape(), 0), d_memory))
        });
        let memory = memory.transpose()?;
        for (n, layer) in self.layers.iter().enumerate().rev() {
            let of_keys = |n: usize| (input(n), &self.layers[n].norms[0]);
            let (attention, cross) = &plan.attention[n];
            let d_memory = memory.map(|(view, _)| Gradient { view, accumulates: n + 1 < self.layers.len() });
            let cross = self.cross_part(n, &call.d_layers).zip(cross.as_ref()).zip(forward.memory.as_ref());
            let cross = cross.map(|((part, plans), memory)| CrossTurn { part, plans, memory, d_memory });
            let mut turn = Turn {
                n,
                layer,
                forward: &forward,
                attention: (self.attention_part(n, &call.d_layers)?, attention),
                keys: self.shared.turn(n, of_keys, work, &mut dispatches)?,
                cross: cross.as_ref(),
                gradients: call.d_layers.layer(n),
                work,
                dispatches: &mut dispatches,
            };
            d = match self.config.order {
                NormOrder::Post => turn.post(0, input(n), d)?,
                NormOrder::Pre => turn.pre(0, (input(n), None), d)?,
            };
        }
        dispatches.extend(call.d_x.map(|d_x| work.hand_over(d, d_x)));
        dispatches.extend(memory.map(|(d, d_memory)| work.hand_over(d, d_memory)));
        Ok(dispatches)
    }

    /// The slot with the input of a layer's last part.
    fn last_input(&self) -> Slot {
        INPUTS[if self.layers[0].cross.is_some() { 2 } else { 1 }]
    }

    fn check_backward<'a>(
        &'a self,
        call: &StackBackward<'a>,
        device: &DeviceFacts,
    ) -> Result<Plan<'a>, Error> {
        let StackBackward { forward, d_out, d_x, d_memory, d_layers, d_final_norm, .. } = call;
        check_no_cache(forward.cache)?;
        let plan = self.check_inputs(forward, device)?;
        let (rows, mut size) = (plan.rows, plan.size);
        check_rows_of("d_out", d_out, &self.config.attention, Access::Read, device)?;
        expect_shape("d_out", d_out.shape(), forward.x.shape())?;
        let mut memory_len = 0;
        let memory = forward.memory.as_ref().and_then(|memory| Some((memory, memory.rows?)));
        if let Some((call, memory)) = &memory {
            memory_len = self.check_rows("memory", memory, device)?.length;
            expect("memory", memory.shape(), 0, rows.batch)?;
            expect("memory", memory.shape(), 2, self.memory_len(&call.projected)?)?;
        }
        check_summed_rows("x", &forward.x, 1)?;
        let mut read = self.inputs(forward);
        read.push(("d_out", *d_out));
        if let Some((_, memory)) = memory {
            check_summed_rows("memory", &memory, 1)?;
            read.push(("memory", memory));
        }
        let hidden = Hidden::of(self, &rows);
        match forward.hidden {
            Some(kept) => {
                hidden.check(&kept, &self.config, Access::Read, device)?;
                read.push(("hidden", kept));
            }
            None => size = size.with(Slot::BlockOutputs, hidden.bytes(&self.config)),
        }
        let mut written = WrittenGradients::new();
        check_input_gradient("d_x", *d_x, &forward.x, &mut written, device)?;
        if let Some((_, memory)) = &memory {
            check_input_gradient("d_memory", *d_memory, memory, &mut written, device)?;
        }
        let (given, layers) = (d_layers.len(), self.layers.len());
        if given != 0 && given != layers {
            return Err(Error::Length { tensor: "d_layers", expected: layers, got: given });
        }
        let features = self.config.features();
        for (n, layer) in self.layers.iter().enumerate() {
            let LayerGradients { feed_forward, norms, .. } = d_layers.layer(n);
            layer.feed_forward.check_gradients(&feed_forward, &mut written, device)?;
            for (norm, gradients) in layer.norms.iter().zip(&norms) {
                norm.check_gradients(gradients, features, &mut written, device)?;
            }
        }
        check_final_gradients(self.final_norm.as_ref(), d_final_norm, features, &mut written, device)?;
        let stand_in = in_scratch(d_out.buffer, DType::F32, rows.shape(features), 0);
        let mut attention = Vec::with_capacity(layers);
        for n in 0..layers {
            let mut plan = |part: AttentionPart<'a>, call, wants_keys, kv_len| {
                let dims = [rows.batch, rows.length, kv_len];
                part.plan(call, (stand_in, wants_keys), dims, &mut written, device)
            };
            let x = [forward.x; 2];
            let own = plan(self.attention_part(n, d_layers)?, forward.attention(n, x), true, rows.length)?;
            size = size.max(own.size);
            let mut cross = None;
            if let Some((part, memory)) = self.cross_part(n, d_layers).zip(forward.memory.as_ref()) {
                let plans = plan(part, memory.attention(n, x), d_memory.is_some(), memory_len)?;
                size = size.max(plans.size);
                cross = Some(plans);
            }
            attention.push((own, cross));
        }
        if written.is_empty() {
            let why = match memory {
                Some(_) => "no gradient is requested; set `d_x`, `d_memory`, `d_layers` or `d_final_norm`",
                None => "no gradient is requested; set `d_x`, `d_layers` or `d_final_norm`",
            };
            return Err(Error::Unsupported { what: "the backward pass", why });
        }
        check_aliasing(&written, &read, device)?;
        let streams = [Slot::Middle, Slot::Branch, Slot::Normed, Slot::Stream, self.last_input()];
        size = size.max(forward_size(&self.config, &rows, true, streams));
        size = size.max(backward_size(&self.config, &rows, &self.layers[0].norms[0], forward.x));
        size = size.max(self.shared.backward_size(&self.config, &rows));
        if let Some((_, memory)) = memory.filter(|_| d_memory.is_some()) {
            size = size.with(Slot::MemoryGradient, 4 * count(memory.shape()) as u64);
        }
        Ok(Plan { forward: plan, attention, size })
    }

    /// The self-attention of layer `n`, with the places of its weights' gradients.
    fn attention_part<'a>(
        &'a self,
        n: usize,
        d_layers: &LayersGradients<'a>,
    ) -> Result<AttentionPart<'a>, Error> {
        let of = (&self.layers[n].attention, [Slot::Context, Slot::Lse]);
        self.shared.part(n, of, |n| d_layers.layer(n).attention)
    }

    /// The attention of layer `n` to a memory.
    fn cross_part<'a>(&'a self, n: usize, d_layers: &LayersGradients<'a>) -> Option<AttentionPart<'a>> {
        let layer = self.layers[n].cross.as_ref()?;
        Some(AttentionPart::new(layer, d_layers.layer(n).cross, [Slot::MemoryContext, Slot::MemoryLse]))
    }
}

/// The backward pass of one layer.
struct Turn<'t, 'a> {
    n: usize,
    layer: &'a Layer,
    forward: &'t StackForward<'a>,
    attention: (AttentionPart<'a>, &'t AttentionPlans),
    keys: KeysTurn<'a>,
    cross: Option<&'t CrossTurn<'t, 'a>>,
    gradients: LayerGradients<'a>,
    work: &'t Workspace<'a>,
    dispatches: &'t mut Dispatches<'a>,
}

/// The attention of a layer to a memory.
struct CrossTurn<'t, 'a> {
    part: AttentionPart<'a>,
    plans: &'t AttentionPlans,
    memory: &'t MemoryCall<'a>,
    /// The gradient of the memory, if it is wanted. Later layers have already added their parts.
    d_memory: Option<Gradient<'a>>,
}

/// A part of a layer that was computed again.
enum Again<'t, 'a> {
    Attention(MultiHeadForward<'a>),
    Cross(&'t CrossTurn<'t, 'a>, MultiHeadForward<'a>),
    FeedForward,
}

impl<'t, 'a> Turn<'t, 'a> {
    /// Computes `x = norm(x + f(x))` again from part `i` on, then goes backwards through these
    /// parts. Returns the gradient of `x`, from the gradient `d` of the layer's output.
    fn post(&mut self, i: usize, x: TensorView<'a>, d: TensorView<'a>) -> Result<TensorView<'a>, Error> {
        let (work, norms) = (self.work, &self.layer.norms);
        let result = work.features(RESULTS[i])?;
        let again = self.again(i, [x, result])?;
        let mut d = d;
        if i + 1 < norms.len() {
            let next = work.features(INPUTS[i + 1])?;
            self.dispatches.push(work.norm(&norms[i], x, Some(result), next, None));
            d = self.post(i + 1, next, d)?;
        }
        let d_x = work.gradient(GRADIENTS[i], work.config.features())?;
        let norm = (&norms[i], self.gradients.norms[i]);
        self.dispatches.extend(work.norm_backward(norm, (x, Some(result)), [d, d_x], None)?);
        self.backward(again, [x, d_x], Gradient { view: d_x, accumulates: true })?;
        Ok(d_x)
    }

    /// As [`post`](Self::post), for `x = x + f(norm(x))`. The input of part `i` is the sum of `x`
    /// and `more`.
    fn pre(
        &mut self,
        i: usize,
        (x, more): (TensorView<'a>, Option<TensorView<'a>>),
        d: TensorView<'a>,
    ) -> Result<TensorView<'a>, Error> {
        let (work, norms) = (self.work, &self.layer.norms);
        let [input, result] = [work.features(INPUTS[i])?, work.features(RESULTS[0])?];
        let last = i + 1 == norms.len();
        // The next result overwrites the second part of this sum.
        let sum = more.filter(|_| !last).map(|_| work.features(Slot::Middle)).transpose()?;
        self.dispatches.push(work.norm(&norms[i], x, more, input, sum));
        let (x, more) = sum.map_or((x, more), |sum| (sum, None));
        let again = self.again(i, [input, result])?;
        let d = if last { d } else { self.pre(i + 1, (x, Some(result)), d)? };
        let features = work.config.features();
        let d_input = work.gradient(Slot::BranchGradient, features)?;
        let d_x = work.gradient(GRADIENTS[i.min(1)], features)?;
        self.backward(again, [input, d], Gradient { view: d_input, accumulates: false })?;
        let norm = (&norms[i], self.gradients.norms[i]);
        self.dispatches.extend(work.norm_backward(norm, (x, more), [d_input, d_x], Some(d))?);
        Ok(d_x)
    }

    /// Computes part `i` of `x` again, into `out`.
    fn again(&mut self, i: usize, [x, out]: [TensorView<'a>; 2]) -> Result<Again<'t, 'a>, Error> {
        let (work, dispatches) = (self.work, &mut *self.dispatches);
        Ok(match (i, self.cross) {
            (0, _) => {
                let (part, plans) = &self.attention;
                let call = self.keys.call(self.forward.attention(self.n, [x, out]));
                Again::Attention(part.again(call, plans, work, dispatches)?)
            }
            (1, Some(cross)) => {
                let call = cross.memory.attention(self.n, [x, out]);
                Again::Cross(cross, cross.part.again(call, cross.plans, work, dispatches)?)
            }
            _ => {
                dispatches.extend(match work.config.order {
                    NormOrder::Post => work.feed_forward(&self.layer.feed_forward, x, out, true)?,
                    NormOrder::Pre => work.feed_hidden(&self.layer.feed_forward, x, true)?,
                });
                Again::FeedForward
            }
        })
    }

    /// Computes the gradient of `x` and of the weights, from the gradient `d` of a part's output.
    fn backward(
        &mut self,
        again: Again<'t, 'a>,
        [x, d]: [TensorView<'a>; 2],
        d_x: Gradient<'a>,
    ) -> Result<(), Error> {
        let (work, dispatches) = (self.work, &mut *self.dispatches);
        match again {
            Again::Attention(call) => {
                let (part, plans) = &self.attention;
                let d_inputs = InputGradients { queries: d_x, keys: Some(self.keys.gradient(d_x)) };
                dispatches.extend(part.backward(call, d, d_inputs, plans, work)?);
                dispatches.extend(self.keys.add_to(d_x.view, work));
            }
            Again::Cross(CrossTurn { part, plans, d_memory, .. }, call) => {
                let d_inputs = InputGradients { queries: d_x, keys: *d_memory };
                dispatches.extend(part.backward(call, d, d_inputs, plans, work)?);
            }
            Again::FeedForward => {
                let feed = (&self.layer.feed_forward, self.gradients.feed_forward);
                dispatches.extend(work.feed_backward(feed, [x, d], d_x)?);
            }
        }
        Ok(())
    }
}
