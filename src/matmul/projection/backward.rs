//! The gradients of projections.

use super::check_weight;
use super::dispatch_backward::{self, Gradient, LinearBackward};
use crate::device::DeviceFacts;
use crate::kernel::{Prepared, Recorder};
use crate::matmul::{Projection, SideShape};
use crate::tensor::{
    Access, CallTensors, Element, Error, LONGEST_AXIS, TensorView, check_aliasing, count, same_view,
};

/// The gradients of one product of a projection, `y = x Wᵀ + b`, each written where it is asked for.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct ProjectionBackward<'a> {
    pub(crate) x: TensorView<'a>,
    pub(crate) weight: TensorView<'a>,
    pub(crate) d_y: TensorView<'a>,
    pub(crate) d_x: Option<TensorView<'a>>,
    pub(crate) d_weight: Option<TensorView<'a>>,
    pub(crate) d_bias: Option<TensorView<'a>>,
    pub(crate) accumulate: bool,
    pub(crate) narrow: bool,
}

impl<'a> ProjectionBackward<'a> {
    /// `x` `[batch, 1, length, features]` and `weight` `[heads · dim, features]` are those of
    /// [`ProjectionForward`](crate::matmul::ProjectionForward); `d_y` `[batch, heads, length, dim]`, in any strides, is the gradient
    /// with respect to its output. Each is F32, F16 or BF16.
    pub fn new(x: TensorView<'a>, weight: TensorView<'a>, d_y: TensorView<'a>) -> Self {
        ProjectionBackward {
            x,
            weight,
            d_y,
            d_x: None,
            d_weight: None,
            d_bias: None,
            accumulate: false,
            narrow: false,
        }
    }

    /// Writes `d_x = d_y W` there, shaped as `x`; F32, F16 or BF16.
    pub fn d_x(mut self, d_x: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_x = d_x.into();
        self
    }

    /// Writes `d_W = d_yᵀ x`, summed over all rows of all sequences, there, shaped as the weight; F32, F16 or BF16.
    pub fn d_weight(mut self, d_weight: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_weight = d_weight.into();
        self
    }

    /// Writes `d_b = Σ d_y`, over all rows of all sequences, there: `[heads · dim]`, see [`TensorView::vector`]; F32, F16 or
    /// BF16.
    pub fn d_bias(mut self, d_bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_bias = d_bias.into();
        self
    }

    /// Adds the gradients to what is there instead of writing over it. The sum is rounded to the gradient's type: choose
    /// F32 for many.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }

    /// The gradients of a narrow product, in which each head read only its own slice of `x`: the weight and its gradient are
    /// `[1, heads or 1, dim, features / heads]`. Of one head that all share, the gradient is the sum over them.
    pub fn narrow(mut self, narrow: bool) -> Self {
        self.narrow = narrow;
        self
    }

    /// What is to be computed.
    fn op(&self, written: &mut Written<'a>) -> LinearBackward<'a> {
        let mut gradient = |of, name: &'static str, view: Option<TensorView<'a>>| {
            Some(written.add(of, name, view?, self.accumulate))
        };
        LinearBackward {
            w: self.weight,
            d_y: self.d_y,
            d_x: gradient(GradientOf::Input, "d_x", self.d_x),
            d_w: gradient(GradientOf::Weight, "d_weight", self.d_weight).map(|d_w| (self.x, d_w)),
            d_b: gradient(GradientOf::Bias, "d_bias", self.d_bias),
            narrow: self.narrow,
        }
    }

    fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let ProjectionBackward { x, weight, d_y, d_x, d_weight, d_bias, narrow, .. } = *self;
        let [batch, _, length, features] = x.shape();
        let [_, heads, _, dim] = d_y.shape();
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

/// Refuses more rows of `x`, `[batch, 1, length, features]`, or of its parts for `heads`, than indices count: repeated ones take
/// no memory.
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
    /// Products that name the same view for a gradient, as queries, keys and values projected from one `x` do, give their
    /// sum there, added up in the order of the list and rounded to the view's type after each. Sums are f32. The same call gives
    /// the same bits on every run: nothing is added up atomically. Matrix units are not used.
    ///
    /// ```no_run
    /// # use wgpu_attention::{Error, Projection, TensorView, wgpu};
    /// # use wgpu_attention::matmul::ProjectionBackward;
    /// # fn f(projection: &Projection, encoder: &mut wgpu::CommandEncoder, x: TensorView, weights: [TensorView; 3],
    /// #     d_qkv: [TensorView; 3], d_x: TensorView, d_weights: [TensorView; 3]) -> Result<(), Error> {
    /// // d_x is the sum over queries, keys and values.
    /// let products = [0, 1, 2].map(|n| {
    ///     ProjectionBackward::new(x, weights[n], d_qkv[n]).d_x(d_x).d_weight(d_weights[n])
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

    /// Checks the gradients, compiles and binds what they need. [`Prepared::record`] then records them as often as you like.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(&self, products: &[ProjectionBackward]) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        products.iter().try_for_each(|product| product.check(device))?;
        let read: Vec<_> =
            products.iter().flat_map(|p| [("x", p.x), ("linear.weight", p.weight), ("d_y", p.d_y)]).collect();
        let mut written = Written::default();
        let mut calls = Vec::with_capacity(products.len());
        calls.extend(products.iter().map(|product| product.op(&mut written)));
        check_aliasing(&written.views(), &read)?;
        self.pipelines.with_fallbacks(|| {
            let dispatches =
                dispatch_backward::dispatches(&calls, &self.kernel_options, &self.pipelines.facts())?;
            self.pipelines.bind("projection backward", &dispatches, &self.bindings)
        })
    }
}
