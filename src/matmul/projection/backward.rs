//! The gradients of projections.

use super::dispatch_backward::{self, Gradient, LinearBackward};
use super::{Linear, ProjectionForward, check_weight};
use crate::device::DeviceFacts;
use crate::kernel::{Prepared, Recorder};
use crate::matmul::{Projection, SideShape};
use crate::tensor::{
    Access, CallTensors, Element, Error, LONGEST_AXIS, TensorView, check_aliasing, count, same_view,
};

/// The gradients of one product of a projection, `y = x Wᵀ + b`, each written where it is asked
/// for.
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
    /// `forward` as it was made, without an [`activation`](ProjectionForward::activation), whose
    /// `x` and weight are read, and the gradient with respect to its `out`, `[batch, heads, length,
    /// dim]`, in any strides; F32, F16 or BF16.
    pub fn new(forward: ProjectionForward<'a>, d_y: TensorView<'a>) -> Self {
        let [d_x, d_weight, d_bias] = [None; 3];
        ProjectionBackward { forward, d_y, d_x, d_weight, d_bias, accumulate: false }
    }

    /// Writes `d_x = d_y W` there, shaped as `x`; F32, F16 or BF16.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_x = d_x.into();
        self
    }

    /// Writes `d_W = d_yᵀ x`, summed over all rows of all sequences, there, shaped as the weight;
    /// F32, F16 or BF16. Of one narrow head that all share, it is the sum over them.
    pub fn d_weight(mut self, d_weight: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_weight = d_weight.into();
        self
    }

    /// Writes `d_b = Σ d_y`, over all rows of all sequences, there: `[heads · dim]`, see
    /// [`TensorView::vector`]; F32, F16 or BF16.
    pub fn d_bias(mut self, d_bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_bias = d_bias.into();
        self
    }

    /// Adds the gradients to what is there instead of writing over it. The sum is rounded to the
    /// gradient's type: choose F32 for many.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }

    /// What is to be computed.
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
            let why = "leave it out of the call, and record it and its gradient as `Elementwise`";
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
        // Only gradients of several products are summed in one view.
        tensors.check_aliasing()
    }
}

/// Refuses more rows of `x`, `[batch, 1, length, features]`, or of its parts for `heads`, than
/// indices count: repeated ones take no memory.
pub(crate) fn check_summed_rows(tensor: &'static str, x: &TensorView, heads: usize) -> Result<(), Error> {
    let [batch, _, length, _] = x.shape();
    if count([batch, heads, length, 1]) <= LONGEST_AXIS {
        return Ok(());
    }
    let (shape, strides, offset) = (x.shape(), x.strides(), x.offset());
    Err(Error::Overflow { tensor, shape, strides, offset })
}

/// Of what a gradient is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum GradientOf {
    Input,
    Weight,
    Bias,
    Appended,
    NormWeight,
    NormBias,
}

/// The gradients that a call writes. The same view, named again for as much, has the sum.
#[derive(Default)]
pub(crate) struct Written<'a>(Vec<(GradientOf, &'static str, TensorView<'a>)>);

impl<'a> Written<'a> {
    /// A gradient, in the order in which they are computed.
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

    /// Each view once, with the name it had first.
    pub fn views(&self) -> Vec<(&'static str, TensorView<'a>)> {
        self.0.iter().map(|(_, name, view)| (*name, *view)).collect()
    }
}

impl Projection {
    /// Records the gradients of `products` into an encoder or a pass, one after the other.
    ///
    /// Products that name the same view for a gradient, as queries, keys and values projected from
    /// one `x` do, give their sum there, added up in the order of the list and rounded to the
    /// view's type after each. Sums are f32. The same call gives the same bits on every run:
    /// nothing is added up atomically. Matrix units are not used.
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
    /// Everything that [`Error`] lists for tensors, gradients that share a buffer with an input, views of gradients that
    /// overlap and are not the same; then nothing has been recorded.
    pub fn backward(&self, into: &mut impl Recorder, products: &[ProjectionBackward]) -> Result<(), Error> {
        self.prepare_backward(products)?.record(into);
        Ok(())
    }

    /// Checks the gradients, compiles and binds what they need. [`Prepared::record`] then records
    /// them as often as you like.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
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
