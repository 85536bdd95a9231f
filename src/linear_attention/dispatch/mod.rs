//! Linear attention: states of chunks, their running sums, results.

mod backward;
mod builder;
mod features;
mod forward;
mod problem;
mod recurrent;

use builder::Builder;
use features::with_features;
pub(crate) use problem::{LinearGradientViews, LinearProblem, LinearStateViews, Random};

use super::kernels::linear_carry::Way;
use super::plan::LinearPlan;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Scratch, Slot};
use crate::tensor::Error;

/// The exponent of the power of 2 that divides the values of normalised results before they are
/// summed. The division changes no bit of a sum. A sum then stays within f32's range if its weights
/// add up to at most this power. Values from 10⁻³² on are not lost.
const VALUE_EXPONENT: u32 = 20;

/// Returns the dispatches of a forward call.
pub(crate) fn dispatches<'a>(
    problem: &LinearProblem<'a>,
    scratch: &'a Scratch,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    scratch.check(problem.scratch_size())?;
    let mut all = Dispatches::new();
    for group in problem.groups(false) {
        all.extend(part_dispatches(&problem.part(group), scratch, device)?);
    }
    Ok(all)
}

/// Returns the dispatches of a forward call for one group of heads.
fn part_dispatches<'a>(
    problem: &LinearProblem<'a>,
    scratch: &'a Scratch,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    let size = problem.part_scratch_size();
    let (problem, rows) = with_features(problem, scratch)?;
    let problem = &problem;
    let mut builder = Builder::new(problem, size, scratch, device)?;
    if let (Some(random), Some(rows)) = (problem.random, &rows) {
        rows.iter().for_each(|rows| builder.make_features(&random, rows));
    }
    if problem.is_recurrent() {
        builder.recurrent();
        return Ok(builder.all);
    }
    builder.prepare();
    let given = problem.state.is_some_and(|state| state.given);
    if problem.normalised {
        builder.numbers.value_exponent = VALUE_EXPONENT;
        builder.numbers.value_scale = (1 << VALUE_EXPONENT) as f32;
    }
    builder.carry_over(if given { Way::Fetch } else { Way::Zero });
    for span in builder.plan.spans(builder.plan.slots) {
        builder.key_states(span);
        if problem.causal {
            builder.products(span);
            builder.results(span);
        }
    }
    if !problem.causal {
        LinearPlan::wide_spans(builder.plan.query_slots).into_iter().for_each(|span| builder.results(span));
    }
    if problem.state.is_some() {
        builder.carry_over(Way::Keep);
    }
    Ok(builder.all)
}

/// Returns the dispatches of a backward call.
pub(crate) fn backward_dispatches<'a>(
    problem: &LinearProblem<'a>,
    gradients: &LinearGradientViews<'a>,
    scratch: &'a Scratch,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    scratch.check(problem.backward_scratch_size())?;
    let mut all = Dispatches::new();
    for group in problem.groups(true) {
        let gradients = gradients.part(problem.shape, group);
        all.extend(part_backward_dispatches(&problem.part(group), &gradients, scratch, device)?);
    }
    Ok(all)
}

/// Returns the dispatches of a backward call for one group of heads.
fn part_backward_dispatches<'a>(
    problem: &LinearProblem<'a>,
    gradients: &LinearGradientViews<'a>,
    scratch: &'a Scratch,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    let size = problem.part_backward_scratch_size();
    let (problem, rows) = with_features(problem, scratch)?;
    let problem = &problem;
    let mut builder = Builder::new(problem, size, scratch, device)?;
    let wanted = gradients;
    let mut inner = *gradients;
    if let (Some(random), Some(rows)) = (problem.random, &rows) {
        rows.iter().for_each(|rows| builder.make_features(&random, rows));
        let [d_q, d_k] = problem.feature_views(scratch.buffer(Slot::FeatureGradients)?, 4);
        // The gradients of features are overwritten, even if the call accumulates.
        inner.d_q = wanted.d_q.map(|_| d_q);
        inner.d_k = wanted.d_k.map(|_| d_k);
    }
    let gradients = &inner;
    builder.prepare();
    builder.carry_over(Way::Zero);
    let plan = builder.plan;
    let spans = plan.spans(plan.slots);
    for span in &spans {
        builder.key_states(*span);
        if problem.causal {
            builder.products(*span);
            builder.row_stats(gradients, *span);
            builder.gradient_products(gradients, *span);
            if let Some(d_q) = gradients.d_q {
                builder.d_queries(gradients, d_q, *span);
            }
        }
    }
    if !problem.causal {
        for span in LinearPlan::wide_spans(plan.query_slots) {
            builder.row_stats(gradients, span);
            if let Some(d_q) = gradients.d_q {
                builder.d_queries(gradients, d_q, span);
            }
        }
    }
    if gradients.d_k.is_some() || gradients.d_v.is_some() {
        builder.key_side(gradients, &spans);
    }
    if let (Some(random), Some([queries, keys])) = (problem.random, &rows) {
        let pairs = [(queries, inner.d_q, wanted.d_q), (keys, inner.d_k, wanted.d_k)];
        for (rows, d_features, d_rows) in pairs {
            if let (Some(d_features), Some(d_rows)) = (d_features, d_rows) {
                builder.d_rows(&random, rows, d_features, d_rows, wanted.accumulates);
            }
        }
    }
    Ok(builder.all)
}
