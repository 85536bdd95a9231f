//! A few tokens, one after the other.

use super::builder::{Builder, StateCopy, width};
use crate::linear_attention::plan::LinearTiles;
use crate::recurrent::kernels::numbers::RecurrentNumbers;
use crate::recurrent::kernels::recurrent_step::{RecurrentStepCall, STEP_TILES};

impl<'a> Builder<'a, '_> {
    /// Records the tokens. The states are the caller's if they change in place, else in scratch.
    pub fn step(&mut self) {
        let problem = self.problem;
        if problem.has_table() {
            self.table();
        }
        let in_place = problem.steps_in_place();
        let length = problem.shape.q_len;
        let tokens = if problem.kept.is_some() { length } else { 1 };
        if !in_place {
            let slots = problem.initial_slots.or(problem.slots);
            self.copy(StateCopy { step: tokens, tokens, ..self.of_sequences(problem.initial, slots) }, false);
        }
        let state = if in_place { problem.last } else { self.carried_states(tokens) };
        let (Some(state), Some(out)) = (state, problem.out) else { return };
        let tiles = match problem.tiles {
            tiles if tiles == LinearTiles::ALL[0] => STEP_TILES[0],
            tiles if tiles == LinearTiles::ALL[1] => STEP_TILES[1],
            _ => STEP_TILES[2],
        };
        let call = RecurrentStepCall {
            q: problem.q,
            k: problem.k,
            v: problem.v,
            decay: problem.decay,
            beta: problem.beta,
            chunks: self.chunks(),
            state,
            written: out,
            numbers: RecurrentNumbers {
                left: tokens as u32,
                right: u32::from(problem.kept.is_some()),
                ..self.numbers
            },
            form: problem.form,
            tiles,
            initial: !in_place || problem.in_place,
            indices: in_place && problem.slots.is_some(),
            width: width(&[&problem.v, &out]),
            state_width: width(&[&state]),
        };
        let groups = problem.shape.value_dim.div_ceil(4 * tiles.lanes as usize);
        self.all.push(call.dispatch([groups, problem.shape.heads, problem.shape.batch], self.device));
        if let Some(kept) = problem.kept {
            let all = StateCopy {
                sequences: self.plan.sequences * length,
                tokens,
                ..self.of_sequences(Some(kept), None)
            };
            self.copy(all, true);
        }
        if !in_place && problem.last.is_some() {
            let last = StateCopy {
                step: tokens,
                first: tokens - 1,
                tokens,
                ..self.of_sequences(problem.last, problem.slots)
            };
            self.copy(last, true);
        }
    }
}
