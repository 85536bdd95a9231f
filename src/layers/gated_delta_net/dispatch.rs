//! The dispatches of a forward call, from checked tensors.

use super::kernels::delta_gates::{DeltaGatesCall, WORKGROUP};
use super::{GatedDeltaNet, GatedDeltaNetForward};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Scratch, ScratchSize, Slot, fits, in_scratch};
use crate::matmul::Activation;
use crate::matmul::projection::dispatch::{self as products, LinearOp};
use crate::recurrent::dispatch as recurrent;
use crate::recurrent::dispatch::Problem;
use crate::rows::NormGate;
use crate::rows::causal_conv::dispatch::{CausalConvOp, WrittenState};
use crate::rows::causal_conv::kernels::causal_conv::Sequences;
use crate::rows::norm::dispatch::{NormInputs, NormOp};
use crate::tensor::{DType, Error, Layout, Shape, Tensor, TensorView};

/// The alignment, in bytes, of tensors that one dispatch writes into one buffer. Every device can
/// bind them separately.
const ALIGNMENT: usize = 256;

/// The tensors between the operators, in scratch.
#[derive(Clone, Copy)]
pub(super) struct Between<'a> {
    /// Queries, keys, values and gates: `[batch, 1, length, projected]`.
    pub projected: TensorView<'a>,
    /// Queries, keys and values after the convolution: `[batch, 1, length, mixed]`.
    pub convolved: TensorView<'a>,
    /// `[batch, 1, length, 2 · value_heads]`.
    pub logits: TensorView<'a>,
    /// β and the decay, each `[batch, 1, length, value_heads]`.
    pub rates: [TensorView<'a>; 2],
    /// The outputs of the heads, and the gated outputs: `[batch, 1, length, values]`.
    pub context: TensorView<'a>,
    pub gated: TensorView<'a>,
}

/// Columns of `rows`, `[batch, 1, length, columns]`, from `first` on, as `[batch, heads, length,
/// dim]`.
pub(super) fn heads_of(rows: TensorView<'_>, first: usize, [heads, dim]: [usize; 2]) -> TensorView<'_> {
    let [batch, _, length, _] = rows.shape();
    let [of_batch, _, of_length, unit] = rows.strides();
    let layout = Layout {
        shape: [batch, heads, length, dim],
        strides: [of_batch, dim * unit, of_length, unit],
        offset: rows.offset() + first * unit,
    };
    TensorView { layout, ..rows }
}

/// Dense F32 tensors `[batch, 1, length, width]` in one buffer, which one dispatch may write.
pub(super) fn planes<'a, const N: usize>(
    buffer: &'a wgpu::Buffer,
    shape: &Shape,
    widths: [usize; N],
) -> [TensorView<'a>; N] {
    let mut offset = 0;
    widths.map(|width| {
        let plane = in_scratch(buffer, DType::F32, [shape.batch, 1, shape.q_len, width], offset);
        offset += (shape.batch * shape.q_len * width).next_multiple_of(ALIGNMENT / size_of::<f32>());
        plane
    })
}

/// The elements of [`planes`].
pub(super) fn planes_len(shape: &Shape, widths: &[usize]) -> u64 {
    let rows = rows(shape);
    let of = |width: &usize| rows.saturating_mul(*width as u64).saturating_add((ALIGNMENT / 4) as u64);
    widths.iter().map(of).fold(0, u64::saturating_add)
}

/// The tokens of all sequences.
pub(super) fn rows(shape: &Shape) -> u64 {
    (shape.batch as u64).saturating_mul(shape.q_len as u64)
}

impl GatedDeltaNet {
    pub(super) fn between<'a>(
        &self,
        shape: &Shape,
        buffer: impl Fn(Slot) -> &'a wgpu::Buffer,
    ) -> Between<'a> {
        let config = &self.config;
        let rows =
            |slot, dtype, width| in_scratch(buffer(slot), dtype, [shape.batch, 1, shape.q_len, width], 0);
        let own = config.dtype;
        Between {
            projected: rows(Slot::Projected, own, config.projected()),
            convolved: rows(Slot::Convolved, own, config.mixed()),
            logits: rows(Slot::RateLogits, DType::F32, 2 * config.value_heads),
            rates: planes(buffer(Slot::Rates), shape, [config.value_heads; 2]),
            context: rows(Slot::Context, own, config.values()),
            gated: rows(Slot::Gated, own, config.values()),
        }
    }

    /// The memory of [`between`](Self::between).
    fn between_size(&self, shape: &Shape, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let (config, rows) = (&self.config, rows(shape));
        let size = |width: usize, dtype: DType| {
            fits(rows.saturating_mul(width as u64), dtype.bytes() as u64, device)
        };
        let own = config.dtype;
        let rates = fits(planes_len(shape, &[config.value_heads; 2]), 4, device)?;
        Ok(ScratchSize::default()
            .with(Slot::Projected, size(config.projected(), own)?)
            .with(Slot::Convolved, size(config.mixed(), own)?)
            .with(Slot::RateLogits, size(2 * config.value_heads, DType::F32)?)
            .with(Slot::Rates, rates)
            .with(Slot::Context, size(config.values(), own)?)
            .with(Slot::Gated, size(config.values(), own)?))
    }

    /// The memory of a forward call.
    pub(super) fn forward_size(
        &self,
        call: &GatedDeltaNetForward,
        shape: Shape,
        device: &DeviceFacts,
    ) -> Result<ScratchSize, Error> {
        let size = self.between_size(&shape, device)?;
        // There is no scratch yet, so any buffer replaces it: only layouts matter.
        let between = self.between(&shape, |_| call.x.buffer);
        Ok(size.max(self.recurrence(call, &between, shape, device).scratch_size(device)?))
    }

    /// The delta rule of a call.
    pub(super) fn recurrence<'a>(
        &self,
        call: &GatedDeltaNetForward<'a>,
        between: &Between<'a>,
        shape: Shape,
        device: &DeviceFacts,
    ) -> Problem<'a> {
        let config = &self.config;
        let (keys, of_keys) = (config.keys(), [config.heads, config.head_dim]);
        let of_values = [config.value_heads, config.value_dim];
        let q = heads_of(between.convolved, 0, of_keys);
        let k = heads_of(between.convolved, keys, of_keys);
        let v = heads_of(between.convolved, 2 * keys, of_values);
        let [beta, decay] = between.rates.map(|t| heads_of(t, 0, [config.value_heads, 1]));
        let state = call.state.map(|state| state.recurrent);
        Problem {
            out: Some(heads_of(between.context, 0, of_values)),
            decay: Some(decay),
            beta: Some(beta),
            lengths: call.lengths,
            initial: state.filter(|_| !call.begins),
            last: state,
            in_place: state.is_some() && !call.begins,
            ..config.recurrent().problem(shape, [q, k, v], device)
        }
    }

    /// The convolution of columns `first` to `first + count`.
    pub(super) fn convolution<'a>(
        &'a self,
        call: &GatedDeltaNetForward<'a>,
        between: &Between<'a>,
        [first, count]: [usize; 2],
    ) -> CausalConvOp<'a> {
        CausalConvOp {
            x: between.projected.slice(3, first, count),
            weight: self.weights.conv1d.view().slice(2, first, count),
            bias: None,
            initial: None,
            rows: if call.lengths.is_some() { Sequences::Lengths } else { Sequences::All },
            numbers: call.lengths,
            sequences: call.x.shape()[0],
            activation: Some(Activation::Silu),
        }
    }

    /// The gated norm of the outputs of the heads.
    pub(super) fn gated_norm<'a>(&'a self, between: &Between<'a>) -> NormOp<'a> {
        let config = &self.config;
        let of_values = [config.value_heads, config.value_dim];
        let z = heads_of(between.projected, config.mixed(), of_values);
        let inputs = NormInputs {
            weight: Some(self.weights.norm.view()),
            gate: Some(NormGate::after(z, Activation::Silu)),
            ..NormInputs::new(heads_of(between.context, 0, of_values))
        };
        NormOp { config: config.norm(), inputs }
    }

    /// The invocations that share the rates of a call, and the workgroups.
    pub(super) fn share(&self, shape: &Shape, device: &DeviceFacts) -> ([u32; 2], [usize; 3]) {
        let count = shape.batch * shape.q_len * self.config.value_heads;
        let groups = count.div_ceil(WORKGROUP).min(device.max_workgroups as usize);
        ([count as u32, (groups * WORKGROUP) as u32], [groups, 1, 1])
    }

    /// Computes everything up to the gated norm.
    pub(super) fn attend<'a>(
        &'a self,
        call: &GatedDeltaNetForward<'a>,
        between: &Between<'a>,
        shape: Shape,
        scratch: &'a Scratch,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let (config, weights) = (&self.config, &self.weights);
        let options = &config.kernel_options;
        let mut all = Dispatches::new();
        for (weight, y) in [(&weights.in_proj_qkvz, between.projected), (&weights.in_proj_ba, between.logits)]
        {
            all.extend(products::dispatches(&[product(weight, call.x, y)], options, device)?);
        }
        let written =
            call.state.map(|state| WrittenState { state: state.conv, in_place: !call.begins, slots: None });
        let convolution = self.convolution(call, between, [0, config.mixed()]);
        all.extend(convolution.forward(between.convolved, written, options, device));
        let ([count, step], grid) = self.share(&shape, device);
        let gates = DeltaGatesCall {
            logits: between.logits,
            a_log: weights.a_log.view(),
            dt_bias: weights.dt_bias.view(),
            beta: between.rates[0],
            decay: between.rates[1],
            heads: config.value_heads as u32,
            length: shape.q_len as u32,
            count,
            step,
        };
        all.push(gates.dispatch(grid, device));
        let problem = self.recurrence(call, between, shape, device);
        all.extend(recurrent::dispatches(&problem, scratch, device)?);
        let out = heads_of(between.gated, 0, [config.value_heads, config.value_dim]);
        all.push(self.gated_norm(between).forward(out, None, options, device));
        Ok(all)
    }

    /// The dispatches of a checked forward call.
    pub(super) fn dispatches<'a>(
        &'a self,
        call: &GatedDeltaNetForward<'a>,
        shape: Shape,
        scratch: &'a Scratch,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let between = self.between(&shape, |slot| scratch.buffer(slot).unwrap_or(call.x.buffer));
        let mut all = self.attend(call, &between, shape, scratch, device)?;
        let out = product(&self.weights.out_proj, between.gated, call.out);
        all.extend(products::dispatches(&[out], &self.config.kernel_options, device)?);
        Ok(all)
    }
}

fn product<'a>(weight: &'a Tensor, x: TensorView<'a>, y: TensorView<'a>) -> LinearOp<'a> {
    LinearOp { x, w: weight.view(), bias: None, y, narrow: false, activation: None }
}
