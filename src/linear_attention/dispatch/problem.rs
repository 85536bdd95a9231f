//! A checked call and the memory that it needs.

use crate::kernel::{ScratchSize, Slot, Width, in_scratch};
use crate::linear_attention::feature_map::{RandomFeatures, UpdateRule};
use crate::linear_attention::kernels::linear::{LinearForm, Phi};
use crate::linear_attention::kernels::linear_recurrent;
use crate::linear_attention::plan::{HeadBytes, HeadGroup, LinearOutline, LinearPlan, LinearTiles};
use crate::tensor::{DType, Shape, TensorView};

/// The most tokens that a call with a state processes one by one.
const FEW: usize = 8;

/// A checked call, forward or backward.
#[derive(Clone, Copy)]
pub(crate) struct LinearProblem<'a> {
    pub shape: Shape,
    /// Features of a row.
    pub features: usize,
    pub phi: Phi,
    pub random: Option<Random<'a>>,
    pub causal: bool,
    pub normalised: bool,
    pub eps: f32,
    pub scale: f32,
    pub q: TensorView<'a>,
    pub k: TensorView<'a>,
    pub v: TensorView<'a>,
    /// The output of the forward call: written, or read by a backward call.
    pub out: TensorView<'a>,
    pub key_mask: Option<TensorView<'a>>,
    pub lengths: Option<TensorView<'a>>,
    pub starts: Option<TensorView<'a>>,
    pub state: Option<LinearStateViews<'a>>,
    pub rule: UpdateRule,
    pub decay: Option<TensorView<'a>>,
    pub beta: Option<TensorView<'a>>,
    pub tiles: LinearTiles,
    /// The most query heads of all batch entries in a dispatch.
    pub most_heads: usize,
}

/// Random features.
#[derive(Clone, Copy)]
pub(crate) struct Random<'a> {
    pub kind: RandomFeatures,
    /// `[1, 1 or kv_heads, directions, head_dim]`.
    pub directions: TensorView<'a>,
}

/// A state in the caller's memory.
#[derive(Clone, Copy)]
pub(crate) struct LinearStateViews<'a> {
    pub state: TensorView<'a>,
    pub norm: TensorView<'a>,
    pub log: Option<TensorView<'a>>,
    /// True if sequences continue from this state, false if the call only writes it.
    pub given: bool,
}

impl HeadGroup {
    /// Returns the group's part of a tensor with key/value heads. A broadcast axis stays whole.
    pub fn cut<'a>(self, shape: Shape, t: TensorView<'a>) -> TensorView<'a> {
        cut(cut(t, 0, shape.batch, self.batch), 1, shape.kv_heads, self.kv_heads)
    }

    /// Returns the group's part of a tensor with query heads.
    pub fn cut_queries<'a>(self, shape: Shape, t: TensorView<'a>) -> TensorView<'a> {
        let (group, (first, count)) = (shape.group(), self.kv_heads);
        cut(cut(t, 0, shape.batch, self.batch), 1, shape.heads, (first * group, count * group))
    }
}

impl HeadGroup {
    /// Returns the group's part of states of sequences, with query heads. The first axis is cut if
    /// it has an element for each batch entry. A group of the whole batch does not cut it.
    pub fn cut_states<'a>(self, shape: Shape, t: TensorView<'a>) -> TensorView<'a> {
        let (group, (first, count)) = (shape.group(), self.kv_heads);
        let t = if self.batch.1 < shape.batch { cut(t, 0, shape.batch, self.batch) } else { t };
        cut(t, 1, shape.heads, (first * group, count * group))
    }
}

fn cut(t: TensorView, axis: usize, all: usize, (first, count): (usize, usize)) -> TensorView {
    if t.shape()[axis] == all { t.slice(axis, first, count) } else { t }
}

/// The gradients of a checked call.
#[derive(Clone, Copy)]
pub(crate) struct LinearGradientViews<'a> {
    pub d_out: TensorView<'a>,
    pub d_q: Option<TensorView<'a>>,
    pub d_k: Option<TensorView<'a>>,
    pub d_v: Option<TensorView<'a>>,
    pub accumulates: bool,
}

impl LinearGradientViews<'_> {
    /// Returns the gradients of the heads in `of`.
    pub fn part(&self, shape: Shape, of: HeadGroup) -> Self {
        let cut = |t: Option<_>| t.map(|t| of.cut(shape, t));
        LinearGradientViews {
            d_out: of.cut_queries(shape, self.d_out),
            d_q: self.d_q.map(|d_q| of.cut_queries(shape, d_q)),
            d_k: cut(self.d_k),
            d_v: cut(self.d_v),
            ..*self
        }
    }
}

impl<'a> LinearProblem<'a> {
    pub fn outline(&self) -> LinearOutline {
        let Shape { batch, heads, kv_heads, q_len, kv_len, value_dim, .. } = self.shape;
        LinearOutline {
            batch,
            heads,
            kv_heads,
            q_len,
            kv_len,
            features: self.features,
            value_dim,
            causal: self.causal,
            packed: self.starts.map(|starts| starts.shape()[3].saturating_sub(1)),
        }
    }

    /// True if keys have logarithmic weights.
    pub fn is_scaled(&self) -> bool {
        self.key_mask.is_some()
            || self.lengths.is_some()
            || self.random.is_some_and(|random| random.kind.is_scaled())
    }

    pub fn form(&self) -> LinearForm {
        LinearForm {
            tiles: self.tiles,
            causal: self.causal,
            scaled: self.is_scaled(),
            packed: self.starts.is_some(),
        }
    }

    /// Returns the width of a kernel that reads these tensors of the caller.
    pub fn width(tensors: &[&TensorView]) -> Width {
        Width::of(tensors.iter().all(|t| t.layout.in_fours(3)))
    }

    /// True if the call processes one token at a time. Either its rule is not a sum, or it has few
    /// tokens.
    pub fn is_recurrent(&self) -> bool {
        let plain = !self.is_scaled() && self.starts.is_none();
        let fits = !self.normalised || self.features <= linear_recurrent::MOST_FEATURES;
        let few = self.causal && self.state.is_some() && self.shape.q_len <= FEW && plain && fits;
        self.rule != UpdateRule::Linear || few
    }

    /// Returns two offsets in the scratch of states, in floats: of the norms, and of the end.
    pub fn own_state(&self) -> [usize; 2] {
        let Shape { batch, kv_heads, value_dim, .. } = self.shape;
        let norms = [kv_heads, self.features].into_iter().fold(batch, usize::saturating_mul);
        let states = norms.saturating_mul(value_dim);
        let first = states.checked_next_multiple_of(64).unwrap_or(usize::MAX);
        [first, first.saturating_add(norms)]
    }

    /// Returns the bytes that a key/value head of a batch entry needs. A backward pass needs more.
    fn head_bytes(&self, backward: bool) -> HeadBytes {
        let Shape { q_len, kv_len, value_dim, .. } = self.shape;
        let (plan, group) = (LinearPlan::new(&self.outline()), self.shape.group() as u64);
        let floats = |sizes: &[u64]| sizes.iter().fold(4u64, |all, n| all.saturating_mul(*n));
        let (features, q_len, kv_len) = (self.features as u64, q_len as u64, kv_len as u64);
        let of_random = match self.random {
            Some(_) => {
                let row = if backward { features.saturating_add(4) } else { features };
                floats(&[row, group.saturating_mul(q_len).saturating_add(kv_len)])
            }
            None => 0,
        };
        if self.is_recurrent() {
            let state = floats(&[features, value_dim as u64 + 1]);
            return HeadBytes { chunk: if self.state.is_some() { 0 } else { state }, rows: of_random };
        }
        let state = floats(&[features, plan.state_stride as u64]);
        let scores = floats(&[group, plan.chunk_len as u64, plan.chunk_len as u64]);
        let sequences = if self.starts.is_some() { plan.sequences as u64 } else { 1 };
        let stats = if backward { floats(&[group, q_len, 4]) } else { 0 };
        let rows = [of_random, state.saturating_mul(sequences), floats(&[kv_len]), stats];
        HeadBytes {
            chunk: if self.causal { state.max(scores) } else { state },
            rows: rows.into_iter().fold(floats(&[8, plan.slots as u64]), u64::max),
        }
    }

    /// Returns the groups of heads that are computed together.
    pub fn groups(&self, backward: bool) -> Vec<HeadGroup> {
        HeadGroup::all(&self.outline(), self.head_bytes(backward), self.most_heads)
    }

    /// Returns the part of the call for the heads in `of`.
    pub fn part(&self, of: HeadGroup) -> Self {
        let (cut, cut_each) = (|t| of.cut(self.shape, t), |t: Option<_>| t.map(|t| of.cut(self.shape, t)));
        let (batch, kv_heads) = (of.batch.1, of.kv_heads.1);
        LinearProblem {
            shape: Shape { batch, kv_heads, heads: kv_heads * self.shape.group(), ..self.shape },
            q: of.cut_queries(self.shape, self.q),
            out: of.cut_queries(self.shape, self.out),
            k: cut(self.k),
            v: cut(self.v),
            random: self.random.map(|random| Random { directions: cut(random.directions), ..random }),
            key_mask: cut_each(self.key_mask),
            lengths: cut_each(self.lengths),
            state: self.state.map(|state| LinearStateViews {
                state: cut(state.state),
                norm: cut(state.norm),
                log: cut_each(state.log),
                ..state
            }),
            decay: cut_each(self.decay),
            beta: cut_each(self.beta),
            ..*self
        }
    }

    /// Returns the largest scratch size of all groups. Groups are as large as the first one, except
    /// at the ends.
    fn largest(&self, backward: bool, size: impl Fn(&Self) -> ScratchSize) -> ScratchSize {
        let groups = self.groups(backward);
        let Some(each) = groups.first() else { return ScratchSize::default() };
        let shape = |group: &HeadGroup| (group.batch.1, group.kv_heads.1);
        let others = groups.iter().filter(|group| shape(group) != shape(each));
        others.fold(size(&self.part(*each)), |all, group| all.max(size(&self.part(*group))))
    }

    /// Returns the temporary memory of a forward call.
    pub fn scratch_size(&self) -> ScratchSize {
        self.largest(false, Self::part_scratch_size)
    }

    /// Returns the temporary memory of a backward call.
    pub fn backward_scratch_size(&self) -> ScratchSize {
        self.largest(true, Self::part_backward_scratch_size)
    }

    /// Returns the temporary memory of a forward call for one group.
    pub fn part_scratch_size(&self) -> ScratchSize {
        if self.is_recurrent() {
            let state = if self.state.is_some() { 0 } else { (self.own_state()[1] as u64).saturating_mul(4) };
            return ScratchSize::default()
                .with(Slot::SequenceStates, state)
                .with(Slot::Features, self.feature_bytes(self.features));
        }
        let outline = self.outline();
        let plan = LinearPlan::new(&outline);
        let Shape { batch, kv_heads, kv_len, .. } = self.shape;
        let rows = (batch as u64).saturating_mul(kv_heads as u64);
        let scores = if self.causal { plan.scores_bytes(&outline) } else { 0 };
        let logs = if self.is_scaled() { 4u64.saturating_mul(rows).saturating_mul(kv_len as u64) } else { 0 };
        let table = self.is_scaled() || self.starts.is_some();
        let chunks = if table { 32u64.saturating_mul(rows).saturating_mul(plan.slots as u64) } else { 0 };
        ScratchSize::default()
            .with(Slot::States, plan.states_bytes(&outline))
            .with(Slot::SequenceStates, plan.carry_bytes(&outline))
            .with(Slot::Scores, scores)
            .with(Slot::KeyLogs, logs)
            .with(Slot::Chunks, chunks)
            .with(Slot::Features, self.feature_bytes(self.features))
    }

    /// Returns the bytes of random features, or of their gradients, with `row` floats in a row.
    fn feature_bytes(&self, row: usize) -> u64 {
        if self.random.is_none() {
            return 0;
        }
        let [_, keys] = self.feature_places(row);
        let Shape { batch, kv_heads, kv_len, .. } = self.shape;
        let rows = (batch as u64).saturating_mul(kv_heads as u64).saturating_mul(kv_len as u64);
        rows.saturating_mul(row as u64).saturating_add(keys as u64).saturating_mul(4)
    }

    /// Returns the first floats of the features of queries and of keys, at offsets that every
    /// device can bind.
    fn feature_places(&self, row: usize) -> [usize; 2] {
        let Shape { batch, heads, q_len, .. } = self.shape;
        let floats = [heads, q_len, row].into_iter().fold(batch, usize::saturating_mul);
        [0, floats.checked_next_multiple_of(64).unwrap_or(usize::MAX)]
    }

    /// Returns the views of the features, or of their gradients, of queries and of keys.
    pub fn feature_views(&self, buffer: &'a wgpu::Buffer, more: usize) -> [TensorView<'a>; 2] {
        let Shape { batch, heads, kv_heads, q_len, kv_len, .. } = self.shape;
        let row = self.features + more;
        let [q, k] = self.feature_places(row);
        [(heads, q_len, q), (kv_heads, kv_len, k)].map(|(heads, len, offset)| {
            let mut view = in_scratch(buffer, DType::F32, [batch, heads, len, row], offset);
            view.layout.shape[3] = self.features;
            view
        })
    }

    /// Returns the temporary memory of a backward call for one group.
    pub fn part_backward_scratch_size(&self) -> ScratchSize {
        let outline = self.outline();
        let scores = if self.causal { LinearPlan::new(&outline).scores_bytes(&outline) } else { 0 };
        let Shape { batch, heads, q_len, .. } = self.shape;
        let rows = (batch as u64).saturating_mul(heads as u64).saturating_mul(q_len as u64);
        self.part_scratch_size()
            .with(Slot::ScoreGradients, scores)
            .with(Slot::RowStats, rows.saturating_mul(16))
            .with(Slot::FeatureGradients, self.feature_bytes(self.features.saturating_add(4)))
    }
}
