//! Norms and their gradients: from checked tensors to dispatches.

use super::dispatches::{Dispatches, grid, in_scratch};
use super::project_backward::{Gradient, column_sums};
use crate::device::DeviceFacts;
use crate::error::Error;
use crate::kernel::{Dispatch, View, Width};
use crate::kernels::norm_sums::{COLUMNS, STATISTICS, STRIPS};
use crate::kernels::{KernelVariant, norm, norm_backward, norm_sums};
use crate::norm_config::NormConfig;
use crate::plan::{self, Rows, Tuning};
use crate::scratch::{Scratch, ScratchSize, Slot};
use crate::tensor::{DType, Layout, TensorView, count};

/// A norm of checked tensors.
#[derive(Clone, Copy)]
pub(crate) struct NormOp<'a> {
    pub config: NormConfig,
    /// `[batch, heads, length, features]`.
    pub x: TensorView<'a>,
    /// What is added to x first, and shaped as it.
    pub residual: Option<TensorView<'a>>,
    /// `[1, 1, 1, features]`.
    pub weight: Option<TensorView<'a>>,
    pub bias: Option<TensorView<'a>>,
}

/// Gradients of a norm, of checked tensors.
#[derive(Clone, Copy)]
pub(crate) struct NormGradients<'a> {
    pub d_out: TensorView<'a>,
    /// What is added to d_x: the gradient of the sum.
    pub d_sum: Option<TensorView<'a>>,
    pub d_x: Option<Gradient<'a>>,
    pub d_weight: Option<Gradient<'a>>,
    pub d_bias: Option<Gradient<'a>>,
}

/// Workgroups of a dispatch, at most; each takes several rows where there are more.
const MOST_GROUPS: usize = 65535;
/// Workgroups that fill a device.
const FULL: usize = 256;

fn optional(t: Option<TensorView>, device: &DeviceFacts) -> View {
    View::optional(t, device)
}

/// First element and stride of a vector.
fn vector(t: Option<TensorView>, device: &DeviceFacts) -> [u32; 2] {
    t.map_or([0; 2], |t| {
        let Layout { offset, strides, .. } = t.window(device).layout;
        [offset as u32, strides[3] as u32]
    })
}

fn in_fours(tensors: &[Option<TensorView>]) -> Width {
    Width::of(tensors.iter().flatten().all(|t| t.layout.in_fours(3)))
}

/// How rows are shared out: the kernel's form, the workgroups, and how far apart an invocation's rows are.
fn share(x: &TensorView, tuning: &Tuning, device: &DeviceFacts) -> (Rows, usize, u32) {
    let [batch, heads, length, features] = x.shape();
    let count = count([batch, heads, length, 1]);
    let rows = plan::rows_or_parts(count, features, tuning.form.is_cpu(device));
    let each = (rows.workgroup / rows.lanes) as usize;
    let wanted = count.div_ceil(each);
    let groups = wanted.min(MOST_GROUPS).min(device.max_workgroups as usize);
    (rows, groups, (groups * each) as u32)
}

impl<'a> NormOp<'a> {
    /// Writes the normalised rows to `out`, and `x + residual` to `sum`. `out` may be `x` itself.
    pub fn forward(
        &self,
        out: TensorView<'a>,
        sum: Option<TensorView<'a>>,
        tuning: &Tuning,
        device: &DeviceFacts,
    ) -> Dispatch<'a, KernelVariant> {
        let NormOp { config, x, residual, weight, bias } = *self;
        let [batch, heads, length, features] = x.shape();
        let (rows, groups, step) = share(&x, tuning, device);
        let in_place = out.buffer == x.buffer;
        let tensors = [Some(x).filter(|_| !in_place), residual, weight, bias, Some(out), sum];
        let ([w, w_step], [b, b_step]) = (vector(weight, device), vector(bias, device));
        let params = norm::Params {
            x: View::of(x, device),
            residual: optional(residual, device),
            out: View::of(out, device),
            sum: optional(sum, device),
            affine: [w, w_step, b, b_step],
            features: features as u32,
            heads: heads as u32,
            length: length as u32,
            rows: (batch * heads * length) as u32,
            step,
            eps: config.eps as f32,
            pad0: 0,
            pad1: 0,
        };
        let dtype = |t: Option<TensorView>| t.map(|t| t.dtype());
        let variant = norm::Norm {
            rows,
            centred: config.centred,
            x: x.dtype(),
            in_place,
            residual: dtype(residual),
            weight: dtype(weight),
            bias: dtype(bias),
            out: out.dtype(),
            sum: dtype(sum),
            width: in_fours(&tensors),
        };
        Dispatch {
            variant: KernelVariant::Norm(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: tensors.into_iter().flatten().map(|t| t.window(device)).collect(),
            grid: grid([groups, 1, 1]),
        }
    }

    /// Parts that the gradients of weight and bias are summed in, and rows of each.
    fn parts(&self) -> (usize, usize) {
        let [batch, heads, length, features] = self.x.shape();
        let rows = count([batch, heads, length, 1]);
        let wanted = FULL.div_ceil(features.div_ceil(COLUMNS));
        let part = rows.div_ceil(wanted).max(4 * STRIPS);
        (rows.div_ceil(part), part)
    }

    /// The temporary memory of the gradients of weight and bias.
    pub fn sums_size(&self) -> ScratchSize {
        let [batch, heads, length, features] = self.x.shape();
        let statistics = (count([batch, heads, length, 1]) as u64).saturating_mul(STATISTICS as u64 * 4);
        let parts = (self.parts().0 as u64).saturating_mul(features as u64).saturating_mul(8);
        ScratchSize::default().with(Slot::RowStats, statistics).with(Slot::Partials, parts)
    }

    /// All gradients that are wanted.
    ///
    /// # Errors
    /// A kernel that is put aside; a scratch that is too small.
    pub fn backward(
        &self,
        gradients: &NormGradients<'a>,
        scratch: &'a Scratch,
        tuning: &Tuning,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let NormGradients { d_x, d_weight, d_bias, d_out, .. } = *gradients;
        let [batch, heads, length, features] = self.x.shape();
        let rows = count([batch, heads, length, 1]);
        let sums = d_weight.is_some() || d_bias.is_some();
        let statistics = if sums {
            let shape = [1, 1, rows, STATISTICS];
            Some(in_scratch(scratch.buffer(Slot::RowStats)?, DType::F32, shape, 0))
        } else {
            None
        };
        let mut dispatches = Vec::new();
        if d_x.is_some() || sums {
            dispatches.push(self.backward_rows(gradients, statistics, tuning, device));
        }
        if let Some(statistics) = statistics {
            let (number, part) = self.parts();
            let shape = [1, 2, number, features];
            let parts = in_scratch(scratch.buffer(Slot::Partials)?, DType::F32, shape, 0);
            let params = norm_sums::Params {
                x: View::of(self.x, device),
                residual: optional(self.residual, device),
                d_out: View::of(d_out, device),
                features: features as u32,
                heads: heads as u32,
                length: length as u32,
                rows: rows as u32,
                part: part as u32,
                count: number as u32,
                pad0: 0,
                pad1: 0,
            };
            let variant = norm_sums::NormSums {
                x: self.x.dtype(),
                residual: self.residual.map(|t| t.dtype()),
                d_out: d_out.dtype(),
            };
            let tensors = [Some(self.x), self.residual, Some(d_out), Some(statistics), Some(parts)];
            dispatches.push(Dispatch {
                variant: KernelVariant::NormSums(variant),
                params: bytemuck::bytes_of(&params).to_vec(),
                tensors: tensors.into_iter().flatten().map(|t| t.window(device)).collect(),
                grid: grid([features.div_ceil(COLUMNS), number, 1]),
            });
            for (plane, sum) in [d_weight, d_bias].into_iter().enumerate() {
                if let Some(sum) = sum {
                    dispatches.push(column_sums(parts.slice(1, plane, 1), sum, device)?);
                }
            }
        }
        Ok(dispatches)
    }

    fn backward_rows(
        &self,
        gradients: &NormGradients<'a>,
        statistics: Option<TensorView<'a>>,
        tuning: &Tuning,
        device: &DeviceFacts,
    ) -> Dispatch<'a, KernelVariant> {
        let NormOp { config, x, residual, weight, .. } = *self;
        let NormGradients { d_out, d_sum, d_x, .. } = *gradients;
        let [batch, heads, length, features] = x.shape();
        let (rows, groups, step) = share(&x, tuning, device);
        let target = d_x.map(|d_x| d_x.view);
        // Without d_x nothing but the statistics is wanted.
        let read = |t: Option<TensorView<'a>>| t.filter(|_| target.is_some());
        let tensors = [Some(x), residual, read(weight), read(Some(d_out)), read(d_sum), target];
        let params = norm_backward::Params {
            x: View::of(x, device),
            residual: optional(residual, device),
            d_out: View::of(d_out, device),
            d_sum: optional(d_sum, device),
            d_x: optional(target, device),
            weight: vector(weight, device),
            features: features as u32,
            heads: heads as u32,
            length: length as u32,
            rows: (batch * heads * length) as u32,
            step,
            eps: config.eps as f32,
        };
        let dtype = |t: Option<TensorView>| t.map(|t| t.dtype());
        let variant = norm_backward::NormBackward {
            rows,
            centred: config.centred,
            x: x.dtype(),
            residual: dtype(residual),
            weight: dtype(read(weight)),
            d_out: if target.is_some() { d_out.dtype() } else { DType::F32 },
            d_sum: dtype(read(d_sum)),
            d_x: dtype(target),
            statistics: statistics.is_some(),
            accumulates: d_x.is_some_and(|d_x| d_x.accumulates),
            width: in_fours(&tensors),
        };
        Dispatch {
            variant: KernelVariant::NormBackward(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: tensors.into_iter().chain([statistics]).flatten().map(|t| t.window(device)).collect(),
            grid: grid([groups, 1, 1]),
        }
    }
}
