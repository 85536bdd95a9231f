//! Gradients of bias, ALiBi slopes, relative table, sinks and captured tensors: partial sums, then
//! a reduction.

use super::BackwardProblem;
use super::backward_problem::in_fours;
use crate::attention::kernels::captured_gradients::CapturedGradientsCall;
use crate::attention::kernels::score_gradients::ScoreGradientsCall;
use crate::attention::plan::{Added, CapturedGradientsPlan, ScoreGradientsPlan};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, Placed, Width, in_scratch, runs};
use crate::mask::kernels::MaskVariant;
use crate::mask::kernels::dropout::Dropped;
use crate::matmul::projection::kernels::part_sums::{PartSumsCall, WORKGROUP};
use crate::tensor::{DType, TensorView, Window, count};

/// The statistics of queries.
#[derive(Clone, Copy)]
pub(super) struct QueryStats<'a> {
    pub window: Window<'a>,
    /// True if the CPU variant has summed the weights. The other kernels then add in the same
    /// order.
    pub chains: bool,
}

/// The destination of a kernel's sums or partial sums.
#[derive(Clone, Copy)]
struct Sums<'a> {
    placed: Placed<'a>,
    /// True if the sums are added to the tensor's previous values.
    accumulates: bool,
}

/// Returns the dispatches of `plan`, which write `gradient`. `parts` is the memory for partial
/// sums.
pub(super) fn of_rule<'a>(
    problem: &BackwardProblem<'a>,
    plan: &ScoreGradientsPlan,
    gradient: TensorView<'a>,
    stats: QueryStats<'a>,
    parts: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let parts = parts.filter(|_| plan.parts > 1).map(|parts| (parts, plan.parts));
    in_parts(problem, gradient, parts, device, |sums| rule_sums(problem, plan, sums, stats, device))
}

/// Returns the dispatches of `plan` for a tensor that a score function captures.
pub(super) fn of_captured<'a>(
    problem: &BackwardProblem<'a>,
    plan: &CapturedGradientsPlan,
    gradient: TensorView<'a>,
    stats: QueryStats<'a>,
    parts: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let parts = parts.filter(|_| plan.parts > 1).map(|parts| (parts, plan.parts));
    in_parts(problem, gradient, parts, device, |sums| captured_sums(problem, plan, sums, stats, device))
}

/// Returns the dispatches of `write` for the gradient. With `parts`, they write that many partial
/// sums to scratch, and further dispatches add these up.
fn in_parts<'a>(
    problem: &BackwardProblem<'a>,
    gradient: TensorView<'a>,
    parts: Option<(&'a wgpu::Buffer, usize)>,
    device: &DeviceFacts,
    write: impl FnOnce(Sums<'a>) -> Dispatches<'a>,
) -> Dispatches<'a> {
    let accumulates = problem.adds_to_added;
    let Some((parts, count_of_parts)) = parts else {
        return write(Sums { placed: Placed::of(gradient, device), accumulates });
    };
    let elements = count(gradient.shape());
    let whole = in_scratch(parts, DType::F32, [1, 1, elements, count_of_parts], 0);
    let mut layout = in_scratch(parts, DType::F32, gradient.shape(), 0).layout;
    layout.strides = layout.strides.map(|stride| stride * count_of_parts);
    let window = Window { layout, ..whole.window(device) };
    let first_parts = Placed { window, dtype: DType::F32 };
    let mut dispatches = write(Sums { placed: first_parts, accumulates: false });
    dispatches.extend(part_sums(whole, gradient, accumulates, device));
    dispatches
}

/// Returns the dispatches that add `parts`, `[1, 1, elements, parts of an element]`, to the
/// elements of `sums`.
pub(crate) fn part_sums<'a>(
    parts: TensorView<'a>,
    sums: TensorView<'a>,
    accumulates: bool,
    device: &DeviceFacts,
) -> impl Iterator<Item = Dispatch<'a>> {
    let [_, _, elements, count] = parts.shape();
    let call = PartSumsCall {
        parts,
        sums,
        shape: sums.shape().map(|n| n as u32),
        elements: elements as u32,
        count: count as u32,
        first: 0,
        accumulates,
    };
    runs(elements.div_ceil(WORKGROUP), device)
        .map(move |(first, grid)| PartSumsCall { first, ..call }.dispatch(grid, device))
}

/// Returns the dispatches of `score_gradients.wgsl`, for pairs or for sinks.
fn rule_sums<'a>(
    problem: &BackwardProblem<'a>,
    plan: &ScoreGradientsPlan,
    sums: Sums<'a>,
    stats: QueryStats<'a>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let BackwardProblem { shape, q, k, v, d_out, .. } = *problem;
    let of = plan.of;
    let pairs = of != Added::Sinks;
    let mask = if pairs {
        problem.mask_variant().scores_only()
    } else {
        MaskVariant::with_sink_logits(problem.mask.floats(of.id()).map(|t| t.dtype))
    };
    let [q, k, v, d_out] = [q, k, v, d_out].map(|t| pairs.then_some(t));
    let call = ScoreGradientsCall {
        q,
        k,
        v,
        d_out,
        row_stats: stats.window,
        gradient: sums.placed,
        mask: problem.masked(mask, device),
        drop: Dropped::new(problem.dropout.as_ref().filter(|_| pairs), device),
        shape: sums.placed.window.layout.shape.map(|n| n as u32),
        first: [0; 4],
        batch: shape.batch as u32,
        heads: shape.heads as u32,
        group: shape.group() as u32,
        head_dim: shape.head_dim as u32,
        value_dim: shape.value_dim as u32,
        accumulates: u32::from(sums.accumulates),
        scale: problem.scale,
        key_lanes: plan.key_lanes,
        parts: plan.parts as u32,
        part_rows: u32::try_from(plan.part_rows).unwrap_or(u32::MAX),
        of,
        shared: plan.shared,
        width: Width::of([q, k, v, d_out].into_iter().flatten().all(in_fours)),
        chains: stats.chains && pairs,
    };
    let dispatches = plan.pieces().map(move |piece| {
        let first = [piece.first[0], piece.first[1], piece.first[2], 0];
        ScoreGradientsCall { first, ..call.clone() }.dispatch(piece.grid, device)
    });
    dispatches.collect()
}

/// Returns the dispatches of `captured_gradients.wgsl`.
fn captured_sums<'a>(
    problem: &BackwardProblem<'a>,
    plan: &CapturedGradientsPlan,
    sums: Sums<'a>,
    stats: QueryStats<'a>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let BackwardProblem { shape, q, k, v, d_out, .. } = *problem;
    let gradient = sums.placed.window.layout.shape;
    let call = CapturedGradientsCall {
        q,
        k,
        v,
        d_out,
        row_stats: stats.window,
        gradient: sums.placed,
        mask: problem.masked(problem.mask_variant().scores_only(), device),
        drop: Dropped::new(problem.dropout.as_ref(), device),
        shape: gradient.map(|n| n as u32),
        heads: shape.heads as u32,
        group: shape.group() as u32,
        head_dim: shape.head_dim as u32,
        value_dim: shape.value_dim as u32,
        accumulates: u32::from(sums.accumulates),
        scale: problem.scale,
        first: 0,
        elements: count(gradient) as u32,
        rows: count(shape.lse()) as u32,
        parts: plan.parts as u32,
        part_rows: plan.part_rows as u32,
        captured: plan.captured,
        width: Width::of([q, k, v, d_out].into_iter().all(in_fours)),
        chains: stats.chains,
    };
    let dispatches = plan.pieces().map(move |piece| {
        let call = CapturedGradientsCall { first: piece.first[0], ..call.clone() };
        call.dispatch(piece.grid, device)
    });
    dispatches.collect()
}
