//! The attentional vector: a context and a hidden state → `tanh(W_c [context; hidden] + b)`.

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
    /// Makes a call for these tensors:
    ///
    /// - `context` `[batch, 1, q_len, c]`, the output of attention,
    /// - `hidden` `[batch, 1, q_len, h]`, the states that the queries came from,
    /// - `linear` with a weight `[out, c + h]`, the context's columns first,
    /// - `out` `[batch, 1, q_len, out]`.
    ///
    /// `context`, `hidden` and `out` are F32, F16 or BF16. Heads next to each other are channels:
    /// view a context of several heads as `[batch, q_len, heads · dim]`.
    pub fn new(
        context: TensorView<'a>,
        hidden: TensorView<'a>,
        linear: Linear<'a>,
        out: TensorView<'a>,
    ) -> Self {
        AttentionalForward { context, hidden, linear, out }
    }
}

/// The attentional vector `tanh(W_c [context; hidden] + b)`, and its gradients. Source: Luong et
/// al. 2015, "Effective approaches to attention-based neural machine translation", equation 5. The
/// kernels never concatenate the two inputs: each input is multiplied by its columns of the weight.
///
/// | Luong's score | here |
/// |---|---|
/// | dot: `q · k` | [`Attention`] with [`scale`] 1, keys as values |
/// | general: `q · W k` | the same, with queries that a [`Projection`] has multiplied by `Wᵀ` |
/// | concat: `v · tanh(W [q; k])` | [`AdditiveAttention`], with projected queries and keys |
///
/// For concat two projections multiply queries and keys by their columns of `W`.
///
/// | Luong's reach | here |
/// |---|---|
/// | global | no window |
/// | local-m: `D` keys on both sides of the query's position | [`Mask::local_m(D)`] |
/// | local-p: around a predicted position, with a Gaussian | [`LocalAttention`] |
///
/// [`Attention`]: crate::Attention
/// [`scale`]: crate::Config::scale
/// [`Projection`]: crate::Projection
/// [`AdditiveAttention`]: crate::additive::AdditiveAttention
/// [`Mask::local_m(D)`]: crate::Mask::local_m
/// [`LocalAttention`]: crate::local::LocalAttention
#[derive(Clone, Debug)]
pub struct AttentionalVector {
    pipelines: Pipelines,
    kernel_options: KernelOptions,
}

impl AttentionalVector {
    /// Makes attentional vectors with their own pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Makes attentional vectors that share pipelines with other operators on the device.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        AttentionalVector { pipelines: pipelines.clone(), kernel_options: KernelOptions::new() }
    }

    /// Returns the pipelines, to share them.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Sets the options of the products' kernels, as for a [`Projection`](crate::Projection). They
    /// may change the rounding of the result.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Returns the size of the temporary memory that `call` needs: 8 bytes for each element of its
    /// output.
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
    /// Everything that [`Error`] lists for tensors and scratch. On an error the call records
    /// nothing.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &AttentionalForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its pipelines and binds its tensors. [`Prepared::record`] can then
    /// record it many times.
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

/// The columns of a weight for the context, and for the hidden state.
fn columns<'a>(weight: TensorView<'a>, context: &TensorView, hidden: &TensorView) -> [TensorView<'a>; 2] {
    let [c, h] = [context, hidden].map(|t| t.shape()[3]);
    [weight.slice(3, 0, c), weight.slice(3, c, h)]
}

/// Checks a context, a hidden state and a weight. Returns the shape of the output.
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
        // The products are separate, because the inputs may be of different types.
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
