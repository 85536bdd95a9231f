//! States of chunks, their running sums, products within chunks, results.

use super::recorder::Recorder;
use crate::kernel::View;
use crate::kernels::KernelVariant;
use crate::kernels::linear::{LinearForm, Params};
use crate::kernels::linear_carry::Way;
use crate::kernels::{
    linear_carry, linear_chunks, linear_logs, linear_out, linear_prefix, linear_scores, linear_state,
};
use crate::problem::Shape;
use crate::tensor::{TensorView, Window, broadcast};

impl<'a> Recorder<'a, '_> {
    /// The table of chunks and the weights of keys, where the call has any.
    pub fn prepare(&mut self) {
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
        let view = |t: Option<TensorView>| View::optional(t, self.device);
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
    pub fn carry_over(&mut self, way: Way) {
        let state = self.problem.state;
        let mut params = self.params;
        let mut tensors = Vec::new();
        if let (Some(state), false) = (state, way == Way::Zero) {
            params.x = View::of(state.state, self.device);
            params.v = View::of(state.norm, self.device);
            tensors.extend([self.window(state.state), self.window(state.norm)]);
        }
        tensors.extend(self.carry());
        let size = self.problem.features * self.plan.state_stride;
        let groups = size.div_ceil(4 * linear_carry::WORKGROUP);
        let variant = KernelVariant::LinearCarry(linear_carry::LinearCarry { way });
        let most = self.device.max_workgroups.max(1) as usize;
        for first in (0..self.plan.sequences).step_by(most) {
            let counts = [groups, self.problem.shape.kv_heads, most.min(self.plan.sequences - first)];
            let params = Params { first_slot: first as u32, ..params };
            self.push(variant, params, tensors.clone(), counts);
        }
    }

    pub fn span(&self, (first, count): (usize, usize)) -> Params {
        Params { first_slot: first as u32, slots: count as u32, ..self.params }
    }

    /// What chunks of keys add to the state, and the running sums.
    pub fn key_states(&mut self, span: (usize, usize)) {
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

    pub fn push_states(&mut self, variant: KernelVariant, tensors: Vec<Window<'a>>, span: (usize, usize)) {
        let problem = self.problem;
        let groups = problem.tiles.groups(problem.features, self.plan.state_stride);
        let counts = [groups, span.1, problem.shape.batch * problem.shape.kv_heads];
        self.push(variant, self.span(span), tensors, counts);
    }

    pub fn prefix(&mut self, span: (usize, usize), of_queries: bool) {
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
    pub fn products(&mut self, span: (usize, usize)) {
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

    pub fn push_scores(
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
    pub fn query_form(&self, tensors: &[&TensorView]) -> LinearForm {
        let form = self.problem.form(tensors);
        LinearForm { scaled: form.scaled && form.causal, ..form }
    }

    pub fn query_chunks(&self) -> Option<Window<'a>> {
        self.chunks().filter(|_| self.problem.causal || self.problem.starts.is_some())
    }

    pub fn results(&mut self, span: (usize, usize)) {
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
}
