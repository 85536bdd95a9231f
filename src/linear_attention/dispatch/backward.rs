//! Gradients of queries from the first chunk to the last, and of keys and values in reverse.

use super::builder::Builder;
use super::{LinearGradientViews, LinearProblem};
use crate::linear_attention::kernels::linear::{LinearNumbers, Phi};
use crate::linear_attention::kernels::linear_carry::Way;
use crate::linear_attention::kernels::linear_d_keys::LinearDKeysCall;
use crate::linear_attention::kernels::linear_d_queries::LinearDQueriesCall;
use crate::linear_attention::kernels::linear_d_values::LinearDValuesCall;
use crate::linear_attention::kernels::linear_prefix::LinearPrefixCall;
use crate::linear_attention::kernels::linear_scores::LinearScoresCall;
use crate::linear_attention::kernels::linear_state::LinearStateCall;
use crate::linear_attention::kernels::linear_stats::LinearStatsCall;
use crate::linear_attention::plan::LinearPlan;
use crate::tensor::TensorView;

impl<'a> Builder<'a, '_> {
    pub fn row_stats(&mut self, gradients: &LinearGradientViews<'a>, span: (usize, usize)) {
        let problem = self.problem;
        let read = |t: Option<TensorView<'a>>| t.filter(|_| problem.normalised);
        let call = LinearStatsCall {
            q: read(Some(problem.q)),
            d_out: read(Some(gradients.d_out)),
            out: read(Some(problem.out)),
            states: read(self.read_states()),
            scores: read(self.scores()),
            logs: self.logs().filter(|_| problem.causal),
            chunks: self.query_chunks(),
            stats: self.stats(),
            numbers: self.span(span),
            form: self.query_form(),
            phi: problem.phi,
            width: LinearProblem::width(&[&problem.q, &gradients.d_out, &problem.out]),
        };
        let groups = self.plan.chunk_len.div_ceil(problem.tiles.workgroup as usize);
        let counts = [groups, span.1, problem.shape.batch * problem.shape.heads];
        self.all.push(call.dispatch(counts, self.device));
    }

    pub fn gradient_products(&mut self, gradients: &LinearGradientViews<'a>, span: (usize, usize)) {
        let problem = self.problem;
        self.push_scores(LinearScoresCall {
            q: None,
            k: None,
            d_out: Some(gradients.d_out),
            v: Some(problem.v),
            stats: self.stats(),
            logs: self.logs(),
            chunks: self.chunks(),
            scores: self.d_scores(),
            numbers: self.span(span),
            form: problem.form(),
            phi: Phi::Identity,
            width: LinearProblem::width(&[&gradients.d_out, &problem.v]),
        });
    }

    pub fn d_queries(
        &mut self,
        gradients: &LinearGradientViews<'a>,
        d_q: TensorView<'a>,
        span: (usize, usize),
    ) {
        let problem = self.problem;
        let causal = problem.causal;
        let sloped = problem.phi != Phi::Identity;
        let mut tensors = vec![&gradients.d_out, &d_q];
        tensors.extend(sloped.then_some(&problem.q));
        tensors.extend(causal.then_some(&problem.k));
        let call = LinearDQueriesCall {
            q: sloped.then_some(problem.q),
            d_out: gradients.d_out,
            states: self.read_states(),
            stats: self.stats(),
            k: causal.then_some(problem.k),
            scores: self.d_scores(),
            chunks: self.query_chunks(),
            written: d_q,
            numbers: self.written(gradients, true, span),
            form: self.query_form(),
            phi: problem.phi,
            width: LinearProblem::width(&tensors),
        };
        let groups = problem.tiles.groups(self.plan.chunk_len, problem.features);
        let counts = [groups, span.1, problem.shape.batch * problem.shape.heads];
        self.all.push(call.dispatch(counts, self.device));
    }

    fn written(
        &self,
        gradients: &LinearGradientViews,
        of_features: bool,
        span: (usize, usize),
    ) -> LinearNumbers {
        // The gradients of random features are in scratch.
        let in_scratch = self.problem.random.is_some() && of_features;
        LinearNumbers { accumulates: (gradients.accumulates && !in_scratch).into(), ..self.span(span) }
    }

    /// Records the gradients of the states of chunks, from the last chunk to the first.
    pub fn query_states(&mut self, gradients: &LinearGradientViews<'a>, span: (usize, usize)) {
        let problem = self.problem;
        self.push_states(LinearStateCall {
            k: None,
            v: None,
            q: Some(problem.q),
            d_out: Some(gradients.d_out),
            stats: self.stats(),
            logs: None,
            chunks: self.query_chunks(),
            states: self.states(),
            numbers: self.span(span),
            form: self.query_form(),
            phi: problem.phi,
            width: LinearProblem::width(&[&problem.q, &gradients.d_out]),
        });
        self.push_prefix(LinearPrefixCall {
            states: self.states(),
            carry: self.carry(),
            chunks: self.query_chunks(),
            numbers: self.span(span),
            form: self.query_form(),
            reverse: true,
        });
    }

    pub fn d_keys(&mut self, gradients: &LinearGradientViews<'a>, d_k: TensorView<'a>, span: (usize, usize)) {
        let problem = self.problem;
        let causal = problem.causal;
        let sloped = problem.phi != Phi::Identity;
        let mut tensors = vec![&problem.v, &d_k];
        tensors.extend(sloped.then_some(&problem.k));
        tensors.extend(causal.then_some(&problem.q));
        let call = LinearDKeysCall {
            k: sloped.then_some(problem.k),
            v: problem.v,
            states: self.read_states(),
            q: causal.then_some(problem.q),
            scores: self.d_scores(),
            logs: self.logs(),
            chunks: self.chunks(),
            written: d_k,
            numbers: self.written(gradients, true, span),
            form: problem.form(),
            phi: problem.phi,
            width: LinearProblem::width(&tensors),
        };
        let groups = problem.tiles.groups(self.plan.chunk_len, problem.features);
        let counts = [groups, span.1, problem.shape.batch * problem.shape.kv_heads];
        self.all.push(call.dispatch(counts, self.device));
    }

    pub fn d_values(
        &mut self,
        gradients: &LinearGradientViews<'a>,
        d_v: TensorView<'a>,
        span: (usize, usize),
    ) {
        let problem = self.problem;
        let causal = problem.causal;
        let mut tensors = vec![&problem.k, &d_v];
        tensors.extend(causal.then_some(&gradients.d_out));
        let call = LinearDValuesCall {
            k: problem.k,
            states: self.read_states(),
            d_out: causal.then_some(gradients.d_out),
            stats: self.stats().filter(|_| causal),
            scores: self.scores(),
            logs: self.logs(),
            chunks: self.chunks(),
            written: d_v,
            numbers: self.written(gradients, false, span),
            form: problem.form(),
            phi: problem.phi,
            width: LinearProblem::width(&tensors),
        };
        let groups = problem.tiles.groups(self.plan.chunk_len, problem.shape.value_dim);
        let counts = [groups, span.1, problem.shape.batch * problem.shape.kv_heads];
        self.all.push(call.dispatch(counts, self.device));
    }

    /// Records the gradients of keys and values, from the last span to the first.
    pub fn key_side(&mut self, gradients: &LinearGradientViews<'a>, spans: &[(usize, usize)]) {
        let (problem, plan) = (self.problem, self.plan);
        let builder = self;
        builder.carry_over(Way::Zero);
        let query_spans = if problem.causal { spans.to_vec() } else { plan.spans(plan.query_slots) };
        for span in query_spans.into_iter().rev() {
            if problem.causal && spans.len() > 1 {
                builder.products(span);
                builder.gradient_products(gradients, span);
            }
            builder.query_states(gradients, span);
            if problem.causal {
                builder.key_gradients(gradients, span);
            }
        }
        if !problem.causal {
            LinearPlan::wide_spans(plan.slots)
                .into_iter()
                .for_each(|span| builder.key_gradients(gradients, span));
        }
    }

    pub fn key_gradients(&mut self, gradients: &LinearGradientViews<'a>, span: (usize, usize)) {
        if let Some(d_k) = gradients.d_k {
            self.d_keys(gradients, d_k, span);
        }
        if let Some(d_v) = gradients.d_v {
            self.d_values(gradients, d_v, span);
        }
    }
}
