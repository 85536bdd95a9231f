//! A checked call and the memory that it needs.

use crate::device::DeviceFacts;
use crate::kernel::{ScratchSize, Slot, fits};
use crate::linear_attention::plan::{HeadGroup, LinearTiles};
use crate::recurrent::kernels::numbers::RecurrentForm;
use crate::recurrent::kernels::recurrent_chunks::CHUNK_WORDS;
use crate::recurrent::plan::{Outline, Plan};
use crate::tensor::{Error, Shape, TensorView};

/// The most tokens of a call that are computed one after the other.
pub(crate) const FEW: usize = 16;

/// A checked call, forward or backward. In `shape`, `heads` are value heads, and `kv_heads` are
/// heads of queries and keys.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub shape: Shape,
    pub form: RecurrentForm,
    pub scale: f32,
    pub eps: f32,
    pub q: TensorView<'a>,
    pub k: TensorView<'a>,
    pub v: TensorView<'a>,
    /// The output of the forward call.
    pub out: Option<TensorView<'a>>,
    pub decay: Option<TensorView<'a>>,
    pub beta: Option<TensorView<'a>>,
    pub lengths: Option<TensorView<'a>>,
    pub starts: Option<TensorView<'a>>,
    pub initial: Option<TensorView<'a>>,
    pub last: Option<TensorView<'a>>,
    pub in_place: bool,
    pub slots: Option<TensorView<'a>>,
    pub initial_slots: Option<TensorView<'a>>,
    /// The states after each token.
    pub kept: Option<TensorView<'a>>,
    pub gradients: Option<Gradients<'a>>,
    /// The tiles of products, and the first invocations of other kernels.
    pub tiles: LinearTiles,
    /// The most value heads of all batch entries in a dispatch.
    pub most_heads: usize,
}

/// The gradients of a checked call.
#[derive(Clone, Copy)]
pub(crate) struct Gradients<'a> {
    pub d_out: TensorView<'a>,
    pub d_last: Option<TensorView<'a>>,
    pub d_q: Option<TensorView<'a>>,
    pub d_k: Option<TensorView<'a>>,
    pub d_v: Option<TensorView<'a>>,
    pub d_decay: Option<TensorView<'a>>,
    pub d_beta: Option<TensorView<'a>>,
    pub d_initial: Option<TensorView<'a>>,
    pub accumulates: bool,
}

impl<'a> Problem<'a> {
    pub fn outline(&self) -> Outline {
        Outline {
            shape: self.shape,
            delta: self.form.delta,
            by_channel: self.form.by_channel,
            unit: self.form.unit,
            backward: self.gradients.is_some(),
            packed: self.starts.map(|starts| starts.shape()[3].saturating_sub(1)),
        }
    }

    /// True if the tokens are computed one after the other.
    pub fn is_step(&self) -> bool {
        self.gradients.is_none() && self.starts.is_none() && self.shape.q_len <= FEW
    }

    /// True if a call of few tokens changes the caller's states in place.
    pub fn steps_in_place(&self) -> bool {
        self.kept.is_none() && self.last.is_some() && (self.in_place || self.initial.is_none())
    }

    pub fn groups(&self) -> Vec<HeadGroup> {
        Plan::groups(self.outline(), self.most_heads)
    }

    /// Returns the part of the call for the heads in `of`.
    pub fn part(&self, of: HeadGroup) -> Self {
        let shape = self.shape;
        let queries = |t: TensorView<'a>| of.cut(shape, t);
        let values = |t: TensorView<'a>| of.cut_queries(shape, t);
        let each = |t: Option<TensorView<'a>>| t.map(values);
        // Slots name states of all batch entries. States of packed sequences have no batch axis.
        let heads_only = HeadGroup { batch: (0, shape.batch), ..of };
        let states = |t: Option<TensorView<'a>>, named: bool| {
            let all = named || self.starts.is_some();
            t.map(|t| if all { heads_only.cut_states(shape, t) } else { of.cut_states(shape, t) })
        };
        let names = |t: Option<TensorView<'a>>| {
            t.map(|t| if self.starts.is_some() { t } else { t.slice(0, of.batch.0, of.batch.1) })
        };
        let (batch, kv_heads) = (of.batch.1, of.kv_heads.1);
        let named = self.slots.is_some();
        let kept = self.kept.map(|t| {
            let length = shape.q_len;
            heads_only.cut_states(shape, t.slice(0, of.batch.0 * length, of.batch.1 * length))
        });
        Problem {
            shape: Shape { batch, kv_heads, heads: kv_heads * shape.group(), ..shape },
            q: queries(self.q),
            k: queries(self.k),
            v: values(self.v),
            out: each(self.out),
            decay: each(self.decay),
            beta: each(self.beta),
            lengths: self.lengths.map(|t| t.slice(0, of.batch.0, of.batch.1)),
            initial: states(self.initial, named || self.initial_slots.is_some()),
            last: states(self.last, named),
            slots: names(self.slots),
            initial_slots: names(self.initial_slots),
            kept,
            gradients: self.gradients.map(|g| Gradients {
                d_out: values(g.d_out),
                d_last: states(g.d_last, named),
                d_q: g.d_q.map(queries),
                d_k: g.d_k.map(queries),
                d_v: each(g.d_v),
                d_decay: each(g.d_decay),
                d_beta: each(g.d_beta),
                d_initial: states(g.d_initial, named),
                ..g
            }),
            ..*self
        }
    }

    /// Returns the temporary memory of the call.
    pub fn scratch_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let mut all = ScratchSize::default();
        let mut seen = Vec::new();
        // Groups are as large as the first one, except at the ends.
        for group in self.groups() {
            let sizes = (group.batch.1, group.kv_heads.1);
            if !seen.contains(&sizes) {
                seen.push(sizes);
                all = all.max(self.part(group).part_scratch_size(device)?);
            }
        }
        Ok(all)
    }

    /// Returns the temporary memory of a group of heads.
    pub fn part_scratch_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let plan = Plan::new(self.outline());
        let floats = |n: usize| fits(n as u64, 4, device);
        let table =
            [plan.outline.shape.batch, plan.slots].into_iter().fold(CHUNK_WORDS, usize::saturating_mul);
        if self.is_step() {
            let tokens = if self.kept.is_some() { self.shape.q_len } else { 1 };
            let own = if self.steps_in_place() { 0 } else { plan.carry().saturating_mul(tokens) };
            let table = if self.has_table() { table } else { 0 };
            return Ok(ScratchSize::default()
                .with(Slot::SequenceStates, floats(own)?)
                .with(Slot::Chunks, floats(table)?));
        }
        Ok(ScratchSize::default()
            .with(Slot::States, floats(plan.places().total)?)
            .with(Slot::SequenceStates, floats(plan.carry())?)
            .with(Slot::GradientTerms, if self.gradients.is_some() { floats(plan.carry())? } else { 0 })
            .with(Slot::Partials, if self.gradients.is_some() { floats(plan.checkpoints())? } else { 0 })
            .with(Slot::Chunks, floats(table)?))
    }

    /// True if a call of few tokens needs the table of chunks.
    pub fn has_table(&self) -> bool {
        self.lengths.is_some() || self.slots.is_some() || self.initial_slots.is_some()
    }
}
