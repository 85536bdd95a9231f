//! Activations, gated ones, residual sums and their gradients: from checked tensors to dispatches.

use super::dispatches::grid;
use crate::block_config::Activation;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, View, Width};
use crate::kernels::pointwise::{Join, WORKGROUP};
use crate::kernels::{KernelVariant, pointwise, pointwise_backward};
use crate::tensor::TensorView;

/// `f(x)`, `f(x) · other` or `f(x) + other` of checked tensors of one shape.
#[derive(Clone, Copy)]
pub(crate) struct PointwiseOp<'a> {
    pub activation: Option<Activation>,
    /// Shaped as the others, or of one channel, which then is that of all channels of a row.
    pub x: TensorView<'a>,
    pub times: Option<TensorView<'a>>,
    pub plus: Option<TensorView<'a>>,
}

/// Workgroups of a head's rows, at most; each takes more where there are more.
const MOST_GROUPS: usize = 65535;

/// Fours of a row, fours of a head's rows, workgroups for them, invocations in those.
fn share([_, _, length, dim]: [usize; 4], device: &DeviceFacts) -> (usize, usize, usize, u32) {
    let fours = dim.div_ceil(4);
    let work = length.saturating_mul(fours);
    let groups = work.div_ceil(WORKGROUP).min(MOST_GROUPS).min(device.max_workgroups as usize);
    (fours, work, groups, (groups * WORKGROUP) as u32)
}

/// The width of loads and stores: an `x` that repeats and its gradient do not limit it.
fn in_fours(x: &[Option<TensorView>], others: &[Option<TensorView>], x_repeats: bool) -> Width {
    let x = if x_repeats { &[] } else { x };
    Width::of(x.iter().chain(others).flatten().all(|t| t.layout.in_fours(3)))
}

impl<'a> PointwiseOp<'a> {
    fn other(&self) -> Option<TensorView<'a>> {
        self.times.or(self.plus)
    }

    /// True if `x` has one channel for all of those of `out`.
    fn x_repeats(&self, out: &TensorView) -> bool {
        self.x.shape()[3] == 1 && out.shape()[3] > 1
    }

    /// Where x is; one channel that repeats has a stride of 0.
    fn x_view(&self, x_repeats: bool, device: &DeviceFacts) -> View {
        let mut view = View::optional(Some(self.x), device);
        if x_repeats {
            view.strides[3] = 0;
        }
        view
    }

    /// Writes it to `out`.
    pub fn forward(&self, out: TensorView<'a>, device: &DeviceFacts) -> Dispatch<'a, KernelVariant> {
        let x = self.x;
        let x_repeats = self.x_repeats(&out);
        let [batch, heads, _, dim] = out.shape();
        let (fours, work, groups, step) = share(out.shape(), device);
        let tensors = [Some(x), self.other(), Some(out)];
        let params = pointwise::Params {
            x: self.x_view(x_repeats, device),
            other: View::optional(self.other(), device),
            out: View::optional(Some(out), device),
            dim: dim as u32,
            fours: fours as u32,
            work: work as u32,
            step,
        };
        let join = match (self.times, self.plus) {
            (Some(_), _) => Join::Times,
            (None, Some(_)) => Join::Plus,
            (None, None) => Join::Alone,
        };
        let variant = pointwise::Pointwise {
            activation: self.activation,
            join,
            x: x.dtype(),
            other: self.other().map(|t| t.dtype()),
            out: out.dtype(),
            width: in_fours(&tensors[..1], &tensors[1..], x_repeats),
            x_repeats,
        };
        Dispatch {
            variant: KernelVariant::Pointwise(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: tensors.into_iter().flatten().map(|t| t.window(device)).collect(),
            grid: grid([groups, heads, batch]),
        }
    }

    /// Writes the gradients of x and of the tensor that f(x) is multiplied by. The gradient of an x that repeats is a sum over the
    /// channels of a row.
    pub fn backward(
        &self,
        d_out: TensorView<'a>,
        d_x: Option<TensorView<'a>>,
        d_times: Option<TensorView<'a>>,
        accumulates: bool,
        device: &DeviceFacts,
    ) -> Dispatch<'a, KernelVariant> {
        let x = self.x;
        let x_repeats = self.x_repeats(&d_out);
        let [batch, heads, length, dim] = d_out.shape();
        let shared = if x_repeats { [batch, heads, length, 1] } else { d_out.shape() };
        let (fours, work, groups, step) = share(shared, device);
        let read = self.times.filter(|_| d_x.is_some());
        let tensors = [Some(x), read, Some(d_out), d_x, d_times];
        let params = pointwise_backward::Params {
            x: self.x_view(x_repeats, device),
            other: View::optional(self.times, device),
            d_out: View::optional(Some(d_out), device),
            d_x: View::optional(d_x, device),
            d_other: View::optional(d_times, device),
            dim: dim as u32,
            fours: fours as u32,
            work: work as u32,
            step,
        };
        let dtype = |t: Option<TensorView>| t.map(|t| t.dtype());
        let variant = pointwise_backward::PointwiseBackward {
            activation: self.activation,
            x: x.dtype(),
            other: dtype(read),
            d_out: d_out.dtype(),
            d_x: dtype(d_x),
            d_other: dtype(d_times),
            accumulates,
            width: in_fours(&[Some(x), d_x], &[read, Some(d_out), d_times], x_repeats),
            x_repeats,
        };
        Dispatch {
            variant: KernelVariant::PointwiseBackward(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: tensors.into_iter().flatten().map(|t| t.window(device)).collect(),
            grid: grid([groups, heads, batch]),
        }
    }
}
