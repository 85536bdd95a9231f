//! Dispatches for activations, gated activations, residual sums and their gradients, from checked
//! tensors.

use super::kernels::elementwise::{ElementwiseCall, Join, x_width};
use super::kernels::elementwise_backward::ElementwiseBackwardCall;
use crate::device::DeviceFacts;
use crate::kernel::vec4_grid::Vec4Grid;
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
        let grid = Vec4Grid::of(out.shape(), device);
        let other = self.other();
        // A repeated x does not limit the width.
        let own = Some(self.x).filter(|_| !x_repeats);
        let width = Width::of_rows(&[own, other, Some(out)]);
        let join = match (self.multiply, self.residual) {
            (Some(_), _) => Join::Times,
            (None, Some(_)) => Join::Plus,
            (None, None) => Join::Alone,
        };
        let call = ElementwiseCall {
            x: self.x(x_repeats),
            other,
            out,
            dim: out.shape()[3] as u32,
            fours: grid.in_row,
            work: grid.in_head,
            step: grid.step,
            activation: self.activation,
            join,
            width,
            x_width: x_width(width, x_repeats),
        };
        call.dispatch(grid.workgroups, device)
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
        let grid = Vec4Grid::of(shared, device);
        let other = self.multiply.filter(|_| d_x.is_some());
        // A repeated x and its gradient do not limit the width.
        let [own, d_own] = [Some(self.x), d_x].map(|t| t.filter(|_| !x_repeats));
        let width = Width::of_rows(&[own, d_own, other, Some(d_out), d_multiply]);
        let call = ElementwiseBackwardCall {
            x: self.x(x_repeats),
            other,
            d_out,
            d_x,
            d_other: d_multiply,
            dim: dim as u32,
            fours: grid.in_row,
            work: grid.in_head,
            step: grid.step,
            activation: self.activation,
            accumulates,
            width,
            x_width: x_width(width, x_repeats),
            x_repeats,
        };
        call.dispatch(grid.workgroups, device)
    }
}
