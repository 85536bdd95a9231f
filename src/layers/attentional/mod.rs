//! The operator: a context and a hidden state → `tanh(W_c [context; hidden] + b)`.

mod backward;
pub(crate) mod kernels;
pub(crate) mod reference;

pub use backward::AttentionalBackward;
use kernels::tanh_sum::{CHANNELS, TanhSumCall, WORKGROUP};

use crate::device::DeviceFacts;
use crate::kernel::{
    Dispatches, KernelOptions, Pipelines, Prepared, Recorder, Scratch, ScratchSize, Slot, in_scratch,
};
use crate::matmul::Linear;
use crate::matmul::projection::dispatch::{self, LinearOp};
use crate::tensor::{CallTensors, DType, Element, Error, TensorView, count};

/// One forward call of the attentional vector.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct AttentionalForward<'a> {
    context: TensorView<'a>,
    hidden: TensorView<'a>,
    linear: Linear<'a>,
    out: TensorView<'a>,
}

impl<'a> AttentionalForward<'a> {
    /// `context` `[batch, 1, q_len, c]`, what attention gave, and `hidden` `[batch, 1, q_len, h]`,
    /// the states that asked, each F32, F16 or BF16; `linear` with a weight `[out, c + h]`, the
    /// context's columns first; to `out` `[batch, 1, q_len, out]`, F32, F16 or BF16. Heads side by
    /// side are channels: a context of several is a view of its memory `[batch, q_len, heads ·
    /// dim]`.
    pub fn new(
        context: TensorView<'a>,
        hidden: TensorView<'a>,
        linear: Linear<'a>,
        out: TensorView<'a>,
    ) -> Self {
        AttentionalForward { context, hidden, linear, out }
    }
}

/// The attentional vector of Luong et al. 2015 ("Effective approaches to attention-based neural
/// machine translation", equation 5): `tanh(W_c [context; hidden] + b)`, with the gradient of each.
/// The two are never put side by side: each is multiplied by its columns of the weight.
///
/// | Luong's score | here |
/// |---|---|
/// | dot: `q · k` | [`Attention`](crate::Attention) with [`scale`](crate::Config::scale) 1, keys as values |
/// | general: `q · W k` | the same, of queries that a [`Projection`](crate::Projection) has multiplied by `Wᵀ` |
/// | concat: `v · tanh(W [q; k])` | [`AdditiveAttention`](crate::additive::AdditiveAttention), of queries and keys that two projections have multiplied by their columns of `W` |
///
/// | Luong's reach | here |
/// |---|---|
/// | global | no window |
/// | local-m: `D` keys on both sides of the query's own position | [`Mask::local_m(D)`](crate::Mask::local_m) |
/// | local-p: around a predicted position, with a Gaussian | [`LocalAttention`](crate::local::LocalAttention) |
#[derive(Clone, Debug)]
pub struct AttentionalVector {
    pipelines: Pipelines,
    kernel_options: KernelOptions,
}

impl AttentionalVector {
    /// Attentional vectors with pipelines of their own.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Attentional vectors that share pipelines with other operators on the device.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        AttentionalVector { pipelines: pipelines.clone(), kernel_options: KernelOptions::new() }
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

    /// The temporary memory that `call` needs: 8 bytes for each element of its output.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &AttentionalForward) -> Result<ScratchSize, Error> {
        call.check(&self.pipelines.facts())?;
        Ok(ScratchSize::default().with(Slot::Projected, 8 * count(call.out.shape()) as u64))
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors and scratch; then nothing has been recorded.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &AttentionalForward,
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
    pub fn prepare(&self, call: &AttentionalForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        scratch.check(self.scratch_size(call)?)?;
        let products = scratch.buffer(Slot::Projected)?;
        let dispatches = call.dispatches(products, &self.kernel_options, device)?;
        self.pipelines.bind("attentional vector", &dispatches, scratch.bindings())
    }
}

/// The columns of a weight that are the context's, and the hidden state's.
fn columns<'a>(weight: TensorView<'a>, context: &TensorView, hidden: &TensorView) -> [TensorView<'a>; 2] {
    let [c, h] = [context, hidden].map(|t| t.shape()[3]);
    [weight.slice(3, 0, c), weight.slice(3, c, h)]
}

/// Checks a context, a hidden state and a weight, each by its name, and gives the shape of what
/// they make.
fn check_inputs<'a>(
    context: TensorView<'a>,
    hidden: TensorView<'a>,
    weight: TensorView<'a>,
    tensors: &mut CallTensors<'a, '_>,
) -> Result<[usize; 4], Error> {
    let [batch, _, length, c] = context.shape();
    let ([_, _, _, h], [_, _, channels, _]) = (hidden.shape(), weight.shape());
    tensors.read("context", context, Element::Float, [batch, 1, length, c])?;
    tensors.read("hidden", hidden, Element::Float, [batch, 1, length, h])?;
    tensors.read("linear.weight", weight, Element::Float, [1, 1, channels, c.saturating_add(h)])?;
    Ok([batch, 1, length, channels])
}

impl<'a> AttentionalForward<'a> {
    fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let AttentionalForward { context, hidden, linear, out } = *self;
        let mut tensors = CallTensors::new(device);
        let shape = check_inputs(context, hidden, linear.weight, &mut tensors)?;
        tensors.read("linear.bias", linear.bias, Element::Float, [1, 1, 1, shape[3]])?;
        tensors.write("out", out, Element::Float, shape)?;
        tensors.finish()
    }

    fn dispatches(
        &self,
        products: &'a wgpu::Buffer,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let AttentionalForward { context, hidden, linear, out } = *self;
        let shape = out.shape();
        let parts = [0, count(shape)].map(|at| in_scratch(products, DType::F32, shape, at));
        let [of_context, of_hidden] = columns(linear.weight, &context, &hidden);
        let op = |x, w, bias, y| LinearOp { x, w, bias, y, narrow: false, activation: None };
        // Apart: they may be of different types.
        let mut dispatches =
            dispatch::dispatches(&[op(context, of_context, linear.bias, parts[0])], kernel_options, device)?;
        dispatches.extend(dispatch::dispatches(
            &[op(hidden, of_hidden, None, parts[1])],
            kernel_options,
            device,
        )?);
        let [batch, _, length, channels] = shape;
        let [a, b] = parts;
        let sum = TanhSumCall { a, b, out, channels: channels as u32 };
        dispatches.push(sum.dispatch([channels.div_ceil(WORKGROUP * CHANNELS), length, batch], device));
        Ok(dispatches)
    }
}
