//! The dispatches of local attention, of its gradients and of predicted positions.

use super::kernels::local_columns::LocalColumnsCall;
use super::kernels::local_gradients::LocalGradientsCall;
use super::kernels::local_positions::LocalPositionsCall;
use super::kernels::local_positions_backward::LocalPositionsBackwardCall;
use super::kernels::local_rows::LocalRowsCall;
use super::kernels::local_weights::LocalWeightsCall;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, Width, fits, in_scratch};
use crate::rows::totals::WORKGROUP;
use crate::tensor::{DType, Error, Shape, TensorView, count};

/// A checked problem of local attention.
#[derive(Clone, Copy)]
pub(crate) struct LocalProblem<'a> {
    pub shape: Shape,
    pub q: TensorView<'a>,
    pub k: TensorView<'a>,
    pub v: TensorView<'a>,
    /// `[batch, heads or 1, q_len, 1]`.
    pub positions: TensorView<'a>,
    /// `[batch or 1, 1, 1, 1]`.
    pub lengths: Option<TensorView<'a>>,
    pub half_window: usize,
    pub sigma: Option<f64>,
    pub scale: f64,
}

/// The tensors that a backward call adds to it.
#[derive(Clone, Copy)]
pub(crate) struct LocalGradientViews<'a> {
    pub d_out: TensorView<'a>,
    pub d_q: Option<TensorView<'a>>,
    pub d_k: Option<TensorView<'a>>,
    pub d_v: Option<TensorView<'a>>,
    pub d_positions: Option<TensorView<'a>>,
    pub accumulates: bool,
}

/// Returns the number of workgroups for `wanted` items of a head, within the device's limit. Each
/// workgroup computes several items if there are more.
fn workgroups(wanted: usize, device: &DeviceFacts) -> usize {
    wanted.min(device.max_workgroups as usize)
}

impl<'a> LocalProblem<'a> {
    /// Returns the most keys of a window.
    fn widest(&self) -> usize {
        self.half_window.saturating_mul(2).saturating_add(1).min(self.shape.kv_len)
    }

    fn band_shape(&self, kinds: usize) -> [usize; 4] {
        let Shape { batch, heads, q_len, .. } = self.shape;
        [kinds * batch, heads, q_len, self.widest()]
    }

    /// Returns the bytes of the weights in windows, and for a backward pass of the gradients of
    /// scores.
    pub fn band_bytes(&self, backward: bool, device: &DeviceFacts) -> Result<u64, Error> {
        fits(count(self.band_shape(1 + usize::from(backward))) as u64, 4, device)
    }

    /// Returns 1 / √2σ and 1 / σ².
    fn gaussian(&self) -> [f32; 2] {
        self.sigma.map_or([0.0; 2], |sigma| {
            [1.0 / (std::f64::consts::SQRT_2 * sigma), 1.0 / (sigma * sigma)].map(|x| x as f32)
        })
    }

    /// Returns the dispatches of a forward call.
    pub fn forward(
        &self,
        out: TensorView<'a>,
        weights: Option<TensorView<'a>>,
        memory: &'a wgpu::Buffer,
        device: &DeviceFacts,
    ) -> Dispatches<'a> {
        let Shape { batch, heads, q_len, kv_len, head_dim, .. } = self.shape;
        let LocalProblem { q, k, positions, lengths, .. } = *self;
        let band = in_scratch(memory, DType::F32, self.band_shape(1), 0);
        let step = workgroups(q_len, device);
        let call = LocalWeightsCall {
            q,
            k,
            positions,
            lengths,
            band,
            weights,
            q_len: q_len as u32,
            kv_len: kv_len as u32,
            head_dim: head_dim as u32,
            group: self.shape.group() as u32,
            half_window: self.half_window as i32,
            step: step as u32,
            scale: self.scale as f32,
            narrowness: self.gaussian()[0],
            width: Width::of_rows(&[q, k]),
        };
        let weighed = call.dispatch([step, heads, batch], device);
        vec![weighed, self.over_keys(band, self.v, out, false, device)]
    }

    /// Returns the dispatches of a backward call.
    pub fn backward(
        &self,
        gradients: &LocalGradientViews<'a>,
        memory: &'a wgpu::Buffer,
        device: &DeviceFacts,
    ) -> Dispatches<'a> {
        let Shape { batch, heads, q_len, kv_len, head_dim, value_dim, .. } = self.shape;
        let LocalProblem { q, k, v, positions, lengths, .. } = *self;
        let LocalGradientViews { d_out, d_q, d_k, d_v, d_positions, accumulates } = *gradients;
        let bands = in_scratch(memory, DType::F32, self.band_shape(2), 0);
        let step = workgroups(q_len, device);
        let [narrowness, steepness] = self.gaussian();
        let own_heads = positions.shape()[1];
        let call = LocalGradientsCall {
            q,
            k,
            v,
            d_out,
            positions,
            lengths,
            band: bands,
            d_positions,
            q_len: q_len as u32,
            kv_len: kv_len as u32,
            head_dim: head_dim as u32,
            value_dim: value_dim as u32,
            batch: batch as u32,
            group: self.shape.group() as u32,
            heads: (heads / own_heads) as u32,
            half_window: self.half_window as i32,
            step: step as u32,
            scale: self.scale as f32,
            narrowness,
            steepness,
            accumulates: accumulates && d_positions.is_some(),
            width: Width::of_rows(&[q, k, v, d_out]),
        };
        let mut all = vec![call.dispatch([step, own_heads, batch], device)];
        let [weights, d_scores] =
            [0, 1].map(|n| in_scratch(memory, DType::F32, self.band_shape(1), n * count(self.band_shape(1))));
        all.extend(d_q.map(|d_q| self.over_keys(d_scores, k, d_q, accumulates, device)));
        all.extend(d_k.map(|d_k| self.over_queries(d_scores, q, d_k, accumulates, device)));
        all.extend(d_v.map(|d_v| self.over_queries(weights, d_out, d_v, accumulates, device)));
        all
    }

    /// `y[i] = Σ_j band[i, j] x[j]`
    fn over_keys(
        &self,
        band: TensorView<'a>,
        x: TensorView<'a>,
        y: TensorView<'a>,
        accumulates: bool,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let [batch, heads, len, dim] = y.shape();
        let fours = dim.div_ceil(4);
        let work = len.saturating_mul(fours);
        let groups = workgroups(work.div_ceil(WORKGROUP), device);
        let call = LocalRowsCall {
            band,
            x,
            positions: self.positions,
            lengths: self.lengths,
            y,
            kv_len: self.shape.kv_len as u32,
            dim: dim as u32,
            group: self.shape.group() as u32,
            half_window: self.half_window as i32,
            fours: fours as u32,
            work: work as u32,
            step: (groups * WORKGROUP) as u32,
            accumulates,
            width: Width::of_rows(&[x, y]),
        };
        call.dispatch([groups, heads, batch], device)
    }

    /// `y[j] = Σ_h Σ_i band[h, i, j] x[h, i]`
    fn over_queries(
        &self,
        band: TensorView<'a>,
        x: TensorView<'a>,
        y: TensorView<'a>,
        accumulates: bool,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let [batch, heads, len, dim] = y.shape();
        let fours = dim.div_ceil(4);
        let work = len.saturating_mul(fours);
        let groups = workgroups(work.div_ceil(WORKGROUP), device);
        let call = LocalColumnsCall {
            band,
            x,
            positions: self.positions,
            lengths: self.lengths,
            y,
            q_len: self.shape.q_len as u32,
            kv_len: self.shape.kv_len as u32,
            dim: dim as u32,
            group: self.shape.group() as u32,
            half_window: self.half_window as i32,
            fours: fours as u32,
            work: work as u32,
            step: (groups * WORKGROUP) as u32,
            accumulates,
            width: Width::of_rows(&[x, y]),
        };
        call.dispatch([groups, heads, batch], device)
    }
}

/// The inputs of predicted positions: `x` is `W h + b` in F32.
#[derive(Clone, Copy)]
pub(crate) struct Predicted<'a> {
    pub x: TensorView<'a>,
    pub vector: TensorView<'a>,
    pub lengths: Option<TensorView<'a>>,
    pub kv_len: usize,
}

impl<'a> Predicted<'a> {
    /// Writes positions.
    pub fn forward(&self, positions: TensorView<'a>, device: &DeviceFacts) -> Dispatch<'a> {
        let Predicted { x, vector, lengths, kv_len } = *self;
        let [batch, _, rows, units] = x.shape();
        let step = workgroups(rows, device);
        let call = LocalPositionsCall {
            x,
            vector,
            lengths,
            positions,
            rows: rows as u32,
            kv_len: kv_len as u32,
            units: units as u32,
            step: step as u32,
        };
        call.dispatch([step, 1, batch], device)
    }

    /// Writes the gradient of x, and the terms of the gradient of the vector.
    pub fn backward(
        &self,
        d_positions: TensorView<'a>,
        [d_x, terms]: [TensorView<'a>; 2],
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let Predicted { x, vector, lengths, kv_len } = *self;
        let [batch, _, rows, units] = x.shape();
        let step = workgroups(rows, device);
        let call = LocalPositionsBackwardCall {
            x,
            vector,
            lengths,
            d_positions,
            d_x,
            terms,
            rows: rows as u32,
            kv_len: kv_len as u32,
            units: units as u32,
            step: step as u32,
        };
        call.dispatch([step, 1, batch], device)
    }
}
