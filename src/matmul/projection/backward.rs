//! The gradients of projections.

use super::dispatch_backward::{self, Gradient, LinearBackward};
use super::{Linear, ProjectionForward, check_weight};
use crate::device::DeviceFacts;
use crate::kernel::{Prepared, Recorder};
use crate::matmul::{Projection, SideShape};
use crate::tensor::{
    Access, CallTensors, Element, Error, LONGEST_AXIS, TensorView, check_aliasing, count, same_view,
};

/// The gradients of one product of a projection, `y = x Wᵀ + b`. Only the requested gradients are
/// computed.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct ProjectionBackward<'a> {
    forward: ProjectionForward<'a>,
    d_y: TensorView<'a>,
    d_x: Option<TensorView<'a>>,
    d_weight: Option<TensorView<'a>>,
    d_bias: Option<TensorView<'a>>,
    accumulate: bool,
}

impl<'a> ProjectionBackward<'a> {
    /// The backward pass of `forward`, which must not have an
    /// [`activation`](ProjectionForward::activation). It reads `x` and the weight of `forward`.
    /// `d_y` is the gradient of its `out`, `[batch, heads, length, dim]`, with any strides; F32,
    /// F16 or BF16.
    pub fn new(forward: ProjectionForward<'a>, d_y: TensorView<'a>) -> Self {
        let [d_x, d_weight, d_bias] = [None; 3];
        ProjectionBackward { forward, d_y, d_x, d_weight, d_bias, accumulate: false }
    }

    /// Sets the output for `d_x = d_y W`, with the shape of `x`; F32, F16 or BF16.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_x = d_x.into();
        self
    }

    /// Sets the output for `d_W = d_yᵀ x`, summed over all rows of all sequences. It has the shape
    /// of the weight; F32, F16 or BF16. If all heads share one narrow head, it is the sum over the
    /// heads.
    pub fn d_weight(mut self, d_weight: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_weight = d_weight.into();
        self
    }

    /// Sets the output for `d_b = Σ d_y`, summed over all rows of all sequences: `[heads · dim]`,
    /// see [`TensorView::vector`]; F32, F16 or BF16.
    pub fn d_bias(mut self, d_bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_bias = d_bias.into();
        self
    }

    /// Adds the gradients to the outputs instead of overwriting them. The sum is rounded to the
    /// gradient's type: choose F32 to add many gradients.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }

    /// The gradients to compute. Adds them to `written`.
    fn op(&self, written: &mut Written<'a>) -> LinearBackward<'a> {
        let mut gradient = |of, name: &'static str, view: Option<TensorView<'a>>| {
            Some(written.add(of, name, view?, self.accumulate))
        };
        let ProjectionForward { x, linear, narrow, .. } = self.forward;
        LinearBackward {
            w: linear.weight,
            d_y: self.d_y,
            d_x: gradient(GradientOf::Input, "d_x", self.d_x),
            d_w: gradient(GradientOf::Weight, "d_weight", self.d_weight).map(|d_w| (x, d_w)),
            d_b: gradient(GradientOf::Bias, "d_bias", self.d_bias),
            narrow,
        }
    }

    fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let ProjectionBackward { forward, d_y, d_x, d_weight, d_bias, .. } = *self;
        let ProjectionForward { x, linear: Linear { weight, .. }, out, narrow, activation } = forward;
        if activation.is_some() {
            let why = "record the activation and its gradient with `Elementwise` instead";
            return Err(Error::Unsupported {
                what: "the backward pass of a projection with an `activation`",
                why,
            });
        }
        let [batch, _, length, features] = x.shape();
        let [_, heads, _, dim] = out.shape();
        let mut tensors = CallTensors::new(device);
        tensors.read("x", x, Element::Float, [batch, 1, length, features])?;
        tensors.read("d_y", d_y, Element::Float, [batch, heads, length, dim])?;
        let shape = SideShape { heads, dim, features, narrow };
        shape.check("features")?;
        check_weight("linear.weight", &weight, shape.weight(), Access::Read, device)?;
        tensors.write("d_x", d_x, Element::Float, x.shape())?;
        tensors.write("d_weight", d_weight, Element::Float, weight.shape())?;
        tensors.write("d_bias", d_bias, Element::Float, [1, 1, 1, heads.saturating_mul(dim)])?;
        check_summed_rows("x", &x, if narrow { heads } else { 1 })?;
        // Only gradients of several products may be summed in one view.
        tensors.check_aliasing()
    }
}

/// Refuses more rows of `x`, `[batch, 1, length, features]`, or of its parts for `heads`, than
/// indices can count. Repeated rows take no memory, so no buffer limits their number.
pub(crate) fn check_summed_rows(tensor: &'static str, x: &TensorView, heads: usize) -> Result<(), Error> {
    let [batch, _, length, _] = x.shape();
    if count([batch, heads, length, 1]) <= LONGEST_AXIS {
        return Ok(());
    }
    let (shape, strides, offset) = (x.shape(), x.strides(), x.offset());
    Err(Error::Overflow { tensor, shape, strides, offset })
}

/// The tensor to which a gradient belongs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum GradientOf {
    Input,
    Weight,
    Bias,
    Appended,
    NormWeight,
    NormBias,
}

/// The gradients that a call writes. A view that several gradients share receives their sum.
#[derive(Default)]
pub(crate) struct Written<'a>(Vec<(GradientOf, &'static str, TensorView<'a>)>);

impl<'a> Written<'a> {
    /// Adds a gradient. Call it in the order in which the gradients are computed.
    pub fn add(
        &mut self,
        of: GradientOf,
        name: &'static str,
        view: TensorView<'a>,
        accumulates: bool,
    ) -> Gradient<'a> {
        let again = self.0.iter().any(|(other, _, before)| *other == of && same_view(before, &view));
        if !again {
            self.0.push((of, name, view));
        }
        Gradient { view, accumulates: accumulates || again }
    }

    /// Each view once, with its first name.
    pub fn views(&self) -> Vec<(&'static str, TensorView<'a>)> {
        self.0.iter().map(|(_, name, view)| (*name, *view)).collect()
    }
}

impl Projection {
    /// Records the gradients of `products` into an encoder or a pass, one after the other.
    ///
    /// Products may share one view for a gradient, for example queries, keys and values projected
    /// from one `x`. The view then receives the sum, in the order of the list. The sum is rounded
    /// to the view's type after each product.
    ///
    /// Sums are f32. The same call gives the same bits on every run, because no sum is atomic.
    /// Matrix units are not used.
    ///
    /// ```no_run
    /// # use wgpu_attention::{Error, Projection, TensorView, wgpu};
    /// # use wgpu_attention::matmul::{ProjectionBackward, ProjectionForward};
    /// # fn f(projection: &Projection, encoder: &mut wgpu::CommandEncoder, forward: [ProjectionForward; 3],
    /// #     d_qkv: [TensorView; 3], d_x: TensorView, d_weights: [TensorView; 3]) -> Result<(), Error> {
    /// // d_x is the sum over queries, keys and values.
    /// let products = [0, 1, 2].map(|n| {
    ///     ProjectionBackward::new(forward[n], d_qkv[n]).d_x(d_x).d_weight(d_weights[n])
    /// });
    /// projection.backward(encoder, &products)
    /// # }
    /// ```
    ///
    /// # Errors
    /// Every [`Error`] of tensors, for example gradients that overlap an input. Views
    /// of gradients that overlap without being equal are also errors. After an error nothing has
    /// been recorded.
    pub fn backward(&self, into: &mut impl Recorder, products: &[ProjectionBackward]) -> Result<(), Error> {
        self.prepare_backward(products)?.record(into);
        Ok(())
    }

    /// Checks the gradients, then compiles and binds their kernels. [`Prepared::record`] can then
    /// record them any number of times.
    ///
    /// # Errors
    /// See [`backward`](Self::backward).
    pub fn prepare_backward<'a>(&self, products: &[ProjectionBackward<'a>]) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        products.iter().try_for_each(|product| product.check(device))?;
        let inputs = |p: &ProjectionBackward<'a>| {
            [("x", p.forward.x), ("linear.weight", p.forward.linear.weight), ("d_y", p.d_y)]
        };
        let read: Vec<_> = products.iter().flat_map(inputs).collect();
        let mut written = Written::default();
        let mut calls = Vec::with_capacity(products.len());
        calls.extend(products.iter().map(|product| product.op(&mut written)));
        check_aliasing(&written.views(), &read, device)?;
        self.pipelines.with_fallbacks(|| {
            let dispatches =
                dispatch_backward::dispatches(&calls, &self.kernel_options, &self.pipelines.facts())?;
            self.pipelines.bind("projection backward", &dispatches, &self.bindings)
        })
    }
}
