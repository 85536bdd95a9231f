//! The builder of the dispatches of a call.

use super::LinearProblem;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Scratch, ScratchSize, Slot, in_scratch};
use crate::linear_attention::kernels::linear::LinearNumbers;
use crate::linear_attention::plan::{LinearOutline, LinearPlan};
use crate::tensor::{DType, Error, Shape, TensorView};

/// The buffers of the scratch, absent if the call does not need them.
pub(super) struct Memory<'a> {
    pub states: Option<&'a wgpu::Buffer>,
    pub carry: Option<&'a wgpu::Buffer>,
    pub scores: Option<&'a wgpu::Buffer>,
    pub d_scores: Option<&'a wgpu::Buffer>,
    pub stats: Option<&'a wgpu::Buffer>,
    pub logs: Option<&'a wgpu::Buffer>,
    pub chunks: Option<&'a wgpu::Buffer>,
}

impl<'a> Memory<'a> {
    pub fn new(size: ScratchSize, scratch: &'a Scratch) -> Result<Self, Error> {
        let part = |slot| if size.has(slot) { scratch.buffer(slot).map(Some) } else { Ok(None) };
        Ok(Memory {
            states: part(Slot::States)?,
            carry: part(Slot::SequenceStates)?,
            scores: part(Slot::Scores)?,
            d_scores: part(Slot::ScoreGradients)?,
            stats: part(Slot::RowStats)?,
            logs: part(Slot::KeyLogs)?,
            chunks: part(Slot::Chunks)?,
        })
    }
}

/// The builder of the dispatches of a call.
pub(super) struct Builder<'a, 'p> {
    pub problem: &'p LinearProblem<'a>,
    pub plan: LinearPlan,
    pub outline: LinearOutline,
    pub memory: Memory<'a>,
    pub device: &'p DeviceFacts,
    pub numbers: LinearNumbers,
    pub all: Dispatches<'a>,
}

impl<'a, 'p> Builder<'a, 'p> {
    pub fn new(
        problem: &'p LinearProblem<'a>,
        size: ScratchSize,
        scratch: &'a Scratch,
        device: &'p DeviceFacts,
    ) -> Result<Self, Error> {
        scratch.check(size)?;
        let outline = problem.outline();
        let plan = LinearPlan::new(&outline);
        let Shape { heads, kv_heads, q_len, kv_len, value_dim, .. } = problem.shape;
        let numbers = LinearNumbers {
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            group: problem.shape.group() as u32,
            features: problem.features as u32,
            q_len: q_len as u32,
            kv_len: kv_len as u32,
            value_dim: value_dim as u32,
            chunk_len: plan.chunk_len as u32,
            first_slot: 0,
            slots: plan.slots as u32,
            all_slots: plan.slots as u32,
            sequences: if problem.starts.is_some() { plan.sequences as u32 } else { 0 },
            state_stride: plan.state_stride as u32,
            accumulates: 0,
            has_state: problem.state.is_some_and(|state| state.given).into(),
            eps: problem.eps,
            scale: problem.scale,
            neg_inf: f32::NEG_INFINITY,
            head_dim: problem.shape.head_dim as u32,
            direction_count: problem.random.map_or(0, |random| random.directions.shape()[2] as u32),
            value_exponent: 0,
            value_scale: 1.0,
        };
        let memory = Memory::new(size, scratch)?;
        Ok(Builder { problem, plan, outline, memory, device, numbers, all: Vec::new() })
    }

    fn floats(&self, buffer: &'a wgpu::Buffer, bytes: u64) -> TensorView<'a> {
        in_scratch(buffer, DType::F32, [1, 1, 1, (bytes / 4) as usize], 0)
    }

    pub fn states(&self) -> Option<TensorView<'a>> {
        Some(self.floats(self.memory.states?, self.plan.states_bytes(&self.outline)))
    }

    pub fn carry(&self) -> Option<TensorView<'a>> {
        Some(self.floats(self.memory.carry?, self.plan.carry_bytes(&self.outline)))
    }

    /// Returns the states that the results read: before each chunk if causal, else of sequences.
    pub fn read_states(&self) -> Option<TensorView<'a>> {
        if self.problem.causal { self.states() } else { self.carry() }
    }

    pub fn scores(&self) -> Option<TensorView<'a>> {
        Some(self.floats(self.memory.scores?, self.plan.scores_bytes(&self.outline)))
    }

    pub fn d_scores(&self) -> Option<TensorView<'a>> {
        Some(self.floats(self.memory.d_scores?, self.plan.scores_bytes(&self.outline)))
    }

    pub fn stats(&self) -> Option<TensorView<'a>> {
        let Shape { batch, heads, q_len, .. } = self.problem.shape;
        Some(self.floats(self.memory.stats?, (batch * heads * q_len) as u64 * 16))
    }

    pub fn logs(&self) -> Option<TensorView<'a>> {
        let Shape { batch, kv_heads, kv_len, .. } = self.problem.shape;
        Some(self.floats(self.memory.logs?, (batch * kv_heads * kv_len) as u64 * 4))
    }

    pub fn chunks(&self) -> Option<TensorView<'a>> {
        let Shape { batch, kv_heads, .. } = self.problem.shape;
        let words = 8 * batch * kv_heads * self.plan.slots;
        Some(in_scratch(self.memory.chunks?, DType::U32, [1, 1, 1, words], 0))
    }
}
