//! Means of rows and their gradient: from checked tensors to dispatches.

use super::dispatches::grid;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, View, Width};
use crate::kernels::mean_pool::Pooled;
use crate::kernels::{KernelVariant, mean_pool, mean_pool_backward};
use crate::plan::{self, Rows, Tuning};
use crate::tensor::TensorView;

/// A mean of checked tensors.
#[derive(Clone, Copy)]
pub(crate) struct MeanPoolOp<'a> {
    /// `[batch, 1, length, features]`.
    pub x: TensorView<'a>,
    pub pooled: Pooled,
    /// What says which rows.
    pub which: Option<TensorView<'a>>,
    /// Means, of how many sequences.
    pub sequences: usize,
    /// The least length that is divided by, if any is.
    pub l2: Option<f32>,
}

/// Workgroups of a dispatch, at most; each takes several sequences where there are more.
const MOST_GROUPS: usize = 65535;

fn in_fours(tensors: &[Option<TensorView>]) -> Width {
    Width::of(tensors.iter().flatten().all(|t| t.layout.in_fours(3)))
}

impl<'a> MeanPoolOp<'a> {
    /// Views of lengths or of cu_seqlens, and of what is kept.
    fn which(&self, device: &DeviceFacts) -> [View; 2] {
        let view = View::optional(self.which, device);
        if self.pooled == Pooled::Keep { [View::default(), view] } else { [view, View::default()] }
    }

    /// How sequences are shared out: the kernel's form, the workgroups, and how far apart an invocation's sequences are.
    fn share(&self, tuning: &Tuning, device: &DeviceFacts) -> (Rows, usize, u32) {
        let rows = plan::rows(self.x.shape()[3], tuning.form.is_cpu(device));
        let each = (rows.workgroup / rows.lanes) as usize;
        let wanted = self.sequences.div_ceil(each);
        let groups = wanted.min(MOST_GROUPS).min(device.max_workgroups as usize);
        (rows, groups, (groups * each) as u32)
    }

    /// Writes the means.
    pub fn forward(
        &self,
        out: TensorView<'a>,
        tuning: &Tuning,
        device: &DeviceFacts,
    ) -> Dispatch<'a, KernelVariant> {
        let MeanPoolOp { x, pooled, which, sequences, l2 } = *self;
        let [_, _, length, features] = x.shape();
        let (rows, groups, step) = self.share(tuning, device);
        let [numbers, keep] = self.which(device);
        let params = mean_pool::Params {
            x: View::optional(Some(x), device),
            numbers,
            keep,
            out: View::optional(Some(out), device),
            features: features as u32,
            length: length as u32,
            sequences: sequences as u32,
            step,
            eps: l2.unwrap_or(0.0),
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let variant = mean_pool::MeanPool {
            rows,
            pooled,
            l2: l2.is_some(),
            x: x.dtype(),
            out: out.dtype(),
            width: in_fours(&[Some(x), Some(out)]),
        };
        let tensors = [Some(x), which, Some(out)];
        Dispatch {
            variant: KernelVariant::MeanPool(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: tensors.into_iter().flatten().map(|t| t.window(device)).collect(),
            grid: grid([groups, 1, 1]),
        }
    }

    /// Writes the gradient of the rows.
    pub fn backward(
        &self,
        d_out: TensorView<'a>,
        d_x: TensorView<'a>,
        accumulates: bool,
        tuning: &Tuning,
        device: &DeviceFacts,
    ) -> Dispatch<'a, KernelVariant> {
        let MeanPoolOp { x, pooled, which, sequences, l2 } = *self;
        let [_, _, length, features] = x.shape();
        let (rows, groups, step) = self.share(tuning, device);
        let [numbers, keep] = self.which(device);
        let x = l2.map(|_| x);
        let params = mean_pool_backward::Params {
            x: View::optional(x, device),
            numbers,
            keep,
            d_out: View::optional(Some(d_out), device),
            d_x: View::optional(Some(d_x), device),
            features: features as u32,
            length: length as u32,
            sequences: sequences as u32,
            step,
            eps: l2.unwrap_or(0.0),
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let variant = mean_pool_backward::MeanPoolBackward {
            rows,
            pooled,
            x: x.map(|x| x.dtype()),
            d_out: d_out.dtype(),
            d_x: d_x.dtype(),
            accumulates,
            width: in_fours(&[x, Some(d_out), Some(d_x)]),
        };
        let tensors = [x, which, Some(d_out), Some(d_x)];
        Dispatch {
            variant: KernelVariant::MeanPoolBackward(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: tensors.into_iter().flatten().map(|t| t.window(device)).collect(),
            grid: grid([groups, 1, 1]),
        }
    }
}
