//! Dispatches for causal convolutions and their gradients, from checked tensors.

use super::kernels::causal_conv::{CausalConvCall, Filter, Sequences};
use super::kernels::causal_conv_backward::CausalConvBackwardCall;
use super::kernels::causal_conv_state::CausalConvStateCall;
use super::kernels::causal_conv_sums::CausalConvSumsCall;
use crate::device::DeviceFacts;
use crate::kernel::{
    Dispatch, Dispatches, KernelOptions, Scratch, ScratchSize, Slot, Width, fits, in_scratch,
};
use crate::matmul::Activation;
use crate::matmul::projection::dispatch_backward::{Gradient, column_sums};
use crate::tensor::{DType, Error, TensorView, count};

/// The tensors that a causal convolution and its gradients read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CausalConvOp<'a> {
    /// `[batch, 1, length, channels]`.
    pub x: TensorView<'a>,
    /// `[1, 1, channels, width]`.
    pub weight: TensorView<'a>,
    pub bias: Option<TensorView<'a>>,
    /// `[sequences, 1, width − 1, channels]`.
    pub initial: Option<TensorView<'a>>,
    pub rows: Sequences,
    /// The lengths or `cu_seqlens`.
    pub numbers: Option<TensorView<'a>>,
    pub sequences: usize,
    pub activation: Option<Activation>,
}

/// The state that a call writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WrittenState<'a> {
    pub state: TensorView<'a>,
    /// True if the call also reads it.
    pub in_place: bool,
    pub slots: Option<TensorView<'a>>,
}

/// Gradients of a causal convolution, of checked tensors.
#[derive(Clone, Copy)]
pub(crate) struct CausalConvGradients<'a> {
    pub d_out: TensorView<'a>,
    pub d_final: Option<TensorView<'a>>,
    pub d_x: Option<Gradient<'a>>,
    pub d_weight: Option<Gradient<'a>>,
    pub d_bias: Option<Gradient<'a>>,
    pub d_initial: Option<Gradient<'a>>,
}

/// The largest number of workgroups along an axis. If there is more work, each workgroup takes
/// several shares.
const MOST_GROUPS: usize = 65535;
/// Rows of a unit of work on GPUs and on software drivers.
const TILE: [usize; 2] = [16, 64];
/// Up to this number of rows an invocation has all rows of a sequence, if a state is written.
const MOST_STEPS: usize = 16;
/// The number of invocations with partial sums, if there are enough rows, and the fewest rows of a
/// partial sum.
const SUMMING: usize = 1 << 14;
const PART: usize = 32;
/// The most partial sums.
const MOST_PARTS: usize = 256;

/// The grid for units of work, and the distances between an invocation's units and channels.
struct Share {
    grid: [usize; 3],
    step: u32,
    across: u32,
}

impl<'a> CausalConvOp<'a> {
    fn channels(&self) -> usize {
        self.x.shape()[3]
    }

    fn filter(&self, cpu: bool) -> Filter {
        let (workgroup, lanes) = match (cpu, self.channels() <= 32) {
            (true, _) => (8, 8),
            (false, true) => (64, 8),
            (false, false) => (64, 64),
        };
        let columns = self.weight.shape()[3] as u32;
        Filter { columns, sequences: self.rows, workgroup, lanes }
    }

    fn share(&self, units: usize, filter: Filter, device: &DeviceFacts) -> Share {
        let most = MOST_GROUPS.min(device.max_workgroups as usize);
        let [workgroup, lanes] = [filter.workgroup, filter.lanes].map(|n| n as usize);
        let across = self.channels().div_ceil(4 * lanes).min(most);
        let groups = units.div_ceil(workgroup / lanes).min(most);
        Share {
            grid: [across, groups, 1],
            step: (groups * (workgroup / lanes)) as u32,
            across: (across * lanes * 4) as u32,
        }
    }

    /// Rows of a unit of work, units of a batch entry, and units of all entries.
    fn tiles(&self, cpu: bool) -> [usize; 3] {
        let [batch, _, length, _] = self.x.shape();
        let tile = TILE[usize::from(cpu)].min(length);
        let tiles = length.div_ceil(tile);
        [tile, tiles, batch * tiles]
    }

    /// Writes the sums to `out`, and the last rows to a state.
    pub fn forward(
        &self,
        out: TensorView<'a>,
        written: Option<WrittenState<'a>>,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Dispatches<'a> {
        let CausalConvOp { x, weight, bias, sequences, rows, numbers, activation, .. } = *self;
        let cpu = kernel_options.target.is_cpu(device);
        let length = x.shape()[2];
        let filter = self.filter(cpu);
        let steps = written.filter(|_| length <= MOST_STEPS);
        let [tile, tiles, units] = match steps {
            Some(_) => [length, 1, sequences],
            None => self.tiles(cpu),
        };
        let in_place = written.is_some_and(|written| written.in_place);
        let kept = written.filter(|_| in_place).map(|written| written.state);
        // A kernel that does not write the state reads it like any other tensor.
        let initial = if steps.is_some() { self.initial } else { self.initial.or(kept) };
        let state = steps.map(|written| written.state);
        let states = self.states(written);
        let Share { grid, step, across } = self.share(units, filter, device);
        let convolution = CausalConvCall {
            x,
            weight,
            bias,
            numbers,
            slots: written.and_then(|written| written.slots),
            initial,
            out,
            state,
            channels: self.channels() as u32,
            length: length as u32,
            sequences: sequences as u32,
            states,
            tile: tile as u32,
            tiles: tiles as u32,
            units: units as u32,
            step,
            across,
            filter: Filter { sequences: rows, ..filter },
            activation,
            by_sequence: steps.is_some(),
            in_place: in_place && steps.is_some(),
            width: Width::of_rows(&[Some(x), initial, Some(out), state]),
        };
        let mut dispatches = vec![convolution.dispatch(grid, device)];
        if let (Some(written), None) = (written, steps) {
            dispatches.push(self.final_state(written, filter, device));
        }
        dispatches
    }

    /// The number of states in the tensor of states.
    fn states(&self, written: Option<WrittenState>) -> u32 {
        let slots = written.filter(|written| written.slots.is_some());
        slots.map_or(self.sequences, |written| written.state.shape()[0]) as u32
    }

    fn final_state(&self, written: WrittenState<'a>, filter: Filter, device: &DeviceFacts) -> Dispatch<'a> {
        let CausalConvOp { x, initial, sequences, numbers, .. } = *self;
        let WrittenState { state, in_place, slots } = written;
        let Share { grid, step, across } = self.share(sequences, filter, device);
        let call = CausalConvStateCall {
            x,
            numbers,
            slots,
            initial,
            state,
            channels: self.channels() as u32,
            length: x.shape()[2] as u32,
            sequences: sequences as u32,
            states: self.states(Some(written)),
            step,
            across,
            filter,
            in_place,
            width: Width::of_rows(&[Some(x), initial, Some(state)]),
        };
        call.dispatch(grid, device)
    }

    /// Rows of a partial sum, and the number of partial sums.
    fn parts(&self) -> [usize; 2] {
        let [batch, _, length, channels] = self.x.shape();
        let rows = count([batch, length, 1, 1]);
        let wanted = SUMMING.div_ceil(channels.div_ceil(4)).min(MOST_PARTS);
        let part = rows.div_ceil(wanted).max(PART);
        [part, rows.div_ceil(part)]
    }

    /// Elements of a partial sum: those of the weight, then those of the bias.
    fn sums(&self) -> usize {
        self.channels() * (self.weight.shape()[3] + 1)
    }

    /// The temporary memory of the gradients of weight and bias.
    ///
    /// # Errors
    /// The device cannot bind it.
    pub fn sums_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let [_, parts] = self.parts();
        let bytes = fits((parts as u64).saturating_mul(self.sums() as u64), 4, device)?;
        Ok(ScratchSize::default().with(Slot::Partials, bytes))
    }

    /// All requested gradients.
    ///
    /// # Errors
    /// The scratch is too small.
    pub fn backward(
        &self,
        gradients: &CausalConvGradients<'a>,
        scratch: &'a Scratch,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let cpu = kernel_options.target.is_cpu(device);
        let mut dispatches = Vec::new();
        if let Some(d_x) = gradients.d_x {
            dispatches.push(self.row_gradients(gradients, d_x, false, cpu, device));
        }
        if let Some(d_initial) = gradients.d_initial {
            dispatches.push(self.row_gradients(gradients, d_initial, true, cpu, device));
        }
        if gradients.d_weight.is_some() || gradients.d_bias.is_some() {
            dispatches.extend(self.sum_gradients(gradients, scratch.buffer(Slot::Partials)?, cpu, device));
        }
        Ok(dispatches)
    }

    /// The gradient of x or of the initial state.
    fn row_gradients(
        &self,
        gradients: &CausalConvGradients<'a>,
        target: Gradient<'a>,
        of_state: bool,
        cpu: bool,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let CausalConvOp { weight, numbers, sequences, activation, .. } = *self;
        let CausalConvGradients { d_out, d_final, .. } = *gradients;
        // Without an activation the gradient does not depend on these tensors.
        let read = |t: Option<TensorView<'a>>| t.filter(|_| activation.is_some());
        let [x, bias, initial] = [read(Some(self.x)), read(self.bias), read(self.initial)];
        let filter = self.filter(cpu);
        let [tile, tiles, units] = if of_state { [1, 1, sequences] } else { self.tiles(cpu) };
        let Share { grid, step, across } = self.share(units, filter, device);
        let call = CausalConvBackwardCall {
            x,
            weight,
            bias,
            numbers,
            initial,
            d_out,
            d_final,
            d_rows: target.view,
            channels: self.channels() as u32,
            length: self.x.shape()[2] as u32,
            sequences: sequences as u32,
            tile: tile as u32,
            tiles: tiles as u32,
            units: units as u32,
            step,
            across,
            filter,
            activation,
            of_state,
            accumulates: target.accumulates,
            width: Width::of_rows(&[x, initial, Some(d_out), d_final, Some(target.view)]),
        };
        call.dispatch(grid, device)
    }

    /// The gradients of weight and bias: partial sums, then their sums.
    fn sum_gradients(
        &self,
        gradients: &CausalConvGradients<'a>,
        buffer: &'a wgpu::Buffer,
        cpu: bool,
        device: &DeviceFacts,
    ) -> Dispatches<'a> {
        let CausalConvOp { x, initial, numbers, sequences, activation, .. } = *self;
        let CausalConvGradients { d_out, d_weight, d_bias, .. } = *gradients;
        let [batch, _, length, channels] = x.shape();
        let width = self.weight.shape()[3];
        let [part, units] = self.parts();
        let parts = in_scratch(buffer, DType::F32, [1, 1, units, self.sums()], 0);
        let filter = self.filter(cpu);
        let Share { grid, step, across } = self.share(units, filter, device);
        let call = CausalConvSumsCall {
            x,
            weight: activation.map(|_| self.weight),
            bias: self.bias.filter(|_| activation.is_some()),
            numbers,
            initial,
            d_out,
            parts,
            channels: channels as u32,
            length: length as u32,
            sequences: sequences as u32,
            rows: (batch * length) as u32,
            tile: part as u32,
            units: units as u32,
            step,
            across,
            filter,
            activation,
            width: Width::of_rows(&[Some(x), initial, Some(d_out)]),
        };
        let mut dispatches = vec![call.dispatch(grid, device)];
        if let Some(Gradient { view, accumulates }) = d_weight {
            // One dispatch for each column, because the gradient has any strides.
            let mut of_weight = parts.slice(3, 0, channels * width);
            of_weight.layout.shape[3] = channels;
            of_weight.layout.strides[3] = width;
            for j in 0..width {
                let mut column = of_weight;
                column.layout.offset += j;
                let view = view.slice(3, j, 1).transposed(2, 3);
                dispatches.push(column_sums(column, Gradient { view, accumulates }, device));
            }
        }
        if let Some(d_bias) = d_bias {
            dispatches.push(column_sums(parts.slice(3, channels * width, channels), d_bias, device));
        }
        dispatches
    }
}
