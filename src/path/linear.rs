//! Linear attention: states of chunks, running sums of them, results.

use super::dispatches::{Dispatches, grid, in_scratch};
use crate::device::DeviceFacts;
use crate::error::Error;
use crate::feature_map::{RandomFeatures, UpdateRule};
use crate::kernel::{Dispatch, View};
use crate::kernels::KernelVariant;
use crate::kernels::linear::{LinearForm, Params, Phi, ROWS_EACH, Randoms, RowsForm};
use crate::kernels::linear_carry::Way;
use crate::kernels::{
    linear_carry, linear_chunks, linear_d_keys, linear_d_queries, linear_d_rows, linear_d_values,
    linear_features, linear_logs, linear_map, linear_map_backward, linear_out, linear_prefix,
    linear_recurrent, linear_scores, linear_state, linear_stats,
};
use crate::plan::{LinearOutline, LinearPlan, LinearTiles};
use crate::problem::Shape;
use crate::scratch::{Scratch, ScratchSize, Slot};
use crate::tensor::{DType, TensorView, Window, broadcast};

/// Tokens that are taken one by one where there is a state.
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
    /// What is written, or was.
    pub out: TensorView<'a>,
    pub key_mask: Option<TensorView<'a>>,
    pub lengths: Option<TensorView<'a>>,
    pub starts: Option<TensorView<'a>>,
    pub state: Option<LinearStateViews<'a>>,
    pub rule: UpdateRule,
    pub decay: Option<TensorView<'a>>,
    pub beta: Option<TensorView<'a>>,
    pub tiles: LinearTiles,
}

/// Random features.
#[derive(Clone, Copy)]
pub(crate) struct Random<'a> {
    pub kind: RandomFeatures,
    /// `[1, 1 or kv_heads, directions, head_dim]`.
    pub directions: TensorView<'a>,
}

/// A state of the caller's.
#[derive(Clone, Copy)]
pub(crate) struct LinearStateViews<'a> {
    pub state: TensorView<'a>,
    pub norm: TensorView<'a>,
    pub log: Option<TensorView<'a>>,
    /// Whether sequences begin with it.
    pub given: bool,
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

    /// Whether keys have logarithmic weights.
    fn is_scaled(&self) -> bool {
        self.key_mask.is_some()
            || self.lengths.is_some()
            || self.random.is_some_and(|random| random.kind.is_scaled())
    }

    fn form(&self, tensors: &[&TensorView]) -> LinearForm {
        LinearForm {
            tiles: self.tiles,
            causal: self.causal,
            scaled: self.is_scaled(),
            packed: self.starts.is_some(),
            fours: tensors.iter().all(|t| t.layout.in_fours(3)),
        }
    }

    /// Whether it goes token by token: by a rule that is no sum, or because there are few.
    fn is_recurrent(&self) -> bool {
        let plain = !self.is_scaled() && self.starts.is_none();
        let fits = !self.normalised || self.features <= linear_recurrent::MOST_FEATURES;
        let few = self.causal && self.state.is_some() && self.shape.q_len <= FEW && plain && fits;
        self.rule != UpdateRule::Linear || few
    }

    /// Floats of states, then the first of their norms, where the caller has none.
    fn own_state(&self) -> [usize; 2] {
        let Shape { batch, kv_heads, value_dim, .. } = self.shape;
        let norms = [kv_heads, self.features].into_iter().fold(batch, usize::saturating_mul);
        let states = norms.saturating_mul(value_dim);
        let first = states.checked_next_multiple_of(64).unwrap_or(usize::MAX);
        [first, first.saturating_add(norms)]
    }

    /// The temporary memory of a forward call.
    pub fn scratch_size(&self) -> ScratchSize {
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

    /// Bytes of random features, or of their gradients, with rows of so many floats.
    fn feature_bytes(&self, row: usize) -> u64 {
        if self.random.is_none() {
            return 0;
        }
        let [_, keys] = self.feature_places(row);
        let Shape { batch, kv_heads, kv_len, .. } = self.shape;
        let rows = (batch as u64).saturating_mul(kv_heads as u64).saturating_mul(kv_len as u64);
        rows.saturating_mul(row as u64).saturating_add(keys as u64).saturating_mul(4)
    }

    /// The first floats of features of queries and of keys: where every device can bind.
    fn feature_places(&self, row: usize) -> [usize; 2] {
        let Shape { batch, heads, q_len, .. } = self.shape;
        let floats = [heads, q_len, row].into_iter().fold(batch, usize::saturating_mul);
        [0, floats.checked_next_multiple_of(64).unwrap_or(usize::MAX)]
    }

    /// Features, or their gradients, of queries and of keys.
    fn feature_views(&self, buffer: &'a wgpu::Buffer, more: usize) -> [TensorView<'a>; 2] {
        let Shape { batch, heads, kv_heads, q_len, kv_len, .. } = self.shape;
        let row = self.features + more;
        let [q, k] = self.feature_places(row);
        [(heads, q_len, q), (kv_heads, kv_len, k)].map(|(heads, len, offset)| {
            let mut view = in_scratch(buffer, DType::F32, [batch, heads, len, row], offset);
            view.layout.shape[3] = self.features;
            view
        })
    }

    /// That of a backward call.
    pub fn backward_scratch_size(&self) -> ScratchSize {
        let outline = self.outline();
        let scores = if self.causal { LinearPlan::new(&outline).scores_bytes(&outline) } else { 0 };
        let Shape { batch, heads, q_len, .. } = self.shape;
        let rows = (batch as u64).saturating_mul(heads as u64).saturating_mul(q_len as u64);
        self.scratch_size()
            .with(Slot::ScoreGradients, scores)
            .with(Slot::RowStats, rows.saturating_mul(16))
            .with(Slot::FeatureGradients, self.feature_bytes(self.features.saturating_add(4)))
    }
}

/// Buffers of the scratch, as far as the call has them.
struct Memory<'a> {
    states: Option<&'a wgpu::Buffer>,
    carry: Option<&'a wgpu::Buffer>,
    scores: Option<&'a wgpu::Buffer>,
    d_scores: Option<&'a wgpu::Buffer>,
    stats: Option<&'a wgpu::Buffer>,
    logs: Option<&'a wgpu::Buffer>,
    chunks: Option<&'a wgpu::Buffer>,
}

impl<'a> Memory<'a> {
    fn new(size: ScratchSize, scratch: &'a Scratch) -> Result<Self, Error> {
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

/// Dispatches of a call that are being put together.
struct Recorder<'a, 'p> {
    problem: &'p LinearProblem<'a>,
    plan: LinearPlan,
    outline: LinearOutline,
    memory: Memory<'a>,
    device: &'p DeviceFacts,
    params: Params,
    all: Dispatches<'a>,
}

impl<'a, 'p> Recorder<'a, 'p> {
    fn new(
        problem: &'p LinearProblem<'a>,
        size: ScratchSize,
        scratch: &'a Scratch,
        device: &'p DeviceFacts,
    ) -> Result<Self, Error> {
        scratch.check(size)?;
        let outline = problem.outline();
        let plan = LinearPlan::new(&outline);
        let Shape { heads, kv_heads, q_len, kv_len, value_dim, .. } = problem.shape;
        let view = |t: TensorView| View::from(t.window(device).layout);
        let params = Params {
            q: view(problem.q),
            k: view(problem.k),
            v: view(problem.v),
            d_out: View::default(),
            x: view(problem.out),
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
            directions: problem.random.map_or(0, |random| random.directions.shape()[2] as u32),
        };
        let memory = Memory::new(size, scratch)?;
        Ok(Recorder { problem, plan, outline, memory, device, params, all: Vec::new() })
    }

    fn push(&mut self, variant: KernelVariant, params: Params, tensors: Vec<Window<'a>>, counts: [usize; 3]) {
        self.all.push(Dispatch {
            variant,
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors,
            grid: grid(counts),
        });
    }

    fn window(&self, view: TensorView<'a>) -> Window<'a> {
        view.window(self.device)
    }

    fn floats(&self, buffer: &'a wgpu::Buffer, bytes: u64) -> Window<'a> {
        in_scratch(buffer, DType::F32, [1, 1, 1, (bytes / 4) as usize], 0).window(self.device)
    }

    fn states(&self) -> Option<Window<'a>> {
        Some(self.floats(self.memory.states?, self.plan.states_bytes(&self.outline)))
    }

    fn carry(&self) -> Option<Window<'a>> {
        Some(self.floats(self.memory.carry?, self.plan.carry_bytes(&self.outline)))
    }

    /// States as results read them: before chunks if causal, else of sequences.
    fn read_states(&self) -> Option<Window<'a>> {
        if self.problem.causal { self.states() } else { self.carry() }
    }

    fn scores(&self) -> Option<Window<'a>> {
        Some(self.floats(self.memory.scores?, self.plan.scores_bytes(&self.outline)))
    }

    fn d_scores(&self) -> Option<Window<'a>> {
        Some(self.floats(self.memory.d_scores?, self.plan.scores_bytes(&self.outline)))
    }

    fn stats(&self) -> Option<Window<'a>> {
        let Shape { batch, heads, q_len, .. } = self.problem.shape;
        Some(self.floats(self.memory.stats?, (batch * heads * q_len) as u64 * 16))
    }

    fn logs(&self) -> Option<Window<'a>> {
        let Shape { batch, kv_heads, kv_len, .. } = self.problem.shape;
        Some(self.floats(self.memory.logs?, (batch * kv_heads * kv_len) as u64 * 4))
    }

    fn chunks(&self) -> Option<Window<'a>> {
        let Shape { batch, kv_heads, .. } = self.problem.shape;
        let words = 8 * batch * kv_heads * self.plan.slots;
        Some(in_scratch(self.memory.chunks?, DType::U32, [1, 1, 1, words], 0).window(self.device))
    }

    /// The table of chunks and the weights of keys, where the call has any.
    fn prepare(&mut self) {
        let problem = self.problem;
        let Some(chunks) = self.chunks() else { return };
        let Shape { batch, kv_heads, .. } = problem.shape;
        let broadcasted = |t: Option<TensorView<'a>>, shape: [usize; 2]| {
            t.map(|mut t| {
                t.layout = broadcast(t.layout);
                t.layout.shape[0] = shape[0];
                t.layout.shape[1] = shape[1];
                t
            })
        };
        let key_mask = broadcasted(problem.key_mask, [batch, kv_heads]);
        let lengths = broadcasted(problem.lengths, [batch, kv_heads]);
        let view =
            |t: Option<TensorView>| t.map_or(View::default(), |t| View::from(t.window(self.device).layout));
        let params = Params { k: view(key_mask), v: view(lengths), q: view(problem.starts), ..self.params };
        let tensors = [key_mask, lengths, problem.starts].map(|t| t.map(|t| self.window(t)));
        let tensors = tensors.into_iter().chain([self.logs(), Some(chunks)]).flatten().collect();
        let variant = linear_chunks::LinearChunks {
            key_mask: key_mask.is_some(),
            lengths: lengths.is_some(),
            packed: problem.starts.is_some(),
            scaled: problem.is_scaled(),
            has_logs: problem.random.is_some_and(|random| random.kind.is_scaled()),
        };
        let groups = self.plan.slots.div_ceil(linear_chunks::WORKGROUP);
        self.push(KernelVariant::LinearChunks(variant), params, tensors, [groups, kv_heads, batch]);
        if problem.is_scaled() {
            let log = problem.state.and_then(|state| state.log);
            let variant = linear_logs::LinearLogs { causal: problem.causal, state: log.is_some() };
            let params = Params { x: view(log), ..self.params };
            let tensors = [Some(chunks), log.map(|log| self.window(log))].into_iter().flatten().collect();
            self.push(KernelVariant::LinearLogs(variant), params, tensors, [1, kv_heads, batch]);
        }
    }

    /// States of sequences from or to memory of the caller's, or none.
    fn carry_over(&mut self, way: Way) {
        let state = self.problem.state;
        let mut params = self.params;
        let mut tensors = Vec::new();
        if let (Some(state), false) = (state, way == Way::Zero) {
            params.x = View::from(state.state.window(self.device).layout);
            params.v = View::from(state.norm.window(self.device).layout);
            tensors.extend([self.window(state.state), self.window(state.norm)]);
        }
        tensors.extend(self.carry());
        let size = self.problem.features * self.plan.state_stride;
        let counts =
            [size.div_ceil(4 * linear_carry::WORKGROUP), self.problem.shape.kv_heads, self.plan.sequences];
        self.push(KernelVariant::LinearCarry(linear_carry::LinearCarry { way }), params, tensors, counts);
    }

    fn span(&self, (first, count): (usize, usize)) -> Params {
        Params { first_slot: first as u32, slots: count as u32, ..self.params }
    }

    /// What chunks of keys add to the state, and the running sums.
    fn key_states(&mut self, span: (usize, usize)) {
        let problem = self.problem;
        let form = problem.form(&[&problem.k, &problem.v]);
        let variant = linear_state::LinearState {
            form,
            phi: problem.phi,
            features: problem.k.dtype(),
            values: problem.v.dtype(),
            of_queries: false,
        };
        let tensors = [
            Some(self.window(problem.k)),
            Some(self.window(problem.v)),
            self.logs(),
            self.chunks(),
            self.states(),
        ];
        let tensors = tensors.into_iter().flatten().collect();
        self.push_states(KernelVariant::LinearState(variant), tensors, span);
        self.prefix(span, false);
    }

    fn push_states(&mut self, variant: KernelVariant, tensors: Vec<Window<'a>>, span: (usize, usize)) {
        let problem = self.problem;
        let groups = problem.tiles.groups(problem.features, self.plan.state_stride);
        let counts = [groups, span.1, problem.shape.batch * problem.shape.kv_heads];
        self.push(variant, self.span(span), tensors, counts);
    }

    fn prefix(&mut self, span: (usize, usize), of_queries: bool) {
        let problem = self.problem;
        let form = problem.form(&[]);
        let variant = linear_prefix::LinearPrefix { form, reverse: of_queries, of_queries };
        let tensors = [self.states(), self.carry(), self.chunks()];
        let tensors = tensors.into_iter().flatten().collect();
        let size = problem.features * self.plan.state_stride;
        let groups = size.div_ceil(4 * problem.tiles.workgroup as usize);
        let counts = [groups, problem.shape.kv_heads, problem.shape.batch];
        self.push(KernelVariant::LinearPrefix(variant), self.span(span), tensors, counts);
    }

    /// Products of features within chunks.
    fn products(&mut self, span: (usize, usize)) {
        let problem = self.problem;
        let variant = linear_scores::LinearScores {
            form: problem.form(&[&problem.q, &problem.k]),
            phi: problem.phi,
            query_side: problem.q.dtype(),
            key_side: problem.k.dtype(),
            of_gradients: false,
        };
        let tensors = [
            Some(self.window(problem.q)),
            Some(self.window(problem.k)),
            self.logs(),
            self.chunks(),
            self.scores(),
        ];
        let tensors = tensors.into_iter().flatten().collect();
        self.push_scores(variant, self.span(span), tensors);
    }

    fn push_scores(
        &mut self,
        variant: linear_scores::LinearScores,
        params: Params,
        tensors: Vec<Window<'a>>,
    ) {
        let problem = self.problem;
        let groups = problem.tiles.groups(self.plan.chunk_len, self.plan.chunk_len);
        let counts = [groups, params.slots as usize, problem.shape.batch * problem.shape.heads];
        self.push(KernelVariant::LinearScores(variant), params, tensors, counts);
    }

    /// The table for what reads rows of queries: where order does not matter and nothing is packed there is none.
    fn query_form(&self, tensors: &[&TensorView]) -> LinearForm {
        let form = self.problem.form(tensors);
        LinearForm { scaled: form.scaled && form.causal, ..form }
    }

    fn query_chunks(&self) -> Option<Window<'a>> {
        self.chunks().filter(|_| self.problem.causal || self.problem.starts.is_some())
    }

    fn results(&mut self, span: (usize, usize)) {
        let problem = self.problem;
        let causal = problem.causal;
        let mut tensors = vec![&problem.q, &problem.out];
        tensors.extend(causal.then_some(&problem.v));
        let variant = linear_out::LinearOut {
            form: self.query_form(&tensors),
            phi: problem.phi,
            q: problem.q.dtype(),
            v: problem.v.dtype(),
            out: problem.out.dtype(),
            normalised: problem.normalised,
        };
        let tensors = [
            Some(self.window(problem.q)),
            self.read_states(),
            causal.then(|| self.window(problem.v)),
            self.scores(),
            self.logs().filter(|_| causal),
            self.query_chunks(),
            Some(self.window(problem.out)),
        ];
        let tensors = tensors.into_iter().flatten().collect();
        let groups = problem.tiles.groups(self.plan.chunk_len, problem.shape.value_dim);
        let counts = [groups, span.1, problem.shape.batch * problem.shape.heads];
        self.push(KernelVariant::LinearOut(variant), self.span(span), tensors, counts);
    }

    // Backward.

    fn row_stats(&mut self, gradients: &LinearGradientViews<'a>, span: (usize, usize)) {
        let problem = self.problem;
        let normalised = problem.normalised;
        let variant = linear_stats::LinearStats {
            form: self.query_form(&[&problem.q, &gradients.d_out, &problem.out]),
            phi: problem.phi,
            q: problem.q.dtype(),
            d_out: gradients.d_out.dtype(),
            normalised,
        };
        let tensors = [
            normalised.then(|| self.window(problem.q)),
            normalised.then(|| self.window(gradients.d_out)),
            normalised.then(|| self.window(problem.out)),
            self.read_states().filter(|_| normalised),
            self.scores().filter(|_| normalised),
            self.logs().filter(|_| problem.causal),
            self.query_chunks(),
            self.stats(),
        ];
        let tensors = tensors.into_iter().flatten().collect();
        let groups = self.plan.chunk_len.div_ceil(problem.tiles.workgroup as usize);
        let counts = [groups, span.1, problem.shape.batch * problem.shape.heads];
        self.push(KernelVariant::LinearStats(variant), self.span(span), tensors, counts);
    }

    fn gradient_products(&mut self, gradients: &LinearGradientViews<'a>, span: (usize, usize)) {
        let problem = self.problem;
        let variant = linear_scores::LinearScores {
            form: problem.form(&[&gradients.d_out, &problem.v]),
            phi: Phi::Identity,
            query_side: gradients.d_out.dtype(),
            key_side: problem.v.dtype(),
            of_gradients: true,
        };
        let tensors = [
            Some(self.window(gradients.d_out)),
            Some(self.window(problem.v)),
            self.stats(),
            self.logs(),
            self.chunks(),
            self.d_scores(),
        ];
        let tensors = tensors.into_iter().flatten().collect();
        self.push_scores(variant, self.span(span), tensors);
    }

    fn d_queries(&mut self, gradients: &LinearGradientViews<'a>, d_q: TensorView<'a>, span: (usize, usize)) {
        let problem = self.problem;
        let causal = problem.causal;
        let sloped = problem.phi != Phi::Identity;
        let mut tensors = vec![&gradients.d_out, &d_q];
        tensors.extend(sloped.then_some(&problem.q));
        tensors.extend(causal.then_some(&problem.k));
        let variant = linear_d_queries::LinearDQueries {
            form: self.query_form(&tensors),
            phi: problem.phi,
            features: problem.q.dtype(),
            d_out: gradients.d_out.dtype(),
            gradient: d_q.dtype(),
        };
        let tensors = [
            sloped.then(|| self.window(problem.q)),
            Some(self.window(gradients.d_out)),
            self.read_states(),
            self.stats(),
            causal.then(|| self.window(problem.k)),
            self.d_scores(),
            self.query_chunks(),
            Some(self.window(d_q)),
        ];
        let tensors = tensors.into_iter().flatten().collect();
        let groups = problem.tiles.groups(self.plan.chunk_len, problem.features);
        let counts = [groups, span.1, problem.shape.batch * problem.shape.heads];
        let params = self.written(gradients, d_q, true, span);
        self.push(KernelVariant::LinearDQueries(variant), params, tensors, counts);
    }

    fn written(
        &self,
        gradients: &LinearGradientViews,
        x: TensorView,
        of_features: bool,
        span: (usize, usize),
    ) -> Params {
        Params {
            x: View::from(x.window(self.device).layout),
            // Gradients of random features are in scratch.
            accumulates: (gradients.accumulates && !(self.problem.random.is_some() && of_features)).into(),
            ..self.span(span)
        }
    }

    /// The gradients of the states of chunks, from the last to the first.
    fn query_states(&mut self, gradients: &LinearGradientViews<'a>, span: (usize, usize)) {
        let problem = self.problem;
        let variant = linear_state::LinearState {
            form: self.query_form(&[&problem.q, &gradients.d_out]),
            phi: problem.phi,
            features: problem.q.dtype(),
            values: gradients.d_out.dtype(),
            of_queries: true,
        };
        let tensors = [
            Some(self.window(problem.q)),
            Some(self.window(gradients.d_out)),
            self.stats(),
            self.query_chunks(),
            self.states(),
        ];
        let tensors = tensors.into_iter().flatten().collect();
        self.push_states(KernelVariant::LinearState(variant), tensors, span);
        let form = self.query_form(&[]);
        let variant = linear_prefix::LinearPrefix { form, reverse: true, of_queries: true };
        let tensors = [self.states(), self.carry(), self.query_chunks()];
        let tensors = tensors.into_iter().flatten().collect();
        let size = problem.features * self.plan.state_stride;
        let groups = size.div_ceil(4 * problem.tiles.workgroup as usize);
        let counts = [groups, problem.shape.kv_heads, problem.shape.batch];
        self.push(KernelVariant::LinearPrefix(variant), self.span(span), tensors, counts);
    }

    fn d_keys(&mut self, gradients: &LinearGradientViews<'a>, d_k: TensorView<'a>, span: (usize, usize)) {
        let problem = self.problem;
        let causal = problem.causal;
        let sloped = problem.phi != Phi::Identity;
        let mut tensors = vec![&problem.v, &d_k];
        tensors.extend(sloped.then_some(&problem.k));
        tensors.extend(causal.then_some(&problem.q));
        let variant = linear_d_keys::LinearDKeys {
            form: problem.form(&tensors),
            phi: problem.phi,
            features: problem.k.dtype(),
            v: problem.v.dtype(),
            gradient: d_k.dtype(),
        };
        let tensors = [
            sloped.then(|| self.window(problem.k)),
            Some(self.window(problem.v)),
            self.read_states(),
            causal.then(|| self.window(problem.q)),
            self.d_scores(),
            self.logs(),
            self.chunks(),
            Some(self.window(d_k)),
        ];
        let tensors = tensors.into_iter().flatten().collect();
        let groups = problem.tiles.groups(self.plan.chunk_len, problem.features);
        let counts = [groups, span.1, problem.shape.batch * problem.shape.kv_heads];
        let params = self.written(gradients, d_k, true, span);
        self.push(KernelVariant::LinearDKeys(variant), params, tensors, counts);
    }

    fn d_values(&mut self, gradients: &LinearGradientViews<'a>, d_v: TensorView<'a>, span: (usize, usize)) {
        let problem = self.problem;
        let causal = problem.causal;
        let mut tensors = vec![&problem.k, &d_v];
        tensors.extend(causal.then_some(&gradients.d_out));
        let variant = linear_d_values::LinearDValues {
            form: problem.form(&tensors),
            phi: problem.phi,
            k: problem.k.dtype(),
            d_out: gradients.d_out.dtype(),
            gradient: d_v.dtype(),
        };
        let tensors = [
            Some(self.window(problem.k)),
            self.read_states(),
            causal.then(|| self.window(gradients.d_out)),
            self.stats().filter(|_| causal),
            self.scores(),
            self.logs(),
            self.chunks(),
            Some(self.window(d_v)),
        ];
        let tensors = tensors.into_iter().flatten().collect();
        let groups = problem.tiles.groups(self.plan.chunk_len, problem.shape.value_dim);
        let counts = [groups, span.1, problem.shape.batch * problem.shape.kv_heads];
        let params = self.written(gradients, d_v, false, span);
        self.push(KernelVariant::LinearDValues(variant), params, tensors, counts);
    }
}

impl<'a> Recorder<'a, '_> {
    /// Token by token.
    fn recurrent(&mut self) {
        let problem = self.problem;
        let Shape { batch, heads, kv_heads, q_len, value_dim, .. } = problem.shape;
        let view = |t: TensorView| View::from(t.window(self.device).layout);
        let [first, _] = problem.own_state();
        let features = problem.features;
        let own = self.memory.carry.map(|buffer| {
            let state = in_scratch(buffer, DType::F32, [batch, kv_heads, features, value_dim], 0);
            [state, in_scratch(buffer, DType::F32, [batch, kv_heads, features, 1], first)]
        });
        let of_caller = problem.state.map(|state| [state.state, state.norm]);
        let Some([state, norm]) = of_caller.or(own) else { return };
        // One for all features of a head.
        let decay = problem.decay.map(|mut decay| {
            decay.layout = broadcast(decay.layout);
            decay
        });
        let params = linear_recurrent::Params {
            q: view(problem.q),
            k: view(problem.k),
            v: view(problem.v),
            decay: decay.map_or(View::default(), view),
            beta: problem.beta.map_or(View::default(), view),
            state: view(state),
            norm: view(norm),
            x: view(problem.out),
            heads: heads as u32,
            group: problem.shape.group() as u32,
            features: features as u32,
            value_dim: value_dim as u32,
            q_len: q_len as u32,
            has_state: problem.state.is_some_and(|state| state.given).into(),
            eps: problem.eps,
            scale: problem.scale,
        };
        let variant = linear_recurrent::LinearRecurrent {
            phi: problem.phi,
            rule: problem.rule,
            features: problem.q.dtype(),
            v: problem.v.dtype(),
            out: problem.out.dtype(),
            decay: decay.map_or(DType::F32, |decay| decay.dtype()),
            beta: problem.beta.map_or(DType::F32, |beta| beta.dtype()),
            normalised: problem.normalised,
        };
        let tensors = [
            Some(problem.q),
            Some(problem.k),
            Some(problem.v),
            decay,
            problem.beta,
            Some(state),
            problem.normalised.then_some(norm),
            Some(problem.out),
        ];
        let tensors = tensors.into_iter().flatten().map(|t| self.window(t)).collect();
        self.all.push(Dispatch {
            variant: KernelVariant::LinearRecurrent(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors,
            grid: grid([1, kv_heads, batch]),
        });
    }
}

/// Rows that random features are made of, and their features.
struct FeatureRows<'a> {
    rows: TensorView<'a>,
    features: TensorView<'a>,
    of_keys: bool,
}

impl<'a> Recorder<'a, '_> {
    /// Parameters for rows that random features are made of.
    fn row_params(&self, random: &Random<'a>, rows: &FeatureRows<'a>) -> Params {
        let view = |t: TensorView| View::from(t.window(self.device).layout);
        let [_, heads, len, head_dim] = rows.rows.shape();
        let directions = self.direction_view(random);
        // Their own normalisation, where the norm's eps is otherwise.
        let root = |n: usize| 1.0 / (n as f64).sqrt();
        let eps = match random.kind {
            RandomFeatures::Relu { epsilon } => epsilon,
            RandomFeatures::Hyperbolic => root(2 * directions.shape()[2]),
            _ => root(directions.shape()[2]),
        };
        Params {
            q: view(rows.rows),
            k: view(directions),
            v: view(rows.features),
            x: view(rows.features),
            heads: heads as u32,
            group: (heads / self.problem.shape.kv_heads) as u32,
            q_len: len as u32,
            chunk_len: ROWS_EACH as u32,
            eps: eps as f32,
            scale: (head_dim as f64).powf(-0.25) as f32,
            ..self.params
        }
    }

    /// The directions, with those of one head repeated.
    fn direction_view(&self, random: &Random<'a>) -> TensorView<'a> {
        let mut directions = random.directions;
        if directions.layout.shape[1] == 1 {
            directions.layout.strides[1] = 0;
        }
        directions
    }

    fn rows_form(&self, tensors: &[TensorView]) -> RowsForm {
        RowsForm { tiles: self.problem.tiles, fours: tensors.iter().all(|t| t.layout.in_fours(3)) }
    }

    fn row_counts(&self, rows: &FeatureRows, columns: usize) -> [usize; 3] {
        let [batch, heads, len, _] = rows.rows.shape();
        [self.problem.tiles.groups(ROWS_EACH.min(len), columns), len.div_ceil(ROWS_EACH), batch * heads]
    }

    /// Random features of rows.
    fn make_features(&mut self, random: &Random<'a>, rows: &FeatureRows<'a>) {
        let params = self.row_params(random, rows);
        let directions = self.direction_view(random);
        let count = directions.shape()[2];
        let mut products = rows.features;
        products.layout.shape[3] = count;
        let variant = linear_features::LinearFeatures {
            form: self.rows_form(&[rows.rows, directions, products]),
            rows: rows.rows.dtype(),
        };
        let tensors = [rows.rows, directions, rows.features].map(|t| self.window(t)).into();
        let counts = self.row_counts(rows, count);
        self.push(KernelVariant::LinearFeatures(variant), params, tensors, counts);
        let logs = self.logs().filter(|_| rows.of_keys && random.kind.is_scaled());
        let variant = linear_map::LinearMap {
            kind: Randoms::of(random.kind),
            rows: rows.rows.dtype(),
            logs: logs.is_some(),
        };
        let tensors = [Some(self.window(rows.rows)), Some(self.window(rows.features)), logs];
        let tensors = tensors.into_iter().flatten().collect();
        let [batch, heads, len, _] = rows.rows.shape();
        let counts = [len.div_ceil(linear_map::WORKGROUP), heads, batch];
        self.push(KernelVariant::LinearMap(variant), params, tensors, counts);
    }

    /// The gradient of rows from that of their random features.
    fn d_rows(
        &mut self,
        random: &Random<'a>,
        rows: &FeatureRows<'a>,
        d_features: TensorView<'a>,
        d_rows: TensorView<'a>,
        accumulates: bool,
    ) {
        let view = |t: TensorView| View::from(t.window(self.device).layout);
        let params = Params { x: view(d_features), ..self.row_params(random, rows) };
        let directions = self.direction_view(random);
        let kind = Randoms::of(random.kind);
        let variant = linear_map_backward::LinearMapBackward { kind, rows: rows.rows.dtype() };
        let mut whole = d_features;
        whole.layout.shape[3] += 4;
        let tensors = [
            Some(self.window(rows.rows)),
            Some(self.window(rows.features)),
            (kind == Randoms::Fourier).then(|| self.window(directions)),
            Some(self.window(whole)),
        ];
        let tensors = tensors.into_iter().flatten().collect();
        let [batch, heads, len, head_dim] = rows.rows.shape();
        let counts = [len.div_ceil(linear_map_backward::WORKGROUP), heads, batch];
        self.push(KernelVariant::LinearMapBackward(variant), params, tensors, counts);
        let params =
            Params { v: view(d_features), x: view(d_rows), accumulates: accumulates.into(), ..params };
        let variant = linear_d_rows::LinearDRows {
            form: self.rows_form(&[rows.rows, directions, d_rows]),
            rows: rows.rows.dtype(),
            gradient: d_rows.dtype(),
        };
        let tensors = [rows.rows, directions, whole, d_rows].map(|t| self.window(t)).into();
        let counts = self.row_counts(rows, head_dim);
        self.push(KernelVariant::LinearDRows(variant), params, tensors, counts);
    }
}

/// The problem with random features in memory in place of queries and keys, which are told too.
fn with_features<'a>(
    problem: &LinearProblem<'a>,
    scratch: &'a Scratch,
) -> Result<(LinearProblem<'a>, Option<[FeatureRows<'a>; 2]>), Error> {
    if problem.random.is_none() {
        return Ok((*problem, None));
    }
    let [q, k] = problem.feature_views(scratch.buffer(Slot::Features)?, 0);
    let rows = [
        FeatureRows { rows: problem.q, features: q, of_keys: false },
        FeatureRows { rows: problem.k, features: k, of_keys: true },
    ];
    Ok((LinearProblem { q, k, ..*problem }, Some(rows)))
}

/// The dispatches of a forward call.
pub(crate) fn dispatches<'a>(
    problem: &LinearProblem<'a>,
    scratch: &'a Scratch,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    scratch.check(problem.scratch_size())?;
    let (problem, rows) = with_features(problem, scratch)?;
    let problem = &problem;
    let mut recorder = Recorder::new(problem, problem.scratch_size(), scratch, device)?;
    if let (Some(random), Some(rows)) = (problem.random, &rows) {
        rows.iter().for_each(|rows| recorder.make_features(&random, rows));
    }
    if problem.is_recurrent() {
        recorder.recurrent();
        return Ok(recorder.all);
    }
    recorder.prepare();
    let given = problem.state.is_some_and(|state| state.given);
    recorder.carry_over(if given { Way::Fetch } else { Way::Zero });
    for span in recorder.plan.spans(recorder.plan.slots) {
        recorder.key_states(span);
        if problem.causal {
            recorder.products(span);
            recorder.results(span);
        }
    }
    if !problem.causal {
        recorder.results((0, recorder.plan.query_slots));
    }
    if problem.state.is_some() {
        recorder.carry_over(Way::Keep);
    }
    Ok(recorder.all)
}

/// The dispatches of a backward call.
pub(crate) fn backward_dispatches<'a>(
    problem: &LinearProblem<'a>,
    gradients: &LinearGradientViews<'a>,
    scratch: &'a Scratch,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    scratch.check(problem.backward_scratch_size())?;
    let (problem, rows) = with_features(problem, scratch)?;
    let problem = &problem;
    let mut recorder = Recorder::new(problem, problem.backward_scratch_size(), scratch, device)?;
    recorder.params.d_out = View::from(gradients.d_out.window(device).layout);
    let wanted = gradients;
    let mut inner = *gradients;
    if let (Some(random), Some(rows)) = (problem.random, &rows) {
        rows.iter().for_each(|rows| recorder.make_features(&random, rows));
        let [d_q, d_k] = problem.feature_views(scratch.buffer(Slot::FeatureGradients)?, 4);
        // Those of features are written, whatever is added to.
        inner.d_q = wanted.d_q.map(|_| d_q);
        inner.d_k = wanted.d_k.map(|_| d_k);
    }
    let gradients = &inner;
    recorder.prepare();
    recorder.carry_over(Way::Zero);
    let plan = recorder.plan;
    let spans = plan.spans(plan.slots);
    for span in &spans {
        recorder.key_states(*span);
        if problem.causal {
            recorder.products(*span);
            recorder.row_stats(gradients, *span);
            recorder.gradient_products(gradients, *span);
            if let Some(d_q) = gradients.d_q {
                recorder.d_queries(gradients, d_q, *span);
            }
        }
    }
    if !problem.causal {
        let all = (0, plan.query_slots);
        recorder.row_stats(gradients, all);
        if let Some(d_q) = gradients.d_q {
            recorder.d_queries(gradients, d_q, all);
        }
    }
    if gradients.d_k.is_some() || gradients.d_v.is_some() {
        recorder.key_side(gradients, &spans);
    }
    if let (Some(random), Some([queries, keys])) = (problem.random, &rows) {
        let pairs = [(queries, inner.d_q, wanted.d_q), (keys, inner.d_k, wanted.d_k)];
        for (rows, d_features, d_rows) in pairs {
            if let (Some(d_features), Some(d_rows)) = (d_features, d_rows) {
                recorder.d_rows(&random, rows, d_features, d_rows, wanted.accumulates);
            }
        }
    }
    Ok(recorder.all)
}

impl<'a> Recorder<'a, '_> {
    /// The gradients of keys and values, from the last span to the first.
    fn key_side(&mut self, gradients: &LinearGradientViews<'a>, spans: &[(usize, usize)]) {
        let (problem, plan) = (self.problem, self.plan);
        let recorder = self;
        recorder.carry_over(Way::Zero);
        let query_spans = if problem.causal { spans.to_vec() } else { plan.spans(plan.query_slots) };
        for span in query_spans.into_iter().rev() {
            if problem.causal && spans.len() > 1 {
                recorder.products(span);
                recorder.gradient_products(gradients, span);
            }
            recorder.query_states(gradients, span);
            if problem.causal {
                recorder.key_gradients(gradients, span);
            }
        }
        if !problem.causal {
            recorder.key_gradients(gradients, (0, plan.slots));
        }
    }

    fn key_gradients(&mut self, gradients: &LinearGradientViews<'a>, span: (usize, usize)) {
        if let Some(d_k) = gradients.d_k {
            self.d_keys(gradients, d_k, span);
        }
        if let Some(d_v) = gradients.d_v {
            self.d_values(gradients, d_v, span);
        }
    }
}
