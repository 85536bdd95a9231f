//! The builder of the dispatches of a group of heads.

use super::Problem;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Scratch, Slot, Width, in_scratch};
use crate::recurrent::kernels::numbers::RecurrentNumbers;
use crate::recurrent::kernels::recurrent_carry::RecurrentCarryCall;
use crate::recurrent::kernels::recurrent_chunks::{self, CHUNK_WORDS, RecurrentChunksCall};
use crate::recurrent::plan::{Places, Plan};
use crate::tensor::{DType, Error, Shape, TensorView};

/// The buffers of the scratch, absent if the call does not need them.
pub(super) struct Memory<'a> {
    arrays: Option<&'a wgpu::Buffer>,
    carry: Option<&'a wgpu::Buffer>,
    d_carry: Option<&'a wgpu::Buffer>,
    checkpoints: Option<&'a wgpu::Buffer>,
    chunks: Option<&'a wgpu::Buffer>,
}

/// The builder of the dispatches of a group of heads.
pub(super) struct Builder<'a, 'p> {
    pub problem: &'p Problem<'a>,
    pub plan: Plan,
    pub places: Places,
    pub numbers: RecurrentNumbers,
    pub device: &'p DeviceFacts,
    pub all: Dispatches<'a>,
    /// True if the states of sequences are gradients.
    pub carries_gradients: bool,
    memory: Memory<'a>,
}

/// A way to copy states of sequences: the caller's states, and their places. Sequence n has the
/// place `n · step + first` in scratch.
#[derive(Clone, Copy)]
pub(super) struct StateCopy<'a> {
    pub state: Option<TensorView<'a>>,
    pub slots: Option<TensorView<'a>>,
    pub sequences: usize,
    pub step: usize,
    pub first: usize,
    /// States of each sequence in scratch.
    pub tokens: usize,
    pub accumulates: bool,
}

impl<'a, 'p> Builder<'a, 'p> {
    pub fn new(
        problem: &'p Problem<'a>,
        scratch: &'a Scratch,
        device: &'p DeviceFacts,
    ) -> Result<Self, Error> {
        let plan = Plan::new(problem.outline());
        let places = plan.places();
        let size = problem.part_scratch_size(device)?;
        let part = |slot| if size.has(slot) { scratch.buffer(slot).map(Some) } else { Ok(None) };
        let memory = Memory {
            arrays: part(Slot::States)?,
            carry: part(Slot::SequenceStates)?,
            d_carry: part(Slot::GradientTerms)?,
            checkpoints: part(Slot::Partials)?,
            chunks: part(Slot::Chunks)?,
        };
        let Shape { heads, q_len, head_dim, value_dim, .. } = problem.shape;
        let states = |t: Option<TensorView>| t.map_or(plan.sequences, |t| t.shape()[0]) as u32;
        let numbers = RecurrentNumbers {
            value_heads: heads as u32,
            group: problem.shape.group() as u32,
            head_dim: head_dim as u32,
            value_dim: value_dim as u32,
            features: plan.features as u32,
            values: plan.values as u32,
            length: q_len as u32,
            chunk_len: plan.chunk_len as u32,
            first_slot: 0,
            slots: plan.slots as u32,
            all_slots: plan.slots as u32,
            sequences: plan.sequences as u32,
            all_states: states(problem.last.or(problem.initial)),
            all_initial: states(problem.initial),
            scale: problem.scale,
            eps: problem.eps,
            queries: places.queries as u32,
            keys: places.keys as u32,
            prefix_queries: places.prefix_queries as u32,
            prefix_keys: places.prefix_keys as u32,
            suffix_keys: places.suffix_keys as u32,
            factors: places.factors as u32,
            rates: places.rates as u32,
            ends: places.ends as u32,
            norms: places.norms as u32,
            scores: places.scores as u32,
            states: places.states as u32,
            d_out: places.d_out as u32,
            d_queries: places.d_queries as u32,
            d_keys: places.d_keys as u32,
            d_suffix_keys: places.d_suffix_keys as u32,
            d_states: places.d_states as u32,
            d_ends: places.d_ends as u32,
            second_result: plan.second_scores() as u32,
            second_sign: 1.0,
            ..RecurrentNumbers::default()
        };
        Ok(Builder {
            problem,
            plan,
            places,
            numbers,
            device,
            all: Dispatches::new(),
            carries_gradients: false,
            memory,
        })
    }

    fn floats(buffer: &'a wgpu::Buffer, count: usize) -> TensorView<'a> {
        in_scratch(buffer, DType::F32, [1, 1, 1, count], 0)
    }

    /// Returns the arrays of a span.
    pub fn arrays(&self) -> Option<TensorView<'a>> {
        Some(Self::floats(self.memory.arrays?, self.places.total))
    }

    /// Returns the states of sequences in scratch, or `tokens` states of each.
    pub fn carry(&self, tokens: usize) -> Option<TensorView<'a>> {
        let buffer = if self.carries_gradients { self.memory.d_carry } else { self.memory.carry };
        Some(Self::floats(buffer?, self.plan.carry() * tokens))
    }

    /// Returns the same states, with an axis for each index.
    pub fn carried_states(&self, tokens: usize) -> Option<TensorView<'a>> {
        let Plan { sequences, features, values, .. } = self.plan;
        let shape = [sequences * tokens, self.problem.shape.heads, features, values];
        let mut view = in_scratch(self.memory.carry?, DType::F32, shape, 0);
        view.layout.shape[2] = self.problem.shape.head_dim;
        Some(view)
    }

    pub fn checkpoints(&self, span: usize) -> Option<TensorView<'a>> {
        let Shape { batch, heads, .. } = self.problem.shape;
        let count = batch * heads * self.plan.state();
        Some(in_scratch(self.memory.checkpoints?, DType::F32, [1, 1, 1, count], span * count))
    }

    pub fn chunks(&self) -> Option<TensorView<'a>> {
        let words = CHUNK_WORDS * self.problem.shape.batch * self.plan.slots;
        Some(in_scratch(self.memory.chunks?, DType::U32, [1, 1, 1, words], 0))
    }

    /// Records the table of chunks.
    pub fn table(&mut self) {
        let problem = self.problem;
        let Some(chunks) = self.chunks() else { return };
        let call = RecurrentChunksCall {
            lengths: problem.lengths,
            starts: problem.starts,
            indices: problem.slots,
            initial_indices: problem.initial_slots,
            chunks,
            numbers: self.numbers,
        };
        let groups = self.plan.slots.div_ceil(recurrent_chunks::WORKGROUP);
        self.all.push(call.dispatch([groups, problem.shape.batch, 1], self.device));
    }

    /// Copies states of sequences from the caller's memory, or to it if `kept`.
    pub fn copy(&mut self, copy: StateCopy<'a>, kept: bool) {
        let Some(carry) = self.carry(copy.tokens) else { return };
        let workgroup = self.problem.tiles.workgroup;
        let groups = self.plan.state().div_ceil(4 * workgroup as usize);
        let most = self.device.max_workgroups.max(1) as usize;
        for first in (0..copy.sequences).step_by(most) {
            let call = RecurrentCarryCall {
                state: copy.state,
                indices: copy.slots.filter(|_| copy.state.is_some()),
                carry,
                numbers: RecurrentNumbers {
                    left: copy.step as u32,
                    right: copy.first as u32,
                    all_states: copy.state.map_or(0, |t| t.shape()[0]) as u32,
                    accumulates: copy.accumulates.into(),
                    ..self.numbers
                },
                first_sequence: first as u32,
                workgroup,
                kept,
            };
            let counts = [groups, self.problem.shape.heads, most.min(copy.sequences - first)];
            self.all.push(call.dispatch(counts, self.device));
        }
    }

    /// Returns the copy of a state for each sequence.
    pub fn of_sequences(
        &self,
        state: Option<TensorView<'a>>,
        slots: Option<TensorView<'a>>,
    ) -> StateCopy<'a> {
        StateCopy {
            state,
            slots,
            sequences: self.plan.sequences,
            step: 1,
            first: 0,
            tokens: 1,
            accumulates: false,
        }
    }

    /// Copies the states before the call into scratch.
    pub fn begin(&mut self) {
        let problem = self.problem;
        let initial = problem.initial;
        self.copy(self.of_sequences(initial, problem.initial_slots.or(problem.slots)), false);
    }

    pub fn span(&self, (first, count): (usize, usize)) -> RecurrentNumbers {
        RecurrentNumbers { first_slot: first as u32, slots: count as u32, ..self.numbers }
    }

    /// Returns the value heads of all batch entries.
    pub fn all_heads(&self) -> usize {
        self.problem.shape.batch * self.problem.shape.heads
    }
}

/// Returns the width of a kernel that reads or writes these tensors of the caller.
pub(super) fn width(tensors: &[&TensorView]) -> Width {
    Width::of(tensors.iter().all(|t| t.layout.in_fours(3)))
}
