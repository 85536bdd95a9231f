//! The forward pass: states of chunks, their running sums, products within chunks, results.

use super::LinearProblem;
use super::builder::Builder;
use crate::linear_attention::kernels::linear::{LinearForm, LinearNumbers};
use crate::linear_attention::kernels::linear_carry::{self, LinearCarryCall, Way};
use crate::linear_attention::kernels::linear_chunks::{self, LinearChunksCall};
use crate::linear_attention::kernels::linear_logs::LinearLogsCall;
use crate::linear_attention::kernels::linear_out::LinearOutCall;
use crate::linear_attention::kernels::linear_prefix::LinearPrefixCall;
use crate::linear_attention::kernels::linear_scores::LinearScoresCall;
use crate::linear_attention::kernels::linear_state::LinearStateCall;
use crate::tensor::{Shape, TensorView};

impl<'a> Builder<'a, '_> {
    /// Records the table of chunks and the weights of keys, if the call needs them.
    pub fn prepare(&mut self) {
        let problem = self.problem;
        let Some(chunks) = self.chunks() else { return };
        let Shape { batch, kv_heads, .. } = problem.shape;
        let call = LinearChunksCall {
            key_mask: problem.key_mask,
            lengths: problem.lengths,
            starts: problem.starts,
            logs: self.logs(),
            chunks,
            numbers: self.numbers,
            has_logs: problem.random.is_some_and(|random| random.kind.is_scaled()),
        };
        let groups = self.plan.slots.div_ceil(linear_chunks::WORKGROUP);
        self.all.push(call.dispatch([groups, kv_heads, batch], self.device));
        if problem.is_scaled() {
            let state_log = problem.state.and_then(|state| state.log);
            let call = LinearLogsCall { chunks, state_log, numbers: self.numbers, causal: problem.causal };
            self.all.push(call.dispatch([1, kv_heads, batch], self.device));
        }
    }

    /// Copies the states of sequences from or to the caller's memory, or sets them to zero.
    pub fn carry_over(&mut self, way: Way) {
        let of_caller = self.problem.state.filter(|_| way != Way::Zero);
        let size = self.problem.features * self.plan.state_stride;
        let groups = size.div_ceil(4 * linear_carry::WORKGROUP);
        let most = self.device.max_workgroups.max(1) as usize;
        for first in (0..self.plan.sequences).step_by(most) {
            let call = LinearCarryCall {
                state: of_caller.map(|state| state.state),
                norm: of_caller.map(|state| state.norm),
                carry: self.carry(),
                numbers: LinearNumbers { first_slot: first as u32, ..self.numbers },
                way,
            };
            let counts = [groups, self.problem.shape.kv_heads, most.min(self.plan.sequences - first)];
            self.all.push(call.dispatch(counts, self.device));
        }
    }

    pub fn span(&self, (first, count): (usize, usize)) -> LinearNumbers {
        LinearNumbers { first_slot: first as u32, slots: count as u32, ..self.numbers }
    }

    /// Records the states of chunks of keys, and their running sums.
    pub fn key_states(&mut self, span: (usize, usize)) {
        let problem = self.problem;
        self.push_states(LinearStateCall {
            k: Some(problem.k),
            v: Some(problem.v),
            q: None,
            d_out: None,
            stats: None,
            logs: self.logs(),
            chunks: self.chunks(),
            states: self.states(),
            numbers: self.span(span),
            form: problem.form(),
            phi: problem.phi,
            width: LinearProblem::width(&[&problem.k, &problem.v]),
        });
        self.push_prefix(LinearPrefixCall {
            states: self.states(),
            carry: self.carry(),
            chunks: self.chunks(),
            numbers: self.span(span),
            form: problem.form(),
            reverse: false,
        });
    }

    pub fn push_states(&mut self, call: LinearStateCall<'a>) {
        let problem = self.problem;
        let groups = problem.tiles.groups(problem.features, self.plan.state_stride);
        let counts = [groups, call.numbers.slots as usize, problem.shape.batch * problem.shape.kv_heads];
        self.all.push(call.dispatch(counts, self.device));
    }

    pub fn push_prefix(&mut self, call: LinearPrefixCall<'a>) {
        let problem = self.problem;
        let size = problem.features * self.plan.state_stride;
        let groups = size.div_ceil(4 * problem.tiles.workgroup as usize);
        let counts = [groups, problem.shape.kv_heads, problem.shape.batch];
        self.all.push(call.dispatch(counts, self.device));
    }

    /// Records the products of features within chunks.
    pub fn products(&mut self, span: (usize, usize)) {
        let problem = self.problem;
        self.push_scores(LinearScoresCall {
            q: Some(problem.q),
            k: Some(problem.k),
            d_out: None,
            v: None,
            stats: None,
            logs: self.logs(),
            chunks: self.chunks(),
            scores: self.scores(),
            numbers: self.span(span),
            form: problem.form(),
            phi: problem.phi,
            width: LinearProblem::width(&[&problem.q, &problem.k]),
        });
    }

    pub fn push_scores(&mut self, call: LinearScoresCall<'a>) {
        let problem = self.problem;
        let groups = problem.tiles.groups(self.plan.chunk_len, self.plan.chunk_len);
        let counts = [groups, call.numbers.slots as usize, problem.shape.batch * problem.shape.heads];
        self.all.push(call.dispatch(counts, self.device));
    }

    /// Returns the variant of the kernels that read rows of queries. Without causality and packing
    /// they need no table.
    pub fn query_form(&self) -> LinearForm {
        let form = self.problem.form();
        LinearForm { scaled: form.scaled && form.causal, ..form }
    }

    pub fn query_chunks(&self) -> Option<TensorView<'a>> {
        self.chunks().filter(|_| self.problem.causal || self.problem.starts.is_some())
    }

    pub fn results(&mut self, span: (usize, usize)) {
        let problem = self.problem;
        let causal = problem.causal;
        let mut tensors = vec![&problem.q, &problem.out];
        tensors.extend(causal.then_some(&problem.v));
        let call = LinearOutCall {
            q: problem.q,
            states: self.read_states(),
            v: causal.then_some(problem.v),
            scores: self.scores(),
            logs: self.logs().filter(|_| causal),
            chunks: self.query_chunks(),
            written: problem.out,
            numbers: self.span(span),
            form: self.query_form(),
            phi: problem.phi,
            normalised: problem.normalised,
            width: LinearProblem::width(&tensors),
        };
        let groups = problem.tiles.groups(self.plan.chunk_len, problem.shape.value_dim);
        let counts = [groups, span.1, problem.shape.batch * problem.shape.heads];
        self.all.push(call.dispatch(counts, self.device));
    }
}
