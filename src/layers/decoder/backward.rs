//! The gradients of a stack: each layer computed once more from what the one before it gave, the last one first, then backwards
//! through its parts.

use super::{DecoderForward, DecoderLayer, Plan as ForwardPlan, TransformerDecoder};
use crate::attention::dispatch;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Prepared, Recorder, Scratch, ScratchSize, Slot, in_scratch};
use crate::layers::block::config::NormOrder;
use crate::layers::block::{
    AttentionPart, AttentionPlans, FeedForwardGradients, InputGradients, KeysTurn, Workspace,
    WrittenGradients, backward_size, check_final_gradients, check_input_gradient, check_no_cache,
    forward_size,
};
use crate::layers::multi_head::MultiHeadGradients;
use crate::matmul::projection::check_summed_rows;
use crate::matmul::projection::dispatch_backward::Gradient;
use crate::rows::norm::{NormGradients, OwnedNorm};
use crate::tensor::{Access, DType, Error, TensorView, check_aliasing, count, expect, expect_shape};

/// Where the gradients of [`DecoderLayerWeights`](crate::layers::DecoderLayerWeights) go: nowhere by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct DecoderLayerGradients<'a> {
    /// Of its self-attention.
    pub self_attention: MultiHeadGradients<'a>,
    /// Of its attention to the memory.
    pub cross_attention: MultiHeadGradients<'a>,
    /// Of its feed-forward layer.
    pub feed_forward: FeedForwardGradients<'a>,
    /// Of the norms of self-attention, of cross-attention and of the feed-forward layer.
    pub norms: [NormGradients<'a>; 3],
}

/// One backward call of a decoder: the forward call as it was made, without a cache; the memory that its keys and values are of; the
/// gradient of its output; and where gradients go.
///
/// # What is kept
///
/// Of the forward call its input, the memory, its keys and values as [`TransformerDecoder::project_memory`] has written them, and
/// [`DecoderForward::hidden`] if it was given; else what each layer gives is computed once more, and takes as much scratch. The rest of
/// a layer is computed again when its turn comes, whose scratch does not grow with the number of layers (Chen et al. 2016, "Training
/// deep nets with sublinear memory cost").
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct DecoderBackward<'a> {
    forward: DecoderForward<'a>,
    memory: TensorView<'a>,
    d_out: TensorView<'a>,
    d_x: Option<TensorView<'a>>,
    d_memory: Option<TensorView<'a>>,
    d_layers: &'a [DecoderLayerGradients<'a>],
    d_final_norm: NormGradients<'a>,
    accumulate: bool,
}

impl<'a> DecoderBackward<'a> {
    /// `forward` as it was made, whose `out` is not read; the `memory` that was projected for it, `[batch, 1, memory_len, features]`;
    /// and the gradient of `out`, shaped as that. All are of the stack's dtype.
    pub fn new(forward: DecoderForward<'a>, memory: TensorView<'a>, d_out: TensorView<'a>) -> Self {
        DecoderBackward {
            forward,
            memory,
            d_out,
            d_x: None,
            d_memory: None,
            d_layers: &[],
            d_final_norm: NormGradients::default(),
            accumulate: false,
        }
    }

    /// Writes the gradient of `x` there, shaped as that, F32, F16 or BF16.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_x = d_x.into();
        self
    }

    /// Writes the gradient of the memory there, through the keys and values of all layers, shaped as `memory`, F32, F16 or BF16.
    pub fn d_memory(mut self, d_memory: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_memory = d_memory.into();
        self
    }

    /// Writes the gradients of the layers' weights there: one entry for each layer, or none.
    pub fn d_layers(mut self, d_layers: &'a [DecoderLayerGradients<'a>]) -> Self {
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
}

/// A checked backward call.
struct Plan<'a> {
    /// Of all layers once more, where the forward pass has not kept what they give.
    forward: ForwardPlan<'a>,
    /// Of self-attention and of attention to the memory, of each layer in turn.
    attention: Vec<[AttentionPlans; 2]>,
    size: ScratchSize,
}

/// The tensors of a layer's backward pass.
struct Turn<'a> {
    /// Which layer it is.
    n: usize,
    /// Its attention to itself, and to the memory.
    attention: [AttentionPart<'a>; 2],
    keys: KeysTurn<'a>,
    /// What the layer takes.
    x: TensorView<'a>,
    memory: TensorView<'a>,
    /// The gradient of what it gives.
    d: TensorView<'a>,
    /// The gradient of the memory, if it is wanted, to which those of earlier turns are there.
    d_memory: Option<Gradient<'a>>,
    gradients: DecoderLayerGradients<'a>,
    forward: DecoderForward<'a>,
}

impl TransformerDecoder {
    /// The temporary memory that `call` needs. It grows with the number of layers only by what they give, and only where the forward
    /// call has not kept that ([`DecoderForward::hidden`]).
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &DecoderBackward) -> Result<ScratchSize, Error> {
        Ok(self.check_backward(call, &self.pipelines.facts())?.size)
    }

    /// Records the gradients of a forward call into an encoder or a pass: of its input, of the memory and of all
    /// weights, those of the memory's keys and values too; in any order of norms, gated or not, under every mask. Gradients of the masks'
    /// own tensors are [`MultiHeadAttention::backward`](crate::MultiHeadAttention::backward)'s.
    ///
    /// Sums are f32, and so are gradients between the parts of layers. No atomics: the same bits every time.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors, masks, options and scratch; gradients that share a buffer with an input or overlap;
    /// [`Error::Unsupported`] if none is asked for, or that of a tensor which the stack has not, and for a forward call with a cache.
    /// Then nothing has been recorded.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &DecoderBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as often as you like.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &DecoderBackward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let plan = dispatch::within(device, |device| {
            let plan = self.check_backward(call, device)?;
            scratch.check(plan.size).map(|()| plan)
        })?;
        let scratch: &Scratch = scratch;
        let (config, rows, kernel_options) = (&self.config, plan.forward.rows, &self.kernel_options);
        let work = Workspace { config, rows, scratch, kernel_options, device, accumulates: call.accumulate };
        let dispatches = self.backward_dispatches(call, &work, &plan)?;
        self.pipelines.bind("transformer decoder backward", &dispatches, scratch.bindings())
    }

    fn backward_dispatches<'a>(
        &'a self,
        call: &DecoderBackward<'a>,
        work: &Workspace<'a>,
        plan: &Plan<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let DecoderBackward { mut forward, memory, d_out, .. } = *call;
        let mut dispatches = Dispatches::new();
        let hidden = self.hidden(&work.rows);
        if forward.hidden.is_none() && hidden.layers > 0 {
            // Nothing else of it is needed; that part of the scratch is not the forward pass's.
            let (out, hidden) = (work.features(Slot::Fed)?, Some(hidden.in_scratch(work)?));
            forward = DecoderForward { out, hidden, ..forward };
            dispatches.extend(self.dispatches(&forward, work, &plan.forward)?);
        }
        let given = |n: usize| match forward.hidden {
            Some(hidden) => work.given(hidden, n),
            // Of one layer without a final norm nothing is asked for.
            None => forward.x,
        };
        let stream = work.gradient(Slot::StreamGradient, self.config.features())?;
        let mut d = d_out;
        if let Some(norm) = &self.final_norm {
            let (norm, x) = ((norm, call.d_final_norm), given(self.layers.len() - 1));
            dispatches.extend(work.norm_backward(norm, (x, None), [d, stream], None)?);
            d = stream;
        }
        let of_memory = match call.d_memory {
            Some(_) => {
                let buffer = work.scratch.buffer(Slot::MemoryGradient)?;
                Some(in_scratch(buffer, DType::F32, memory.shape(), 0))
            }
            None => None,
        };
        for (n, layer) in self.layers.iter().enumerate().rev() {
            let input = |n: usize| if n == 0 { forward.x } else { given(n - 1) };
            let gradients = call.d_layers.get(n).copied().unwrap_or_default();
            let attention = self.attention_parts(n, call.d_layers)?;
            let of_keys = |n: usize| Ok((input(n), &self.layers[n].norms[0]));
            let keys = self.shared.turn(n, of_keys, work, &mut dispatches)?;
            let accumulates = n + 1 < self.layers.len();
            let d_memory = of_memory.map(|view| Gradient { view, accumulates });
            let turn = Turn { n, attention, keys, x: input(n), memory, d, d_memory, gradients, forward };
            match self.config.order {
                NormOrder::Post => layer.post_backward(&turn, work, &plan.attention[n], &mut dispatches)?,
                NormOrder::Pre => layer.pre_backward(&turn, work, &plan.attention[n], &mut dispatches)?,
            }
            d = stream;
        }
        dispatches.extend(call.d_x.map(|d_x| work.hand_over(d, d_x)));
        let to_memory = of_memory.zip(call.d_memory);
        dispatches.extend(to_memory.map(|(d, d_memory)| work.hand_over(d, d_memory)));
        Ok(dispatches)
    }

    fn check_backward<'a>(
        &self,
        call: &DecoderBackward<'a>,
        device: &DeviceFacts,
    ) -> Result<Plan<'a>, Error> {
        let DecoderBackward { forward, memory, d_out, d_x, d_memory, d_layers, d_final_norm, .. } = call;
        check_no_cache(forward.cache)?;
        let plan = self.check_inputs(forward, device)?;
        let (rows, mut size) = (plan.rows, plan.size);
        self.check_rows("d_out", d_out, device)?;
        expect_shape("d_out", d_out.shape(), forward.x.shape())?;
        let memory_rows = self.check_rows("memory", memory, device)?;
        expect("memory", memory.shape(), 0, rows.batch)?;
        expect("memory", memory.shape(), 2, self.memory_len(&forward.memory)?)?;
        check_summed_rows("x", &forward.x, 1)?;
        check_summed_rows("memory", memory, 1)?;
        let mut read = self.inputs(forward);
        read.extend([("d_out", *d_out), ("memory", *memory)]);
        let hidden = self.hidden(&rows);
        match forward.hidden {
            Some(kept) => {
                hidden.check(&kept, &self.config, Access::Read, device)?;
                read.push(("hidden", kept));
            }
            None => size = size.with(Slot::BlockOutputs, hidden.bytes(&self.config)),
        }
        let mut written = WrittenGradients::new();
        check_input_gradient("d_x", *d_x, &forward.x, &mut written, device)?;
        check_input_gradient("d_memory", *d_memory, memory, &mut written, device)?;
        let (given, layers) = (d_layers.len(), self.layers.len());
        if given != 0 && given != layers {
            return Err(Error::Length { tensor: "d_layers", expected: layers, got: given });
        }
        let features = self.config.features();
        for (layer, gradients) in self.layers.iter().zip(*d_layers) {
            layer.feed_forward.check_gradients(&gradients.feed_forward, &mut written, device)?;
            for (norm, gradients) in layer.norms.iter().zip(&gradients.norms) {
                norm.check_gradients(gradients, features, &mut written, device)?;
            }
        }
        check_final_gradients(self.final_norm.as_ref(), d_final_norm, features, &mut written, device)?;
        let stand_in = in_scratch(d_out.buffer, DType::F32, rows.shape(features), 0);
        let x = forward.x;
        let mut attention = Vec::with_capacity(layers);
        for n in 0..layers {
            let [own, cross] = self.attention_parts(n, d_layers)?;
            let call = forward.own(n, x, x);
            let dims = [rows.batch, rows.length, rows.length];
            let own = own.plan(call, (stand_in, true), dims, &mut written, device)?;
            let call = forward.cross([x; 2], *memory, n, rows.batch);
            let dims = [rows.batch, rows.length, memory_rows.length];
            let cross = cross.plan(call, (stand_in, d_memory.is_some()), dims, &mut written, device)?;
            size = size.max(own.size).max(cross.size);
            attention.push([own, cross]);
        }
        if written.is_empty() {
            let why = "nothing is asked for: give `d_x`, `d_memory`, `d_layers` or `d_final_norm`";
            return Err(Error::Unsupported { what: "a backward pass without gradients", why });
        }
        check_aliasing(&written, &read)?;
        let streams = [Slot::Stream, Slot::Middle, Slot::Branch, Slot::Normed, Slot::Fed];
        size = size.max(forward_size(&self.config, &rows, true, &streams));
        size = size.max(backward_size(&self.config, &rows, &self.layers[0].norms[0], x));
        size = size.max(self.shared.backward_size(&self.config, &rows));
        if d_memory.is_some() {
            size = size.with(Slot::MemoryGradient, 4 * count(memory_rows.shape(features)) as u64);
        }
        Ok(Plan { forward: plan, attention, size })
    }

    /// The attention of layer `n` to itself and to the memory, whose weights' gradients go where they are wanted.
    fn attention_parts<'a>(
        &'a self,
        n: usize,
        d_layers: &[DecoderLayerGradients<'a>],
    ) -> Result<[AttentionPart<'a>; 2], Error> {
        let DecoderLayer { self_attention, cross_attention, .. } = &self.layers[n];
        let gradients = |n: usize| d_layers.get(n).copied().unwrap_or_default();
        let own = (self_attention, [Slot::Context, Slot::Lse]);
        let own = self.shared.part(n, own, |n| gradients(n).self_attention)?;
        let slots = [Slot::MemoryContext, Slot::MemoryLse];
        Ok([own, AttentionPart::new(cross_attention, gradients(n).cross_attention, slots)])
    }
}

impl DecoderLayer {
    /// Its norms, with where their gradients go.
    fn norm_parts<'a>(
        &'a self,
        gradients: &DecoderLayerGradients<'a>,
    ) -> [(&'a OwnedNorm, NormGradients<'a>); 3] {
        let [first, second, third] = &self.norms;
        let [of_first, of_second, of_third] = gradients.norms;
        [(first, of_first), (second, of_second), (third, of_third)]
    }

    /// Of `middle = norm(x + attention(x))`, `fed = norm(middle + cross_attention(middle))`, `norm(fed + feed_forward(fed))`; d_x goes to
    /// the stream's gradient.
    fn post_backward<'a>(
        &'a self,
        turn: &Turn<'a>,
        work: &Workspace<'a>,
        [own_plans, cross_plans]: &[AttentionPlans; 2],
        dispatches: &mut Dispatches<'a>,
    ) -> Result<(), Error> {
        let Turn { n, attention: [own, cross], keys, x, memory, d, d_memory, gradients, forward } = *turn;
        let [first, second, third] = self.norm_parts(&gradients);
        let [middle, fed] = [work.features(Slot::Middle)?, work.features(Slot::Fed)?];
        // What each part gives.
        let [attended, crossed, branch] =
            [work.features(Slot::Branch)?, work.features(Slot::Normed)?, work.features(Slot::Stream)?];
        let call = keys.call(forward.own(n, x, attended));
        let own_call = own.again(call, own_plans, work, dispatches)?;
        dispatches.push(work.norm(first.0, x, Some(attended), middle, None));
        let call = forward.cross([middle, crossed], memory, n, work.rows.batch);
        let cross_call = cross.again(call, cross_plans, work, dispatches)?;
        dispatches.push(work.norm(second.0, middle, Some(crossed), fed, None));
        dispatches.extend(work.feed_forward(&self.feed_forward, fed, branch, true)?);

        let features = work.config.features();
        let d_fed = work.gradient(Slot::MiddleGradient, features)?;
        let d_middle = work.gradient(Slot::BranchGradient, features)?;
        let d_x = work.gradient(Slot::StreamGradient, features)?;
        let more = |view| Gradient { view, accumulates: true };
        dispatches.extend(work.norm_backward(third, (fed, Some(branch)), [d, d_fed], None)?);
        let feed = (&self.feed_forward, gradients.feed_forward);
        dispatches.extend(work.feed_backward(feed, [fed, d_fed], more(d_fed))?);
        dispatches.extend(work.norm_backward(second, (middle, Some(crossed)), [d_fed, d_middle], None)?);
        let d_inputs = InputGradients { queries: more(d_middle), keys: d_memory };
        dispatches.extend(cross.backward(cross_call, d_middle, d_inputs, cross_plans, work)?);
        dispatches.extend(work.norm_backward(first, (x, Some(attended)), [d_middle, d_x], None)?);
        let d_inputs = InputGradients { queries: more(d_x), keys: Some(keys.gradient(more(d_x))) };
        dispatches.extend(own.backward(own_call, d_x, d_inputs, own_plans, work)?);
        dispatches.extend(keys.add_to(d_x, work));
        Ok(())
    }

    /// Of `middle = x + attention(norm(x))`, `last = middle + cross_attention(norm(middle))`, `last + feed_forward(norm(last))`; d_x goes to
    /// the stream's gradient.
    fn pre_backward<'a>(
        &'a self,
        turn: &Turn<'a>,
        work: &Workspace<'a>,
        [own_plans, cross_plans]: &[AttentionPlans; 2],
        dispatches: &mut Dispatches<'a>,
    ) -> Result<(), Error> {
        let Turn { n, attention: [own, cross], keys, x, memory, d, d_memory, gradients, forward } = *turn;
        let [first, second, third] = self.norm_parts(&gradients);
        // What each part takes; what it gives, one after the other; and the sum between them.
        let [normed, queries, fed] =
            [work.features(Slot::Normed)?, work.features(Slot::Stream)?, work.features(Slot::Fed)?];
        let [branch, middle] = [work.features(Slot::Branch)?, work.features(Slot::Middle)?];
        dispatches.push(work.norm(first.0, x, None, normed, None));
        let call = keys.call(forward.own(n, normed, branch));
        let own_call = own.again(call, own_plans, work, dispatches)?;
        dispatches.push(work.norm(second.0, x, Some(branch), queries, Some(middle)));
        let call = forward.cross([queries, branch], memory, n, work.rows.batch);
        let cross_call = cross.again(call, cross_plans, work, dispatches)?;
        dispatches.push(work.norm(third.0, middle, Some(branch), fed, None));
        dispatches.extend(work.feed_hidden(&self.feed_forward, fed, true)?);

        let features = work.config.features();
        let d_branch = work.gradient(Slot::BranchGradient, features)?;
        let d_middle = work.gradient(Slot::MiddleGradient, features)?;
        let d_x = work.gradient(Slot::StreamGradient, features)?;
        let written = Gradient { view: d_branch, accumulates: false };
        let feed = (&self.feed_forward, gradients.feed_forward);
        dispatches.extend(work.feed_backward(feed, [fed, d], written)?);
        let last = (middle, Some(branch));
        dispatches.extend(work.norm_backward(third, last, [d_branch, d_middle], Some(d))?);
        let d_inputs = InputGradients { queries: written, keys: d_memory };
        dispatches.extend(cross.backward(cross_call, d_middle, d_inputs, cross_plans, work)?);
        dispatches.extend(work.norm_backward(
            second,
            (middle, None),
            [d_branch, d_middle],
            Some(d_middle),
        )?);
        let d_inputs = InputGradients { queries: written, keys: Some(keys.gradient(written)) };
        dispatches.extend(own.backward(own_call, d_middle, d_inputs, own_plans, work)?);
        dispatches.extend(keys.add_to(d_branch, work));
        dispatches.extend(work.norm_backward(first, (x, None), [d_branch, d_x], Some(d_middle))?);
        Ok(())
    }
}
