//! The gate of the heads' outputs: a sigmoid of a projection of the queries' input.

use super::{MultiHeadAttention, MultiHeadForward, heads_of, joined_heads};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, Scratch, ScratchSize, Slot, in_scratch};
use crate::matmul::projection::{OwnedLinear, dispatch};
use crate::matmul::{Activation, SideShape};
use crate::rows::elementwise::dispatch::ElementwiseOp;
use crate::tensor::{DType, Error, Layout, Shape, TensorView, count};

/// The gate of a layer, in a call.
#[derive(Clone, Copy)]
pub(super) struct Gate<'a> {
    pub linear: &'a OwnedLinear,
    side: SideShape,
    shape: Shape,
}

impl<'a> Gate<'a> {
    /// The gate's logits, or their gradient: `[batch, 1, q_len, heads · value_dim or heads]`.
    fn joined(&self) -> [usize; 4] {
        let Shape { batch, q_len, .. } = self.shape;
        [batch, 1, q_len, self.side.heads.saturating_mul(self.side.dim)]
    }

    /// A place for the logits, or for their gradient, in `buffer`.
    pub fn logits(&self, buffer: &'a wgpu::Buffer, dtype: DType) -> TensorView<'a> {
        in_scratch(buffer, dtype, self.joined(), 0)
    }

    /// Bytes of the logits, or of their gradient.
    pub fn bytes(&self, dtype: DType) -> u64 {
        (count(self.joined()) as u64 * dtype.bytes() as u64).next_multiple_of(4)
    }

    /// The logits, or their gradient, as `[batch, heads, q_len, value_dim or 1]`.
    fn of_heads(&self, joined: TensorView<'a>) -> TensorView<'a> {
        let [batch, _, length, unit] = joined.strides();
        let SideShape { heads, dim, .. } = self.side;
        let shape = [self.shape.batch, heads, self.shape.q_len, dim];
        let strides = [batch, dim * unit, length, unit];
        TensorView { layout: Layout { shape, strides, ..joined.layout }, ..joined }
    }

    /// The logits, or their gradient, as the gate's projection writes or reads them.
    pub fn projected(&self, joined: TensorView<'a>) -> TensorView<'a> {
        if self.side.narrow { self.of_heads(joined) } else { joined }
    }

    /// True if each head has one gate for several channels.
    fn is_headwise(&self) -> bool {
        self.side.dim != self.shape.value_dim
    }

    /// Views of the logits and of the heads' outputs, or of their gradients, whose rows match. If
    /// each channel has a gate, a row holds the channels of all heads. Otherwise it holds the
    /// channels of one head.
    pub fn aligned(&self, logits: TensorView<'a>, heads: TensorView<'a>) -> [TensorView<'a>; 2] {
        if self.is_headwise() {
            [self.of_heads(logits), heads_of(heads, &self.shape)]
        } else {
            [logits, heads]
        }
    }

    /// `sigmoid(logits) · context`. Its output and its gradients are views from
    /// [`aligned`](Self::aligned).
    pub fn op(&self, logits: TensorView<'a>, context: TensorView<'a>) -> ElementwiseOp<'a> {
        let [x, times] = self.aligned(logits, context);
        ElementwiseOp { activation: Some(Activation::Sigmoid), x, multiply: Some(times), residual: None }
    }

    /// Writes the gated `context` to `gated`.
    pub fn apply(&self, [logits, context, gated]: [TensorView<'a>; 3], device: &DeviceFacts) -> Dispatch<'a> {
        let [_, out] = self.aligned(logits, gated);
        self.op(logits, context).forward(out, device)
    }
}

impl MultiHeadAttention {
    /// The gate of a call of `shape`, if the layer has one.
    pub(super) fn gate(&self, shape: &Shape) -> Option<Gate<'_>> {
        Some(Gate { linear: self.gate.as_ref()?, side: self.config.gate_side()?, shape: *shape })
    }

    /// The memory of the gate and of the gated heads' outputs in a forward pass.
    pub(super) fn gate_size(&self, shape: &Shape) -> ScratchSize {
        let Some(gate) = self.gate(shape) else { return ScratchSize::default() };
        let of_gate = ScratchSize::default().with(Slot::Gate, gate.bytes(self.config.dtype));
        of_gate.with(Slot::Gated, self.context_bytes(shape))
    }

    /// Projects the logits of the gate.
    pub(super) fn gate_logits<'a>(
        &'a self,
        gate: &Gate<'a>,
        query: TensorView<'a>,
        logits: TensorView<'a>,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let product = gate.linear.product(query, gate.projected(logits), gate.side.narrow);
        dispatch::dispatches(&[product], &self.kernel_options, device)
    }

    /// Computes the layer's output from the heads' outputs `context`: the gate, if there is one,
    /// and the output projection.
    pub(super) fn finish<'a>(
        &'a self,
        call: &MultiHeadForward<'a>,
        shape: &Shape,
        context: TensorView<'a>,
        scratch: &'a Scratch,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let (dtype, mut heads) = (self.config.dtype, context);
        let mut dispatches = Dispatches::new();
        if let Some(gate) = self.gate(shape) {
            let logits = gate.logits(scratch.buffer(Slot::Gate)?, dtype);
            heads = in_scratch(scratch.buffer(Slot::Gated)?, dtype, joined_heads(shape), 0);
            dispatches = self.gate_logits(&gate, call.query, logits, device)?;
            dispatches.push(gate.apply([logits, context, heads], device));
        }
        let out = self.out.product(heads, call.out, false);
        dispatches.extend(dispatch::dispatches(&[out], &self.kernel_options, device)?);
        Ok(dispatches)
    }
}
