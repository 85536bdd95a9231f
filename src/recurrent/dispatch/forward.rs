//! The forward pass: rows of chunks, their products and errors, states, results.

use super::builder::{Builder, width};
use crate::kernel::Width;
use crate::linear_attention::plan::LinearTiles;
use crate::recurrent::kernels::numbers::RecurrentNumbers;
use crate::recurrent::kernels::recurrent_chain::{ALL_TILES, RecurrentChainCall};
use crate::recurrent::kernels::recurrent_norms::{self, RecurrentNormsCall};
use crate::recurrent::kernels::recurrent_out::RecurrentOutCall;
use crate::recurrent::kernels::recurrent_rows::RecurrentRowsCall;
use crate::recurrent::kernels::recurrent_scores::RecurrentScoresCall;
use crate::recurrent::kernels::recurrent_solve::RecurrentSolveCall;
use crate::recurrent::kernels::recurrent_values::RecurrentValuesCall;
use crate::tensor::TensorView;

/// The first states of the spans of a backward pass.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Checkpoint {
    /// There is one span.
    None,
    Written(usize),
    Read(usize),
}

impl<'a> Builder<'a, '_> {
    /// Records the forward pass.
    pub fn forward(&mut self) {
        let problem = self.problem;
        self.table();
        self.begin();
        for span in self.plan.spans() {
            self.span_states(span, Checkpoint::None);
            self.results(span);
        }
        if problem.last.is_some() {
            self.copy(self.of_sequences(problem.last, problem.slots), true);
        }
    }

    /// Records the states of a span of chunks, and everything that they need.
    pub fn span_states(&mut self, span: (usize, usize), checkpoint: Checkpoint) {
        self.rows(span);
        self.values(self.problem.v, self.places.errors, span);
        self.products(span);
        if self.problem.form.delta {
            self.solve(
                RecurrentNumbers {
                    left: self.places.prefix_keys as u32,
                    result: self.places.solved_keys as u32,
                    second_left: self.places.errors as u32,
                    second_result: self.places.errors as u32,
                    ..self.span(span)
                },
                false,
            );
        }
        self.chain(span, checkpoint, false);
    }

    /// Returns the invocations of a workgroup without tiles, and the workgroups of `count` vectors.
    pub fn wide(&self, count: usize) -> (u32, usize) {
        let workgroup = self.problem.tiles.workgroup;
        (workgroup, count.div_ceil(4 * workgroup as usize))
    }

    fn rows(&mut self, span: (usize, usize)) {
        let problem = self.problem;
        let (Some(chunks), Some(memory)) = (self.chunks(), self.arrays()) else { return };
        let numbers = self.span(span);
        if problem.form.unit {
            let call = RecurrentNormsCall { q: problem.q, k: problem.k, chunks, memory, numbers };
            let groups = self.plan.chunk_len.div_ceil(recurrent_norms::WORKGROUP);
            self.all.push(call.dispatch([groups, span.1, self.all_heads()], self.device));
        }
        let (workgroup, groups) = self.wide(self.plan.features);
        let call = RecurrentRowsCall {
            q: problem.q,
            k: problem.k,
            decay: problem.decay,
            beta: problem.beta,
            chunks,
            memory,
            numbers,
            form: problem.form,
            workgroup,
            width: width(&[&problem.q, &problem.k]),
        };
        self.all.push(call.dispatch([groups, span.1, self.all_heads()], self.device));
    }

    /// Copies rows of values into an array.
    pub fn values(&mut self, x: TensorView<'a>, target: usize, span: (usize, usize)) {
        let (Some(chunks), Some(memory)) = (self.chunks(), self.arrays()) else { return };
        let (workgroup, groups) = self.wide(self.plan.chunk_len * self.plan.values);
        let call = RecurrentValuesCall {
            x,
            chunks,
            memory,
            numbers: RecurrentNumbers { result: target as u32, ..self.span(span) },
            workgroup,
            width: width(&[&x]),
        };
        self.all.push(call.dispatch([groups, span.1, self.all_heads()], self.device));
    }

    /// Records the products of queries and keys, and of keys.
    fn products(&mut self, span: (usize, usize)) {
        let form = self.problem.form;
        let numbers = RecurrentNumbers {
            left: self.places.queries as u32,
            second_left: self.places.keys as u32,
            right: self.places.keys as u32,
            depth: self.plan.features as u32,
            result: self.places.scores as u32,
            ..self.span(span)
        };
        self.scores(numbers, [!form.by_channel, form.by_channel, form.delta], false);
    }

    /// Records products of rows. `multiplies` also multiplies the scores by them.
    pub fn scores(
        &mut self,
        numbers: RecurrentNumbers,
        [decayed, by_channel, rates]: [bool; 3],
        multiplies: bool,
    ) {
        let Some(memory) = self.arrays() else { return };
        let tiles = self.problem.tiles;
        let arrays = if self.problem.form.delta { 2 } else { 1 };
        let each = tiles.groups(self.plan.chunk_len, self.plan.chunk_len);
        let numbers = RecurrentNumbers { tiles: each as u32, ..numbers };
        let call = RecurrentScoresCall { memory, numbers, tiles, decayed, by_channel, rates, multiplies };
        self.all.push(call.dispatch([arrays * each, numbers.slots as usize, self.all_heads()], self.device));
    }

    /// Records the equation of the errors. `numbers` gives the arrays on both sides.
    pub fn solve(&mut self, numbers: RecurrentNumbers, transposed: bool) {
        let Some(memory) = self.arrays() else { return };
        let (_, groups) = self.wide(self.plan.features + self.plan.values);
        let tiles = self.problem.tiles;
        let numbers =
            RecurrentNumbers { right: (self.places.scores + self.plan.second_scores()) as u32, ..numbers };
        let call = RecurrentSolveCall { memory, numbers, tiles, transposed };
        self.all.push(call.dispatch([groups, numbers.slots as usize, self.all_heads()], self.device));
    }

    /// Records the states of a span, or in reverse their gradients.
    pub fn chain(&mut self, span: (usize, usize), checkpoint: Checkpoint, reverse: bool) {
        let (Some(chunks), Some(memory), Some(carry)) = (self.chunks(), self.arrays(), self.carry(1)) else {
            return;
        };
        let (places, delta) = (self.places, self.problem.form.delta);
        let numbers = if reverse {
            RecurrentNumbers {
                left: if delta { places.solved_suffix } else { places.suffix_keys } as u32,
                right: places.d_errors as u32,
                states: places.d_states as u32,
                ..self.span(span)
            }
        } else {
            RecurrentNumbers {
                left: places.solved_keys as u32,
                right: places.errors as u32,
                ..self.span(span)
            }
        };
        let tiles = self.chain_tiles();
        let (checkpoints, resumes) = match checkpoint {
            Checkpoint::None => (None, false),
            Checkpoint::Written(span) => (self.checkpoints(span), false),
            Checkpoint::Read(span) => (self.checkpoints(span), true),
        };
        let call = RecurrentChainCall {
            chunks,
            checkpoints,
            carry,
            memory,
            numbers,
            tiles,
            products: delta || reverse,
            delta,
            reverse,
            resumes,
        };
        let groups = self.plan.values.div_ceil(4 * tiles.lanes as usize);
        self.all.push(call.dispatch([groups, self.all_heads(), 1], self.device));
    }

    fn chain_tiles(&self) -> LinearTiles {
        match self.problem.tiles {
            tiles if tiles == LinearTiles::ALL[0] => ALL_TILES[0],
            tiles => tiles,
        }
    }

    fn results(&mut self, span: (usize, usize)) {
        let problem = self.problem;
        let (Some(chunks), Some(memory), Some(out)) = (self.chunks(), self.arrays(), problem.out) else {
            return;
        };
        let call = RecurrentOutCall {
            chunks,
            memory,
            written: out,
            numbers: RecurrentNumbers {
                right: self.places.errors as u32,
                result: self.places.scores as u32,
                ..self.span(span)
            },
            tiles: problem.tiles,
            width: Width::of(out.layout.in_fours(3)),
        };
        let groups = problem.tiles.groups(self.plan.chunk_len, problem.shape.value_dim);
        self.all.push(call.dispatch([groups, span.1, self.all_heads()], self.device));
    }
}
