//! An attention of a layer in a backward pass: it is computed again, then its gradients are
//! computed.

use super::gradients::WrittenGradients;
use super::workspace::Workspace;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, ScratchSize, Slot, in_scratch};
use crate::layers::multi_head::backward::Plan as BackwardPlan;
use crate::layers::multi_head::{
    MultiHeadAttention, MultiHeadBackward, MultiHeadForward, MultiHeadGradients, Plan as AttentionPlan,
    joined_heads,
};
use crate::matmul::projection::dispatch_backward::Gradient;
use crate::tensor::{DType, Error, Shape, TensorView, count};

/// An attention of a layer. Its results stay in scratch from its second computation until its
/// gradients are done.
#[derive(Clone, Copy)]
pub(crate) struct AttentionPart<'a> {
    pub layer: &'a MultiHeadAttention,
    /// Places for the gradients of its weights.
    pub to: MultiHeadGradients<'a>,
    /// The places that the caller set for this layer. An earlier layer may own its keys' weights.
    pub own: MultiHeadGradients<'a>,
    /// True if gradients of keys' weights are added to the gradients of later layers.
    pub adds_keys: bool,
    /// Slots of the heads' outputs and their log-sum-exp.
    pub slots: [Slot; 2],
}

/// The plans of an attention that is computed again, and of its gradients.
pub(crate) struct AttentionPlans {
    again: AttentionPlan,
    backward: BackwardPlan,
    pub size: ScratchSize,
}

/// Places for the gradients of an attention's inputs; for self-attention both are the same.
#[derive(Clone, Copy)]
pub(crate) struct InputGradients<'a> {
    pub queries: Gradient<'a>,
    /// The sum over keys and values, if it is wanted.
    pub keys: Option<Gradient<'a>>,
}

impl<'a> AttentionPart<'a> {
    /// Makes an attention that shares nothing with other layers.
    pub fn new(layer: &'a MultiHeadAttention, to: MultiHeadGradients<'a>, slots: [Slot; 2]) -> Self {
        AttentionPart { layer, to, own: to, adds_keys: false, slots }
    }

    /// Returns the call with places for its context and lse, each in a `part` of the scratch.
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

    /// Makes the plans of `call`. It checks the mask and the gradients of weights, and adds the
    /// latter to `written`. `stand_in` has the layout of the gradients of rows.
    pub fn plan(
        &self,
        call: MultiHeadForward<'a>,
        (stand_in, wants_keys): (TensorView<'a>, bool),
        dims: [usize; 3],
        written: &mut WrittenGradients<'a>,
        device: &DeviceFacts,
    ) -> Result<AttentionPlans, Error> {
        let shape = self.layer.shape_of(dims);
        // There is no scratch yet, so any buffer replaces it: plans read layouts only.
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

    /// Computes `call` again. Returns it with its stored tensors.
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

    /// Computes, from `d_out`, the gradients of the weights and of the inputs of `forward`, whose
    /// results are stored.
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
