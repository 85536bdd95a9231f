//! Dispatches for norms and their gradients, from checked tensors.

use super::config::NormConfig;
use super::gate::NormGate;
use super::kernels::norm::Gating;
use super::kernels::norm_sums::{self, COLUMNS, STATISTICS, STRIPS};
use super::kernels::{norm, norm_backward};
use crate::device::DeviceFacts;
use crate::kernel::{
    Dispatch, Dispatches, KernelOptions, Scratch, ScratchSize, Slot, Source, Width, in_scratch,
};
use crate::matmul::projection::dispatch_backward::{Gradient, column_sums};
use crate::rows::plan::{self, Rows};
use crate::tensor::{DType, Error, Layout, TensorView, count, eps_in_f32, same_view};

/// The tensors that a norm reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormInputs<'a> {
    /// `[batch, heads, length, features]`.
    pub x: TensorView<'a>,
    /// Added to x before the norm; it has the shape of x.
    pub residual: Option<TensorView<'a>>,
    /// `[1, 1, 1, features]`.
    pub weight: Option<TensorView<'a>>,
    pub bias: Option<TensorView<'a>>,
    /// With the shape of x. A gated norm has no residual.
    pub gate: Option<NormGate<TensorView<'a>>>,
}

impl<'a> NormInputs<'a> {
    pub fn new(x: TensorView<'a>) -> Self {
        NormInputs { x, residual: None, weight: None, bias: None, gate: None }
    }

    /// The gate's tensor, and its use.
    fn gating(&self) -> (Option<TensorView<'a>>, Option<Gating>) {
        let of = |gate: NormGate<_>| Gating { activation: gate.activation, first: gate.first };
        (self.gate.map(|gate| gate.gate), self.gate.map(of))
    }
}

/// A norm of checked tensors.
#[derive(Clone, Copy)]
pub(crate) struct NormOp<'a> {
    pub config: NormConfig,
    pub inputs: NormInputs<'a>,
}

/// Gradients of a norm, of checked tensors.
#[derive(Clone, Copy)]
pub(crate) struct NormGradients<'a> {
    pub d_out: TensorView<'a>,
    /// The gradient of the sum, which is added to d_x.
    pub d_sum: Option<TensorView<'a>>,
    pub d_x: Option<Gradient<'a>>,
    pub d_gate: Option<Gradient<'a>>,
    pub d_weight: Option<Gradient<'a>>,
    pub d_bias: Option<Gradient<'a>>,
}

/// The largest number of workgroups of a dispatch. If there are more rows, each workgroup processes
/// several.
const MOST_GROUPS: usize = 65535;
/// Workgroups that fill a device.
const FULL: usize = 256;

/// First element and stride of a vector.
fn vector(t: Option<TensorView>, device: &DeviceFacts) -> [u32; 2] {
    t.map_or([0; 2], |t| {
        let Layout { offset, strides, .. } = t.window(device).layout;
        [offset as u32, strides[3] as u32]
    })
}

/// Distributes the rows. Returns the kernel's variant, the number of workgroups, and the distance
/// between an invocation's rows.
fn share(x: &TensorView, kernel_options: &KernelOptions, device: &DeviceFacts) -> (Rows, usize, u32) {
    let [batch, heads, length, features] = x.shape();
    let count = count([batch, heads, length, 1]);
    let cpu = kernel_options.target.is_cpu(device);
    let rows = if kernel_options.batch_invariant {
        plan::rows(features, cpu)
    } else {
        plan::rows_or_parts(count, features, cpu)
    };
    let each = (rows.workgroup / rows.lanes) as usize;
    let wanted = count.div_ceil(each);
    let groups = wanted.min(MOST_GROUPS).min(device.max_workgroups as usize);
    (rows, groups, (groups * each) as u32)
}

impl<'a> NormOp<'a> {
    /// Writes the normalised rows to `out`, and `x + residual` to `sum`. `out` may be `x`.
    pub fn forward(
        &self,
        out: TensorView<'a>,
        sum: Option<TensorView<'a>>,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let NormOp { config, inputs: NormInputs { x, residual, weight, bias, .. } } = *self;
        let (gate, gating) = self.inputs.gating();
        let [batch, heads, length, features] = x.shape();
        let (shares, groups, step) = share(&x, kernel_options, device);
        let in_place = same_view(&out, &x);
        let ([w, w_step], [b, b_step]) = (vector(weight, device), vector(bias, device));
        let call = norm::NormCall {
            x: Source { tensor: x, in_place },
            residual,
            weight,
            bias,
            gate,
            out,
            sum,
            affine: [w, w_step, b, b_step],
            features: features as u32,
            heads: heads as u32,
            length: length as u32,
            rows: (batch * heads * length) as u32,
            step,
            eps: eps_in_f32(config.eps),
            shares,
            centred: config.centred,
            gating,
            width: Width::of_rows(&[Some(x), residual, weight, bias, gate, Some(out), sum]),
        };
        call.dispatch([groups, 1, 1], device)
    }

    /// The number of partial sums for the gradients of weight and bias, and the rows of each
    /// partial sum.
    fn parts(&self) -> (usize, usize) {
        let [batch, heads, length, features] = self.inputs.x.shape();
        let rows = count([batch, heads, length, 1]);
        let wanted = FULL.div_ceil(features.div_ceil(COLUMNS));
        let part = rows.div_ceil(wanted).max(4 * STRIPS);
        (rows.div_ceil(part), part)
    }

    /// The temporary memory of the gradients of weight and bias.
    pub fn sums_size(&self) -> ScratchSize {
        let [batch, heads, length, features] = self.inputs.x.shape();
        let statistics = (count([batch, heads, length, 1]) as u64).saturating_mul(STATISTICS as u64 * 4);
        let parts = (self.parts().0 as u64).saturating_mul(features as u64).saturating_mul(8);
        ScratchSize::default().with(Slot::RowStats, statistics).with(Slot::Partials, parts)
    }

    /// All requested gradients.
    ///
    /// # Errors
    /// The scratch is too small.
    pub fn backward(
        &self,
        gradients: &NormGradients<'a>,
        scratch: &'a Scratch,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let NormGradients { d_x, d_gate, d_weight, d_bias, d_out, .. } = *gradients;
        let [batch, heads, length, features] = self.inputs.x.shape();
        let rows = count([batch, heads, length, 1]);
        let sums = d_weight.is_some() || d_bias.is_some();
        let statistics = if sums {
            let shape = [1, 1, rows, STATISTICS];
            Some(in_scratch(scratch.buffer(Slot::RowStats)?, DType::F32, shape, 0))
        } else {
            None
        };
        let mut dispatches = Vec::new();
        if d_x.is_some() || d_gate.is_some() || sums {
            dispatches.push(self.backward_rows(gradients, statistics, kernel_options, device));
        }
        if let Some(statistics) = statistics {
            let (number, part) = self.parts();
            let shape = [1, 2, number, features];
            let parts = in_scratch(scratch.buffer(Slot::Partials)?, DType::F32, shape, 0);
            let (gate, gating) = self.inputs.gating();
            let call = norm_sums::NormSumsCall {
                x: self.inputs.x,
                residual: self.inputs.residual,
                gate,
                d_out,
                statistics,
                parts,
                features: features as u32,
                heads: heads as u32,
                length: length as u32,
                rows: rows as u32,
                part: part as u32,
                count: number as u32,
                gating,
            };
            dispatches.push(call.dispatch([features.div_ceil(COLUMNS), number, 1], device));
            for (plane, sum) in [d_weight, d_bias].into_iter().enumerate() {
                if let Some(sum) = sum {
                    dispatches.push(column_sums(parts.slice(1, plane, 1), sum, device));
                }
            }
        }
        Ok(dispatches)
    }

    fn backward_rows(
        &self,
        gradients: &NormGradients<'a>,
        statistics: Option<TensorView<'a>>,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let NormOp { config, inputs: NormInputs { x, residual, weight, bias, .. } } = *self;
        let NormGradients { d_out, d_sum, d_x, d_gate, .. } = *gradients;
        let (gate, gating) = self.inputs.gating();
        let [batch, heads, length, features] = x.shape();
        let (shares, groups, step) = share(&x, kernel_options, device);
        let accumulates = d_x.or(d_gate).is_some_and(|gradient| gradient.accumulates);
        let [d_x, d_gate] = [d_x, d_gate].map(|gradient| gradient.map(|gradient| gradient.view));
        // Without d_x and d_gate the kernel only computes the statistics.
        let read = |t: Option<TensorView<'a>>| t.filter(|_| d_x.is_some() || d_gate.is_some());
        let [weight, d_out, d_sum] = [read(weight), read(Some(d_out)), read(d_sum)];
        let bias = bias.filter(|_| d_gate.is_some() && gating.is_some_and(|gating| !gating.first));
        let ([w, w_step], [b, b_step]) = (vector(weight, device), vector(bias, device));
        let call = norm_backward::NormBackwardCall {
            x,
            residual,
            weight,
            bias,
            gate,
            d_out,
            d_sum,
            d_x,
            d_gate,
            statistics,
            affine: [w, w_step, b, b_step],
            features: features as u32,
            heads: heads as u32,
            length: length as u32,
            rows: (batch * heads * length) as u32,
            step,
            eps: eps_in_f32(config.eps),
            shares,
            centred: config.centred,
            gating,
            accumulates,
            width: Width::of_rows(&[Some(x), residual, weight, bias, gate, d_out, d_sum, d_x, d_gate]),
        };
        call.dispatch([groups, 1, 1], device)
    }
}
