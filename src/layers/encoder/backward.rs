//! The gradients of a stack: each layer computed once more from what the one before it gave, the last one first, then backwards
//! through its parts.

use super::{EncoderForward, EncoderLayer, Plan as ForwardPlan, TransformerEncoder};
use crate::attention::dispatch;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Prepared, Recorder, Scratch, ScratchSize, Slot, in_scratch};
use crate::layers::block::config::NormOrder;
use crate::layers::block::{
    AttentionPart, AttentionPlans, FeedForwardGradients, InputGradients, KeysTurn, Rows, SelfAttention,
    Workspace, WrittenGradients, backward_size, check_final_gradients, check_input_gradient, check_no_cache,
    forward_size,
};
use crate::layers::multi_head::MultiHeadGradients;
use crate::matmul::projection::check_summed_rows;
use crate::matmul::projection::dispatch_backward::Gradient;
use crate::rows::norm::{NormGradients, OwnedNorm};
use crate::tensor::{Access, DType, Error, TensorView, check_aliasing};

/// Where the gradients of [`EncoderLayerWeights`](crate::layers::EncoderLayerWeights) go: nowhere by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct EncoderLayerGradients<'a> {
    /// Of its self-attention.
    pub attention: MultiHeadGradients<'a>,
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
}

/// A checked backward call.
struct Plan<'a> {
    rows: Rows,
    /// Of all layers once more, where the forward pass has not kept what they give.
    forward: SelfAttention<'a>,
    /// Of one layer in turn; one for each, of whose weights others may be wanted.
    attention: Vec<AttentionPlans>,
    size: ScratchSize,
}

/// The tensors of a layer's backward pass.
struct Turn<'a> {
    /// Which layer it is.
    n: usize,
    attention: AttentionPart<'a>,
    keys: KeysTurn<'a>,
    /// What the layer takes.
    x: TensorView<'a>,
    /// The gradient of what it gives.
    d: TensorView<'a>,
    gradients: EncoderLayerGradients<'a>,
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

    /// Records the gradients of a forward call into an encoder or a pass: of its input and of all weights, in any
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
        into: &mut impl Recorder,
        call: &EncoderBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as often as you like.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &EncoderBackward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let plan = dispatch::within(device, |device| {
            let plan = self.check_backward(call, device)?;
            scratch.check(plan.size).map(|()| plan)
        })?;
        let scratch: &Scratch = scratch;
        let (config, rows, kernel_options) = (&self.config, plan.rows, &self.kernel_options);
        let work = Workspace { config, rows, scratch, kernel_options, device, accumulates: call.accumulate };
        let dispatches = self.backward_dispatches(call, &work, &plan)?;
        self.pipelines.bind("transformer encoder backward", &dispatches, scratch.bindings())
    }

    fn backward_dispatches<'a>(
        &'a self,
        call: &EncoderBackward<'a>,
        work: &Workspace<'a>,
        plan: &Plan<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let mut dispatches = Dispatches::new();
        let mut forward = call.forward;
        let hidden = self.hidden(&plan.rows);
        if forward.hidden.is_none() && hidden.layers > 0 {
            let (out, hidden) = (work.features(Slot::Stream)?, Some(hidden.in_scratch(work)?));
            forward = EncoderForward { out, hidden, ..forward };
            dispatches.extend(self.dispatches(&forward, work, &plan.forward)?);
        }
        let stream = work.gradient(Slot::StreamGradient, self.config.features())?;
        let mut d = call.d_out;
        if let Some(norm) = &self.final_norm {
            let x = self.given(self.layers.len() - 1, &forward, work)?;
            let norm = (norm, call.d_final_norm);
            dispatches.extend(work.norm_backward(norm, (x, None), [d, stream], None)?);
            d = stream;
        }
        for (n, layer) in self.layers.iter().enumerate().rev() {
            let input = |n: usize| if n == 0 { Ok(forward.x) } else { self.given(n - 1, &forward, work) };
            let gradients = call.d_layers.get(n).copied().unwrap_or_default();
            let attention = self.attention_part(n, call.d_layers)?;
            let of_keys = |n: usize| Ok((input(n)?, &self.layers[n].norms[0]));
            let keys = self.shared.turn(n, of_keys, work, &mut dispatches)?;
            let turn = Turn { n, attention, keys, x: input(n)?, d, gradients, forward };
            let plans = &plan.attention[n];
            match self.config.order {
                NormOrder::Post => layer.post_backward(&turn, work, plans, &mut dispatches)?,
                NormOrder::Pre => layer.pre_backward(&turn, work, plans, &mut dispatches)?,
            }
            d = stream;
        }
        dispatches.extend(call.d_x.map(|d_x| work.hand_over(d, d_x)));
        Ok(dispatches)
    }

    fn check_backward<'a>(
        &self,
        call: &EncoderBackward<'a>,
        device: &DeviceFacts,
    ) -> Result<Plan<'a>, Error> {
        let EncoderBackward { forward, d_out, d_x, d_layers, d_final_norm, .. } = call;
        check_no_cache(forward.cache)?;
        let ForwardPlan { rows, attention: forward_plan, mut size } = self.check_inputs(forward, device)?;
        self.check_output("d_out", d_out, forward, Access::Read, device)?;
        check_summed_rows("x", &forward.x, 1)?;
        let mut read = self.inputs(forward);
        read.push(("d_out", *d_out));
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
        let dims = [rows.batch, rows.length, rows.length];
        let mut attention = Vec::with_capacity(layers);
        for n in 0..layers {
            let part = self.attention_part(n, d_layers)?;
            let inner = forward.attention(n, forward.x, forward.x);
            let plans = part.plan(inner, (stand_in, true), dims, &mut written, device)?;
            size = size.max(plans.size);
            attention.push(plans);
        }
        if written.is_empty() {
            let why = "nothing is asked for: give `d_x`, `d_layers` or `d_final_norm`";
            return Err(Error::Unsupported { what: "a backward pass without gradients", why });
        }
        check_aliasing(&written, &read)?;
        let streams = [Slot::Stream, Slot::Middle, Slot::Branch, Slot::Normed];
        size = size.max(forward_size(&self.config, &rows, true, &streams));
        size = size.max(backward_size(&self.config, &rows, &self.layers[0].norms[0], forward.x));
        size = size.max(self.shared.backward_size(&self.config, &rows));
        Ok(Plan { rows, forward: forward_plan, attention, size })
    }

    /// The attention of layer `n`, whose weights' gradients go where they are wanted.
    fn attention_part<'a>(
        &'a self,
        n: usize,
        d_layers: &[EncoderLayerGradients<'a>],
    ) -> Result<AttentionPart<'a>, Error> {
        let of = (&self.layers[n].attention, [Slot::Context, Slot::Lse]);
        self.shared.part(n, of, |n| d_layers.get(n).copied().unwrap_or_default().attention)
    }
}

impl EncoderLayer {
    /// Of `middle = norm(x + attention(x))`, `norm(middle + feed_forward(middle))`; d_x goes to the stream's gradient.
    fn post_backward<'a>(
        &'a self,
        turn: &Turn<'a>,
        work: &Workspace<'a>,
        plans: &AttentionPlans,
        dispatches: &mut Dispatches<'a>,
    ) -> Result<(), Error> {
        let Turn { n, attention, keys, x, d, gradients, forward } = *turn;
        let feed = (&self.feed_forward, gradients.feed_forward);
        let [middle, branch] = [work.features(Slot::Middle)?, work.features(Slot::Branch)?];
        let fed = work.features(Slot::Normed)?;
        let call = keys.call(forward.attention(n, x, branch));
        let attended = attention.again(call, plans, work, dispatches)?;
        dispatches.push(work.norm(&self.norms[0], x, Some(branch), middle, None));
        dispatches.extend(work.feed_forward(&self.feed_forward, middle, fed, true)?);

        let features = work.config.features();
        let d_middle = work.gradient(Slot::MiddleGradient, features)?;
        let d_x = work.gradient(Slot::StreamGradient, features)?;
        let [first, second] = self.norm_parts(&gradients);
        dispatches.extend(work.norm_backward(second, (middle, Some(fed)), [d, d_middle], None)?);
        let more = Gradient { view: d_middle, accumulates: true };
        dispatches.extend(work.feed_backward(feed, [middle, d_middle], more)?);
        dispatches.extend(work.norm_backward(first, (x, Some(branch)), [d_middle, d_x], None)?);
        let more = Gradient { view: d_x, accumulates: true };
        let d_inputs = InputGradients { queries: more, keys: Some(keys.gradient(more)) };
        dispatches.extend(attention.backward(attended, d_x, d_inputs, plans, work)?);
        dispatches.extend(keys.add_to(d_x, work));
        Ok(())
    }

    /// Of `middle = x + attention(norm(x))`, `middle + feed_forward(norm(middle))`; d_x goes to the stream's gradient.
    fn pre_backward<'a>(
        &'a self,
        turn: &Turn<'a>,
        work: &Workspace<'a>,
        plans: &AttentionPlans,
        dispatches: &mut Dispatches<'a>,
    ) -> Result<(), Error> {
        let Turn { n, attention, keys, x, d, gradients, forward } = *turn;
        let feed = (&self.feed_forward, gradients.feed_forward);
        let [normed, branch] = [work.features(Slot::Normed)?, work.features(Slot::Branch)?];
        let fed = work.features(Slot::Middle)?;
        dispatches.push(work.norm(&self.norms[0], x, None, normed, None));
        let call = keys.call(forward.attention(n, normed, branch));
        let attended = attention.again(call, plans, work, dispatches)?;
        dispatches.push(work.norm(&self.norms[1], x, Some(branch), fed, None));
        dispatches.extend(work.feed_hidden(&self.feed_forward, fed, true)?);

        let features = work.config.features();
        let d_branch = work.gradient(Slot::BranchGradient, features)?;
        let d_middle = work.gradient(Slot::MiddleGradient, features)?;
        let d_x = work.gradient(Slot::StreamGradient, features)?;
        let [first, second] = self.norm_parts(&gradients);
        let written = Gradient { view: d_branch, accumulates: false };
        dispatches.extend(work.feed_backward(feed, [fed, d], written)?);
        dispatches.extend(work.norm_backward(second, (x, Some(branch)), [d_branch, d_middle], Some(d))?);
        let d_inputs = InputGradients { queries: written, keys: Some(keys.gradient(written)) };
        dispatches.extend(attention.backward(attended, d_middle, d_inputs, plans, work)?);
        dispatches.extend(keys.add_to(d_branch, work));
        dispatches.extend(work.norm_backward(first, (x, None), [d_branch, d_x], Some(d_middle))?);
        Ok(())
    }

    /// Its norms, with where their gradients go.
    fn norm_parts<'a>(
        &'a self,
        gradients: &EncoderLayerGradients<'a>,
    ) -> [(&'a OwnedNorm, NormGradients<'a>); 2] {
        let [first, second] = &self.norms;
        [(first, gradients.norms[0]), (second, gradients.norms[1])]
    }
}
