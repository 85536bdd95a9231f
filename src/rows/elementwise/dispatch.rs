//! Dispatches for activations, gated activations, residual sums and their gradients, from checked
//! tensors.

use super::kernels::elementwise::{ElementwiseCall, Join, x_width};
use super::kernels::elementwise_backward::ElementwiseBackwardCall;
use crate::device::DeviceFacts;
use crate::kernel::pieces::Fours;
use crate::kernel::{Dispatch, Width};
use crate::matmul::Activation;
use crate::tensor::TensorView;

/// `f(x)`, `f(x) · other` or `f(x) + other` of checked tensors of one shape.
#[derive(Clone, Copy)]
pub(crate) struct ElementwiseOp<'a> {
    pub activation: Option<Activation>,
    /// It has the shape of the other tensors, or one channel. One channel is repeated over all
    /// channels of a row.
    pub x: TensorView<'a>,
    pub multiply: Option<TensorView<'a>>,
    pub residual: Option<TensorView<'a>>,
}

/// The width of loads and stores. A repeated `x` and its gradient do not limit it.
fn in_fours(x: &[Option<TensorView>], others: &[Option<TensorView>], x_repeats: bool) -> Width {
    let x = if x_repeats { &[] } else { x };
    Width::of(x.iter().chain(others).flatten().all(|t| t.layout.in_fours(3)))
}

impl<'a> ElementwiseOp<'a> {
    fn other(&self) -> Option<TensorView<'a>> {
        self.multiply.or(self.residual)
    }

    /// True if `x` has one channel that is repeated over the channels of `out`.
    fn x_repeats(&self, out: &TensorView) -> bool {
        self.x.shape()[3] == 1 && out.shape()[3] > 1
    }

    /// The view of `x`. A repeated channel has a stride of 0.
    fn x(&self, x_repeats: bool) -> TensorView<'a> {
        let mut x = self.x;
        if x_repeats {
            x.layout.strides[3] = 0;
        }
        x
    }

    /// Writes the result to `out`.
    pub fn forward(&self, out: TensorView<'a>, device: &DeviceFacts) -> Dispatch<'a> {
        let x_repeats = self.x_repeats(&out);
        let [batch, heads, _, dim] = out.shape();
        let Fours { each, work, groups, step } = Fours::of(out.shape(), device);
        let other = self.other();
        let width = in_fours(&[Some(self.x)], &[other, Some(out)], x_repeats);
        let join = match (self.multiply, self.residual) {
            (Some(_), _) => Join::Times,
            (None, Some(_)) => Join::Plus,
            (None, None) => Join::Alone,
        };
        let call = ElementwiseCall {
            x: self.x(x_repeats),
            other,
            out,
            dim: dim as u32,
            fours: each as u32,
            work: work as u32,
            step,
            activation: self.activation,
            join,
            width,
            x_width: x_width(width, x_repeats),
        };
        call.dispatch([groups, heads, batch], device)
    }

    /// Writes the gradients of x and of `multiply`. The gradient of a repeated x is a sum over the
    /// channels of a row.
    pub fn backward(
        &self,
        d_out: TensorView<'a>,
        d_x: Option<TensorView<'a>>,
        d_multiply: Option<TensorView<'a>>,
        accumulates: bool,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let x_repeats = self.x_repeats(&d_out);
        let [batch, heads, length, dim] = d_out.shape();
        let shared = if x_repeats { [batch, heads, length, 1] } else { d_out.shape() };
        let Fours { each, work, groups, step } = Fours::of(shared, device);
        let other = self.multiply.filter(|_| d_x.is_some());
        let width = in_fours(&[Some(self.x), d_x], &[other, Some(d_out), d_multiply], x_repeats);
        let call = ElementwiseBackwardCall {
            x: self.x(x_repeats),
            other,
            d_out,
            d_x,
            d_other: d_multiply,
            dim: dim as u32,
            fours: each as u32,
            work: work as u32,
            step,
            activation: self.activation,
            accumulates,
            width,
            x_width: x_width(width, x_repeats),
            x_repeats,
        };
        call.dispatch([groups, heads, batch], device)
    }
}
