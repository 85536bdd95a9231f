//! The projection operator: `y = x Wᵀ + b`, for queries, keys and values in one call.

mod backward;
pub(crate) mod dispatch;
pub(crate) mod dispatch_backward;
pub(crate) mod kernels;
pub(crate) mod reference;

pub use backward::ProjectionBackward;
pub(crate) use backward::{GradientOf, Written, check_summed_rows};
use dispatch::LinearOp;

use std::sync::Arc;

use super::plan::ProductOutline;
use super::{Activation, SideShape};
use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, KernelOptions, Pipelines, Prepared, Recorder};
use crate::tensor::{
    Access, CallTensors, Element, Error, Tensor, TensorView, check_float, expect, same_dtype,
};

/// Weight and bias of one projection, on the device.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// `[out, in]` as [`TensorView::matrix`], with any strides: `[in, out]` storage is a transposed
    /// view. The weight of a narrow layer is `[1, heads, dim, in / heads]`, or `[1, 1, dim, in /
    /// heads]` if all heads share it.
    pub weight: TensorView<'a>,
    /// `[out]` as [`TensorView::vector`].
    pub bias: Option<TensorView<'a>>,
}

/// A [`Linear`] that keeps its buffers alive.
#[derive(Clone, Debug)]
pub(crate) struct OwnedLinear {
    pub weight: Tensor,
    pub bias: Option<Tensor>,
}

impl OwnedLinear {
    pub fn new(linear: &Linear) -> Self {
        OwnedLinear { weight: linear.weight.to_owned(), bias: linear.bias.map(TensorView::to_owned) }
    }

    pub fn product<'a>(&'a self, x: TensorView<'a>, y: TensorView<'a>, narrow: bool) -> LinearOp<'a> {
        let bias = self.bias.as_ref().map(Tensor::view);
        LinearOp { x, w: self.weight.view(), bias, y, narrow, activation: None }
    }
}

/// One product of a projection. It maps `[batch, 1, length, features]` directly to heads.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct ProjectionForward<'a> {
    /// `[batch, 1, length, features]`, see [`TensorView::sequence`].
    pub(crate) x: TensorView<'a>,
    /// `[heads · dim, features]`, or `[1, heads or 1, dim, features / heads]` if narrow.
    pub(crate) linear: Linear<'a>,
    /// `[batch, heads, length, dim]` with any strides. With one head it is a plain linear layer.
    pub(crate) out: TensorView<'a>,
    /// True if each head reads only a separate slice of `x`.
    pub(crate) narrow: bool,
    /// The activation that is applied to `x Wᵀ + b`.
    pub(crate) activation: Option<Activation>,
}

/// Linear layers whose outputs are attention heads. Use it if the application computes something
/// between projection and attention, for example a rotation of queries and keys.
/// [`MultiHeadAttention`](crate::MultiHeadAttention) computes the whole layer.
///
/// Up to three products form one dispatch, if their outputs share a buffer and the device can bind
/// enough buffers.
///
/// The operator stores the bindings of recent calls, so that a repeated call creates nothing. The
/// bindings keep some buffers alive: see [`forget`](Self::forget).
#[derive(Clone, Debug)]
pub struct Projection {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
    kernel_options: KernelOptions,
}

impl Projection {
    /// Creates the operator with separate pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates the operator with pipelines that other operators of the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        Projection {
            pipelines: pipelines.clone(),
            bindings: Arc::default(),
            kernel_options: KernelOptions::new(),
        }
    }

    /// The pipelines of the operator, to share with other operators.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of past calls, and with them the references to their buffers. Clones
    /// share the bindings.
    ///
    /// Without this call, unused bindings are dropped after a few calls, at most 64. Until then,
    /// the buffers that only these bindings keep alive are limited. They have at most twice the
    /// bytes of the last call's buffers, or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// Sets the class of kernels and the use of matrix units. Matrix units multiply f16 and
    /// accumulate in f32. The other [`KernelOptions`] do not apply to projections.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Records the products into an encoder or a pass.
    ///
    /// # Errors
    /// Every [`Error`] of tensors. The inputs must have one dtype, and so must the weights, the
    /// biases and the outputs. After an error nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, products: &[ProjectionForward]) -> Result<(), Error> {
        self.prepare(products)?.record(into);
        Ok(())
    }

    /// The properties of products that are computed together, for the plan. They are not checked.
    pub(crate) fn outline(&self, products: &[ProjectionForward]) -> ProductOutline {
        let products: Vec<_> = products.iter().map(ProjectionForward::op).collect();
        dispatch::outline_of(&products, &self.kernel_options)
    }

    /// Checks the products, then compiles and binds their kernels. [`Prepared::record`] can then
    /// record them any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare(&self, products: &[ProjectionForward]) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let Some(first) = products.first() else {
            return self.pipelines.bind("projection", &[], &self.bindings);
        };
        let mut tensors = CallTensors::new(device);
        let mut bias_dtype = None;
        for product in products {
            product.check(&mut tensors)?;
            same_dtype("x", &product.x, first.x.dtype())?;
            same_dtype("linear.weight", &product.linear.weight, first.linear.weight.dtype())?;
            same_dtype("out", &product.out, first.out.dtype())?;
            if let Some(bias) = &product.linear.bias {
                same_dtype("linear.bias", bias, *bias_dtype.get_or_insert(bias.dtype()))?;
            }
            if product.narrow != first.narrow {
                let why = "the products of a call must be all narrow or all wide; record separate calls";
                return Err(Error::Unsupported { what: "narrow", why });
            }
            if product.activation != first.activation {
                let why =
                    "the products of a call must have the same activation or none; record separate calls";
                return Err(Error::Unsupported { what: "activation", why });
            }
        }
        tensors.check_aliasing()?;
        let products: Vec<_> = products.iter().map(ProjectionForward::op).collect();
        self.pipelines.with_fallbacks(|| {
            let dispatches = dispatch::dispatches(&products, &self.kernel_options, &self.pipelines.facts())?;
            self.pipelines.bind("projection", &dispatches, &self.bindings)
        })
    }
}

impl<'a> ProjectionForward<'a> {
    /// A product of `x`, `[batch, 1, length, features]` (see [`TensorView::sequence`]), and a
    /// weight, `[heads · dim, features]`. `out` is `[batch, heads, length, dim]` with any strides.
    /// With one head it is a plain linear layer.
    pub fn new(x: TensorView<'a>, linear: Linear<'a>, out: TensorView<'a>) -> Self {
        ProjectionForward { x, linear, out, narrow: false, activation: None }
    }

    /// Lets each head read only a separate slice of `x`. The weight is then `[1, heads or 1, dim,
    /// features / heads]`.
    pub fn narrow(mut self, narrow: bool) -> Self {
        self.narrow = narrow;
        self
    }

    /// Applies an activation to `x Wᵀ + b` in f32, before the result is written. Use it to compute
    /// `linear1` and the activation of a feed-forward layer in one dispatch.
    pub fn activation(mut self, activation: impl Into<Option<Activation>>) -> Self {
        self.activation = activation.into();
        self
    }

    fn op(&self) -> LinearOp<'a> {
        let Self { x, linear, out, narrow, activation } = *self;
        LinearOp { x, w: linear.weight, bias: linear.bias, y: out, narrow, activation }
    }

    fn check(&self, tensors: &mut CallTensors<'a, '_>) -> Result<(), Error> {
        let ProjectionForward { x, linear: Linear { weight, bias }, out, narrow, .. } = *self;
        let [batch, _, length, features] = x.shape();
        let [_, heads, _, dim] = out.shape();
        tensors.read("x", x, Element::Float, [batch, 1, length, features])?;
        tensors.write("out", out, Element::Float, [batch, heads, length, dim])?;
        let shape = SideShape { heads, dim, features, narrow };
        shape.check("features")?;
        check_weight("linear.weight", &weight, shape.weight(), Access::Read, tensors.device)?;
        tensors.read_checked([("linear.weight", weight)]);
        tensors.read("linear.bias", bias, Element::Float, [1, 1, 1, heads.saturating_mul(dim)])
    }
}

pub(crate) fn check_weight(
    tensor: &'static str,
    view: &TensorView,
    shape: [usize; 4],
    access: Access,
    device: &DeviceFacts,
) -> Result<(), Error> {
    check_float(tensor, view)?;
    view.check(tensor, access, device)?;
    [0, 2, 3].into_iter().try_for_each(|axis| expect(tensor, view.shape(), axis, shape[axis]))?;
    // All heads may share one narrow matrix.
    let heads = if view.shape()[1] == 1 { 1 } else { shape[1] };
    expect(tensor, view.shape(), 1, heads)
}

pub(crate) fn check_vector(
    tensor: &'static str,
    view: &TensorView,
    n: usize,
    access: Access,
    device: &DeviceFacts,
) -> Result<(), Error> {
    CallTensors::new(device).add(access, tensor, *view, Element::Float, [1, 1, 1, n])
}
