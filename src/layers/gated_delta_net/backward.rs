//! The dispatches of a backward call, from checked tensors.

use super::dispatch::{Between, heads_of, planes, planes_len, rows};
use super::kernels::delta_gates_backward::DeltaGatesBackwardCall;
use super::{GatedDeltaNet, GatedDeltaNetBackward, GatedDeltaNetForward};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Scratch, ScratchSize, Slot, fits, in_scratch};
use crate::matmul::projection::dispatch_backward::{self as products, Gradient, LinearBackward, column_sums};
use crate::recurrent::dispatch as recurrent;
use crate::recurrent::dispatch::{Gradients, Problem};
use crate::rows::causal_conv::dispatch::CausalConvGradients;
use crate::rows::norm::dispatch::NormGradients;
use crate::tensor::{DType, Error, Shape, TensorView};

/// The gradients between the operators, in scratch.
#[derive(Clone, Copy)]
struct GradientsBetween<'a> {
    gated: TensorView<'a>,
    context: TensorView<'a>,
    /// The gradients of convolved queries, keys and values.
    convolved: [TensorView<'a>; 3],
    /// The gradients of β and the decay.
    rates: [TensorView<'a>; 2],
    /// The gradients of the logits of both, and the terms of the gradient of `a_log`.
    terms: TensorView<'a>,
    projected: TensorView<'a>,
}

impl GatedDeltaNet {
    /// The columns of queries, keys and values: the first one, and their number.
    fn parts(&self) -> [[usize; 2]; 3] {
        let (keys, values) = (self.config.keys(), self.config.values());
        [[0, keys], [keys, keys], [2 * keys, values]]
    }

    fn gradients_between<'a>(
        &self,
        shape: &Shape,
        buffer: impl Fn(Slot) -> &'a wgpu::Buffer,
    ) -> GradientsBetween<'a> {
        let config = &self.config;
        let rows =
            |slot, dtype, width| in_scratch(buffer(slot), dtype, [shape.batch, 1, shape.q_len, width], 0);
        GradientsBetween {
            gated: rows(Slot::GatedGradient, config.dtype, config.values()),
            context: rows(Slot::ContextGradient, config.dtype, config.values()),
            convolved: planes(buffer(Slot::ConvolvedGradient), shape, self.parts().map(|[_, count]| count)),
            rates: planes(buffer(Slot::RatesGradient), shape, [config.value_heads; 2]),
            terms: rows(Slot::RateTerms, DType::F32, 3 * config.value_heads),
            projected: rows(Slot::ProjectedGradients, DType::F32, config.projected()),
        }
    }

    /// The delta rule and its gradients.
    fn recurrence_backward<'a>(
        &self,
        call: &GatedDeltaNetForward<'a>,
        between: &Between<'a>,
        gradients: &GradientsBetween<'a>,
        shape: Shape,
        device: &DeviceFacts,
    ) -> Problem<'a> {
        let config = &self.config;
        let of_keys = [config.heads, config.head_dim];
        let of_values = [config.value_heads, config.value_dim];
        let [d_q, d_k, d_v] = gradients.convolved;
        let [d_beta, d_decay] = gradients.rates.map(|t| heads_of(t, 0, [config.value_heads, 1]));
        let all = Gradients {
            d_out: heads_of(gradients.context, 0, of_values),
            d_last: None,
            d_q: Some(heads_of(d_q, 0, of_keys)),
            d_k: Some(heads_of(d_k, 0, of_keys)),
            d_v: Some(heads_of(d_v, 0, of_values)),
            d_decay: Some(d_decay),
            d_beta: Some(d_beta),
            d_initial: None,
            accumulates: false,
        };
        let forward = self.recurrence(call, between, shape, device);
        Problem { out: None, gradients: Some(all), ..forward }
    }

    /// The memory of a backward call.
    pub(super) fn backward_size(
        &self,
        call: &GatedDeltaNetBackward,
        shape: Shape,
        device: &DeviceFacts,
    ) -> Result<ScratchSize, Error> {
        let (config, forward) = (&self.config, &stateless(&call.forward));
        let rows = rows(&shape);
        let size = |width: usize, dtype: DType| {
            fits(rows.saturating_mul(width as u64), dtype.bytes() as u64, device)
        };
        let parts = self.parts().map(|[_, count]| count);
        let own = ScratchSize::default()
            .with(Slot::GatedGradient, size(config.values(), config.dtype)?)
            .with(Slot::ContextGradient, size(config.values(), config.dtype)?)
            .with(Slot::ConvolvedGradient, fits(planes_len(&shape, &parts), 4, device)?)
            .with(Slot::RatesGradient, fits(planes_len(&shape, &[config.value_heads; 2]), 4, device)?)
            .with(Slot::RateTerms, size(3 * config.value_heads, DType::F32)?)
            .with(Slot::ProjectedGradients, size(config.projected(), DType::F32)?);
        let forward_size = self.forward_size(forward, shape, device)?;
        let mut all = own.max(forward_size);
        // There is no scratch yet, so any buffer replaces it: only layouts matter.
        let buffer = call.forward.x.buffer;
        let between = self.between(&shape, |_| buffer);
        let gradients = self.gradients_between(&shape, |_| buffer);
        let problem = self.recurrence_backward(forward, &between, &gradients, shape, device);
        all = all.max(problem.scratch_size(device)?);
        if call.d_weights.norm.is_some() {
            all = all.max(self.gated_norm(&between).sums_size());
        }
        if call.d_weights.conv1d.is_some() {
            for part in self.parts() {
                all = all.max(self.convolution(forward, &between, part).sums_size(device)?);
            }
        }
        Ok(all)
    }

    /// The dispatches of a checked backward call.
    pub(super) fn backward_dispatches<'a>(
        &'a self,
        call: &GatedDeltaNetBackward<'a>,
        shape: Shape,
        scratch: &'a Scratch,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let (config, weights, d_weights) = (&self.config, &self.weights, &call.d_weights);
        let (options, forward) = (&config.kernel_options, stateless(&call.forward));
        let x = forward.x;
        let buffer = |slot| scratch.buffer(slot).unwrap_or(x.buffer);
        let (between, gradients) = (self.between(&shape, buffer), self.gradients_between(&shape, buffer));
        let asked =
            |view: Option<TensorView<'a>>| view.map(|view| Gradient { view, accumulates: call.accumulates });
        let own = |view: TensorView<'a>| Some(Gradient { view, accumulates: false });
        let mut all = self.attend(&forward, &between, shape, scratch, device)?;

        let out = LinearBackward {
            w: weights.out_proj.view(),
            d_y: call.d_out,
            d_x: own(gradients.gated),
            d_w: asked(d_weights.out_proj).map(|d_w| (between.gated, d_w)),
            d_b: None,
            narrow: false,
        };
        all.extend(products::dispatches(&[out], options, device)?);

        let of_values = [config.value_heads, config.value_dim];
        let of_norm = NormGradients {
            d_out: heads_of(gradients.gated, 0, of_values),
            d_sum: None,
            d_x: own(heads_of(gradients.context, 0, of_values)),
            d_gate: own(heads_of(gradients.projected, config.mixed(), of_values)),
            d_weight: asked(d_weights.norm),
            d_bias: None,
        };
        all.extend(self.gated_norm(&between).backward(&of_norm, scratch, options, device)?);

        let problem = self.recurrence_backward(&forward, &between, &gradients, shape, device);
        all.extend(recurrent::dispatches(&problem, scratch, device)?);

        for ([first, count], d_out) in self.parts().into_iter().zip(gradients.convolved) {
            let of_part = CausalConvGradients {
                d_out,
                d_final: None,
                d_x: own(gradients.projected.slice(3, first, count)),
                d_weight: asked(d_weights.conv1d.map(|d| d.slice(2, first, count))),
                d_bias: None,
                d_initial: None,
            };
            let convolution = self.convolution(&forward, &between, [first, count]);
            all.extend(convolution.backward(&of_part, scratch, options, device)?);
        }

        let heads = config.value_heads;
        let ([count, step], grid) = self.share(&shape, device);
        let gates = DeltaGatesBackwardCall {
            logits: between.logits,
            a_log: weights.a_log.view(),
            dt_bias: weights.dt_bias.view(),
            d_beta: gradients.rates[0],
            d_decay: gradients.rates[1],
            terms: gradients.terms,
            heads: heads as u32,
            length: shape.q_len as u32,
            count,
            step,
        };
        all.push(gates.dispatch(grid, device));
        for (first, sum) in [(heads, d_weights.dt_bias), (2 * heads, d_weights.a_log)] {
            let of = asked(sum).map(|sum| column_sums(gradients.terms.slice(3, first, heads), sum, device));
            all.extend(of);
        }

        let linear = |w, d_y, d_w: Option<TensorView<'a>>, d_x| LinearBackward {
            w,
            d_y,
            d_x,
            d_w: asked(d_w).map(|d_w| (x, d_w)),
            d_b: None,
            narrow: false,
        };
        let d_logits = gradients.terms.slice(3, 0, 2 * heads);
        let more = call.d_x.map(|view| Gradient { view, accumulates: true });
        let of_inputs = [
            linear(weights.in_proj_qkvz.view(), gradients.projected, d_weights.in_proj_qkvz, asked(call.d_x)),
            linear(weights.in_proj_ba.view(), d_logits, d_weights.in_proj_ba, more),
        ];
        all.extend(products::dispatches(&of_inputs, options, device)?);
        Ok(all)
    }
}

/// The forward call without its states, which a backward pass does not write again.
fn stateless<'a>(call: &GatedDeltaNetForward<'a>) -> GatedDeltaNetForward<'a> {
    GatedDeltaNetForward { state: None, begins: false, ..*call }
}
