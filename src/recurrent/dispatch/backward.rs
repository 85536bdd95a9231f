//! The backward pass: the states again, then the gradients from the last chunk to the first.

use super::Gradients;
use super::builder::{Builder, StateCopy, width};
use super::forward::Checkpoint;
use crate::recurrent::kernels::numbers::{RecurrentForm, RecurrentNumbers};
use crate::recurrent::kernels::recurrent_d_channel_decays::RecurrentDChannelDecaysCall;
use crate::recurrent::kernels::recurrent_d_channels::RecurrentDChannelsCall;
use crate::recurrent::kernels::recurrent_d_decays::RecurrentDDecaysCall;
use crate::recurrent::kernels::recurrent_d_ends::RecurrentDEndsCall;
use crate::recurrent::kernels::recurrent_d_errors::RecurrentDErrorsCall;
use crate::recurrent::kernels::recurrent_d_pairs::RecurrentDPairsCall;
use crate::recurrent::kernels::recurrent_d_rates::RecurrentDRatesCall;
use crate::recurrent::kernels::recurrent_d_rows::{self, RecurrentDRowsCall};
use crate::recurrent::kernels::recurrent_d_states::RecurrentDStatesCall;
use crate::recurrent::kernels::recurrent_d_values::RecurrentDValuesCall;
use crate::tensor::TensorView;

impl<'a> Builder<'a, '_> {
    /// Records the backward pass.
    pub fn backward(&mut self, gradients: &Gradients<'a>) {
        self.table();
        let spans = self.plan.spans();
        let last = spans.len() - 1;
        // The states at the beginning of each span, so that each span can be computed again.
        if last > 0 {
            self.begin();
            for (n, span) in spans.iter().enumerate() {
                self.span_states(*span, Checkpoint::Written(n));
            }
        }
        self.carries_gradients = true;
        self.copy(self.of_sequences(gradients.d_last, self.problem.slots), false);
        for (n, span) in spans.iter().copied().enumerate().rev() {
            if last == 0 || n < last {
                self.carries_gradients = false;
                self.begin();
                self.span_states(span, if last == 0 { Checkpoint::None } else { Checkpoint::Read(n) });
                self.carries_gradients = true;
            }
            self.span_gradients(gradients, span);
        }
        if let Some(d_initial) = gradients.d_initial {
            let of = self.of_sequences(Some(d_initial), self.problem.slots);
            self.copy(StateCopy { accumulates: gradients.accumulates, ..of }, true);
        }
    }

    /// Records the gradients of a span, whose states and errors are in memory.
    fn span_gradients(&mut self, gradients: &Gradients<'a>, span: (usize, usize)) {
        let (places, form) = (self.places, self.problem.form);
        self.values(gradients.d_out, places.d_out, span);
        self.d_errors(span);
        if form.delta {
            self.solve(
                RecurrentNumbers {
                    left: places.suffix_keys as u32,
                    result: places.solved_suffix as u32,
                    second_left: places.d_errors as u32,
                    second_result: places.d_errors as u32,
                    ..self.span(span)
                },
                true,
            );
        }
        self.chain(span, Checkpoint::None, true);
        if gradients.d_v.is_some() {
            self.d_values(gradients, span);
        }
        let rows = gradients.d_q.is_some() || gradients.d_k.is_some();
        if !rows && gradients.d_decay.is_none() && gradients.d_beta.is_none() {
            return;
        }
        let numbers = RecurrentNumbers {
            left: places.d_out as u32,
            second_left: places.d_errors as u32,
            right: places.errors as u32,
            depth: self.plan.values as u32,
            result: places.d_scores as u32,
            second_sign: -1.0,
            ..self.span(span)
        };
        let multiplies = gradients.d_decay.is_some() && !form.by_channel;
        self.scores(numbers, [!form.by_channel, false, false], multiplies);
        self.d_states([places.d_out, places.states, places.d_queries], 1.0, span);
        self.d_states([places.errors, places.d_states, places.d_suffix_keys], 1.0, span);
        if form.delta {
            self.d_states([places.d_errors, places.states, places.d_keys], -1.0, span);
        }
        if let Some(d_decay) = gradients.d_decay {
            self.d_ends(span);
            self.d_decays(d_decay, gradients.accumulates, span);
        }
        if rows || gradients.d_beta.is_some() {
            self.d_pairs(span);
        }
        if rows {
            self.d_rows(gradients, span);
        }
        if let Some(d_beta) = gradients.d_beta {
            self.d_rates(d_beta, gradients.accumulates, span);
        }
    }

    fn d_errors(&mut self, span: (usize, usize)) {
        let Some(memory) = self.arrays() else { return };
        let (places, tiles) = (self.places, self.problem.tiles);
        let numbers = RecurrentNumbers {
            left: places.scores as u32,
            right: places.d_out as u32,
            result: places.d_errors as u32,
            ..self.span(span)
        };
        let call = RecurrentDErrorsCall { memory, numbers, tiles };
        let groups = tiles.groups(self.plan.chunk_len, self.plan.values);
        self.all.push(call.dispatch([groups, span.1, self.all_heads()], self.device));
    }

    /// Records rows times transposed states. `arrays` are the rows, the states and the result.
    fn d_states(&mut self, [rows, states, target]: [usize; 3], sign: f32, span: (usize, usize)) {
        let Some(memory) = self.arrays() else { return };
        let tiles = self.problem.tiles;
        let numbers = RecurrentNumbers {
            left: rows as u32,
            right: states as u32,
            result: target as u32,
            second_sign: sign,
            ..self.span(span)
        };
        let call = RecurrentDStatesCall { memory, numbers, tiles };
        let groups = tiles.groups(self.plan.chunk_len, self.plan.features);
        self.all.push(call.dispatch([groups, span.1, self.all_heads()], self.device));
    }

    fn d_ends(&mut self, span: (usize, usize)) {
        let Some(memory) = self.arrays() else { return };
        let (workgroup, groups) = self.wide(self.plan.features);
        let call = RecurrentDEndsCall { memory, numbers: self.span(span), workgroup };
        self.all.push(call.dispatch([groups, span.1, self.all_heads()], self.device));
    }

    /// Records the gradients of the decays, from rows that do not have the gradients of pairs yet.
    fn d_decays(&mut self, d_decay: TensorView<'a>, accumulates: bool, span: (usize, usize)) {
        let (Some(chunks), Some(memory)) = (self.chunks(), self.arrays()) else { return };
        let RecurrentForm { delta, by_channel, .. } = self.problem.form;
        let result = self.places.d_scores as u32;
        let numbers = RecurrentNumbers { result, accumulates: accumulates.into(), ..self.span(span) };
        let heads = self.all_heads();
        if by_channel {
            let workgroup = self.problem.tiles.workgroup;
            let groups = self.problem.shape.head_dim.div_ceil(workgroup as usize);
            let call = RecurrentDChannelDecaysCall { chunks, memory, d_decay, numbers, workgroup, delta };
            self.all.push(call.dispatch([groups, span.1, heads], self.device));
        } else {
            let call = RecurrentDDecaysCall { chunks, memory, d_decay, numbers, delta };
            self.all.push(call.dispatch([1, span.1, heads], self.device));
        }
    }

    fn d_pairs(&mut self, span: (usize, usize)) {
        let Some(memory) = self.arrays() else { return };
        let (tiles, delta) = (self.problem.tiles, self.problem.form.delta);
        let numbers = RecurrentNumbers { result: self.places.d_scores as u32, ..self.span(span) };
        let heads = self.all_heads();
        if self.problem.form.by_channel {
            let (_, groups) = self.wide(self.plan.features);
            let groups = groups * self.plan.chunk_len / tiles.rows as usize;
            let call = RecurrentDChannelsCall { memory, numbers, tiles, delta };
            self.all.push(call.dispatch([groups, span.1, heads], self.device));
        } else {
            let arrays = if delta { 3 } else { 2 };
            let each = tiles.groups(self.plan.chunk_len, self.plan.features);
            let numbers = RecurrentNumbers { tiles: each as u32, ..numbers };
            let call = RecurrentDPairsCall { memory, numbers, tiles, delta };
            self.all.push(call.dispatch([arrays * each, span.1, heads], self.device));
        }
    }

    fn d_rows(&mut self, gradients: &Gradients<'a>, span: (usize, usize)) {
        let problem = self.problem;
        let (Some(chunks), Some(memory)) = (self.chunks(), self.arrays()) else { return };
        let call = RecurrentDRowsCall {
            q: problem.form.unit.then_some(problem.q),
            k: problem.form.unit.then_some(problem.k),
            chunks,
            memory,
            d_q: gradients.d_q,
            d_k: gradients.d_k,
            numbers: RecurrentNumbers { accumulates: gradients.accumulates.into(), ..self.span(span) },
            form: RecurrentForm { by_channel: false, ..problem.form },
        };
        let groups = self.plan.chunk_len.div_ceil(recurrent_d_rows::WORKGROUP);
        let heads = problem.shape.batch * problem.shape.kv_heads;
        self.all.push(call.dispatch([groups, span.1, heads], self.device));
    }

    fn d_rates(&mut self, d_beta: TensorView<'a>, accumulates: bool, span: (usize, usize)) {
        let (Some(chunks), Some(memory)) = (self.chunks(), self.arrays()) else { return };
        let numbers = RecurrentNumbers { accumulates: accumulates.into(), ..self.span(span) };
        let call = RecurrentDRatesCall { chunks, memory, d_beta, numbers };
        self.all.push(call.dispatch([1, span.1, self.all_heads()], self.device));
    }

    fn d_values(&mut self, gradients: &Gradients<'a>, span: (usize, usize)) {
        let (Some(chunks), Some(memory), Some(d_v)) = (self.chunks(), self.arrays(), gradients.d_v) else {
            return;
        };
        let (workgroup, groups) = self.wide(self.plan.chunk_len * self.plan.values);
        let call = RecurrentDValuesCall {
            chunks,
            memory,
            written: d_v,
            numbers: RecurrentNumbers {
                left: self.places.d_errors as u32,
                accumulates: gradients.accumulates.into(),
                ..self.span(span)
            },
            workgroup,
            width: width(&[&d_v]),
        };
        self.all.push(call.dispatch([groups, span.1, self.all_heads()], self.device));
    }
}
