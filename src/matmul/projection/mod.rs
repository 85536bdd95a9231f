//! The operator: `y = x Wᵀ + b`, for queries, keys and values at once.

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
    /// `[out, in]` as [`TensorView::matrix`]; any strides, so `[in, out]` storage is a transposed
    /// view. Of a narrow layer: `[1, heads, dim, in / heads]`, or one head for a matrix that all
    /// share.
    pub weight: TensorView<'a>,
    /// `[out]` as [`TensorView::vector`].
    pub bias: Option<TensorView<'a>>,
}

/// A [`Linear`] whose buffers are kept.
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

/// One product of a projection: from `[batch, 1, length, features]` straight into heads.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct ProjectionForward<'a> {
    /// `[batch, 1, length, features]`, see [`TensorView::sequence`].
    pub(crate) x: TensorView<'a>,
    /// `[heads · dim, features]`; of a narrow projection `[1, heads or 1, dim, features / heads]`.
    pub(crate) linear: Linear<'a>,
    /// `[batch, heads, length, dim]` in any strides; one head is a plain linear layer.
    pub(crate) out: TensorView<'a>,
    /// Each head reads only its own slice of `x`.
    pub(crate) narrow: bool,
    /// What becomes of `x Wᵀ + b`.
    pub(crate) activation: Option<Activation>,
}

/// Linear layers whose outputs are attention heads: up to three products in one dispatch where
/// their outputs share a buffer and the device binds enough buffers, in several otherwise.
///
/// For applications that do something between projection and attention, such as rotating queries
/// and keys; [`MultiHeadAttention`](crate::MultiHeadAttention) does the whole layer.
///
/// It keeps the bindings of recent calls, so that the same call again creates nothing. They keep
/// some buffers alive: see
/// [`forget`](Self::forget).
#[derive(Clone, Debug)]
pub struct Projection {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
    kernel_options: KernelOptions,
}

impl Projection {
    /// Projections with pipelines of their own.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Projections that share pipelines with other operators on the device.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        Projection {
            pipelines: pipelines.clone(),
            bindings: Arc::default(),
            kernel_options: KernelOptions::new(),
        }
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of its calls, and with them the references to their buffers. Clones share
    /// them.
    ///
    /// Without this, bindings that are not used any more go after a few calls, at most 64. Until
    /// then, the buffers that only they keep alive have at most twice the bytes of the last call's,
    /// or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// How products are computed, not what: the form of kernels and the use of matrix units, which
    /// multiply in f16 and sum in f32. The rest of [`KernelOptions`] does not concern them.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Records the products into an encoder or a pass.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors; then nothing has been recorded. The inputs must be of
    /// one dtype, and so must the weights, the biases and the outputs.
    pub fn forward(&self, into: &mut impl Recorder, products: &[ProjectionForward]) -> Result<(), Error> {
        self.prepare(products)?.record(into);
        Ok(())
    }

    /// What plans know of products that are computed together, unchecked.
    pub(crate) fn outline(&self, products: &[ProjectionForward]) -> ProductOutline {
        let products: Vec<_> = products.iter().map(ProjectionForward::op).collect();
        dispatch::outline_of(&products, &self.kernel_options)
    }

    /// Checks the products, compiles and binds what they need. [`Prepared::record`] then records
    /// them as often as you like.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
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
                let why = "products recorded together are all narrow or all wide; record them apart";
                return Err(Error::Unsupported { what: "narrow", why });
            }
            if product.activation != first.activation {
                let why = "products recorded together all have the same one or none; record them apart";
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
    /// `x` is `[batch, 1, length, features]` (see [`TensorView::sequence`]), `out` `[batch, heads,
    /// length, dim]` in any strides; one head is a plain linear layer. The weight is `[heads · dim,
    /// features]`.
    pub fn new(x: TensorView<'a>, linear: Linear<'a>, out: TensorView<'a>) -> Self {
        ProjectionForward { x, linear, out, narrow: false, activation: None }
    }

    /// Each head reads only its own slice of `x`: the weight is `[1, heads or 1, dim, features /
    /// heads]`.
    pub fn narrow(mut self, narrow: bool) -> Self {
        self.narrow = narrow;
        self
    }

    /// What `x Wᵀ + b` becomes before it is written, in f32: `linear1` and the activation of a
    /// feed-forward layer in one dispatch.
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
    // One narrow matrix may serve all heads.
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
