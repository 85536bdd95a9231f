//! Gradients: of queries from the first chunk to the last, of keys and values from the last to the first.

use super::problem::LinearGradientViews;
use super::recorder::Recorder;
use crate::kernel::View;
use crate::kernels::KernelVariant;
use crate::kernels::linear::{Params, Phi};
use crate::kernels::linear_carry::Way;
use crate::kernels::{
    linear_d_keys, linear_d_queries, linear_d_values, linear_prefix, linear_scores, linear_state,
    linear_stats,
};
use crate::plan::LinearPlan;
use crate::tensor::TensorView;

impl<'a> Recorder<'a, '_> {
    pub fn row_stats(&mut self, gradients: &LinearGradientViews<'a>, span: (usize, usize)) {
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

    pub fn gradient_products(&mut self, gradients: &LinearGradientViews<'a>, span: (usize, usize)) {
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

    pub fn written(
        &self,
        gradients: &LinearGradientViews,
        x: TensorView,
        of_features: bool,
        span: (usize, usize),
    ) -> Params {
        Params {
            x: View::of(x, self.device),
            // Gradients of random features are in scratch.
            accumulates: (gradients.accumulates && !(self.problem.random.is_some() && of_features)).into(),
            ..self.span(span)
        }
    }

    /// The gradients of the states of chunks, from the last to the first.
    pub fn query_states(&mut self, gradients: &LinearGradientViews<'a>, span: (usize, usize)) {
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

    pub fn d_keys(&mut self, gradients: &LinearGradientViews<'a>, d_k: TensorView<'a>, span: (usize, usize)) {
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

    /// The gradients of keys and values, from the last span to the first.
    pub fn key_side(&mut self, gradients: &LinearGradientViews<'a>, spans: &[(usize, usize)]) {
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
            LinearPlan::wide_spans(plan.slots)
                .into_iter()
                .for_each(|span| recorder.key_gradients(gradients, span));
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
