//! Dispatches for means of rows and their gradient, from checked tensors.

use super::kernels::mean_pool::{self, Pooled};
use super::kernels::mean_pool_backward;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, KernelOptions, Width};
use crate::rows::plan::{self, Rows};
use crate::tensor::TensorView;

/// A mean of checked tensors.
#[derive(Clone, Copy)]
pub(crate) struct MeanPoolOp<'a> {
    /// `[batch, 1, length, features]`.
    pub x: TensorView<'a>,
    pub pooled: Pooled,
    /// The tensor that selects the rows.
    pub which: Option<TensorView<'a>>,
    /// The number of sequences, each with one mean.
    pub sequences: usize,
    /// The lower bound of the divisor, if means are divided by their length.
    pub l2: Option<f32>,
}

/// The largest number of workgroups of a dispatch. If there are more sequences, each workgroup
/// processes several.
const MOST_GROUPS: usize = 65535;

impl<'a> MeanPoolOp<'a> {
    /// The tensors of numbers (lengths or cu_seqlens) and of the mask of rows.
    fn which(&self) -> [Option<TensorView<'a>>; 2] {
        if self.pooled == Pooled::Keep { [None, self.which] } else { [self.which, None] }
    }

    /// Distributes the sequences. Returns the kernel's variant, the number of workgroups, and the
    /// distance between an invocation's sequences.
    fn share(&self, kernel_options: &KernelOptions, device: &DeviceFacts) -> (Rows, usize, u32) {
        let rows = plan::rows(self.x.shape()[3], kernel_options.target.is_cpu(device));
        let each = (rows.workgroup / rows.lanes) as usize;
        let wanted = self.sequences.div_ceil(each);
        let groups = wanted.min(MOST_GROUPS).min(device.max_workgroups as usize);
        (rows, groups, (groups * each) as u32)
    }

    /// Writes the means.
    pub fn forward(
        &self,
        out: TensorView<'a>,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let MeanPoolOp { x, pooled, sequences, l2, .. } = *self;
        let [_, _, length, features] = x.shape();
        let (rows, groups, step) = self.share(kernel_options, device);
        let [numbers, keep] = self.which();
        let call = mean_pool::MeanPoolCall {
            x,
            numbers,
            keep,
            out,
            features: features as u32,
            length: length as u32,
            sequences: sequences as u32,
            step,
            eps: l2.unwrap_or(0.0),
            rows,
            pooled,
            l2: l2.is_some(),
            width: Width::of_rows(&[Some(x), Some(out)]),
        };
        call.dispatch([groups, 1, 1], device)
    }

    /// Writes the gradient of the rows.
    pub fn backward(
        &self,
        d_out: TensorView<'a>,
        d_x: TensorView<'a>,
        accumulates: bool,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let MeanPoolOp { x, pooled, sequences, l2, .. } = *self;
        let [_, _, length, features] = x.shape();
        let (rows, groups, step) = self.share(kernel_options, device);
        let [numbers, keep] = self.which();
        let x = l2.map(|_| x);
        let call = mean_pool_backward::MeanPoolBackwardCall {
            x,
            numbers,
            keep,
            d_out,
            d_x,
            features: features as u32,
            length: length as u32,
            sequences: sequences as u32,
            step,
            eps: l2.unwrap_or(0.0),
            rows,
            pooled,
            accumulates,
            width: Width::of_rows(&[x, Some(d_out), Some(d_x)]),
        };
        call.dispatch([groups, 1, 1], device)
    }
}
