//! The gradients of what scores are changed by, each dispatches of its own, and those that add its parts.

use super::backward_problem::{BackwardProblem, in_fours};
use super::dispatches::{Dispatches, in_scratch, runs};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, View, Width};
use crate::kernels::captured_gradients::{self, CapturedGradients};
use crate::kernels::dropout::{DropoutKind, Dropped};
use crate::kernels::part_sums::{PartSumsCall, WORKGROUP};
use crate::kernels::score_gradients::{Params, ScoreGradients};
use crate::kernels::{KernelVariant, mask};
use crate::plan::{Added, CapturedGradientsPlan, ScoreGradientsPlan};
use crate::tensor::{DType, TensorView, Window, count};

/// The numbers that are kept of queries.
#[derive(Clone, Copy)]
pub(super) struct QueryStats<'a> {
    pub window: Window<'a>,
    /// True if the software form has summed the weights, whose order of additions the other kernels follow.
    pub chains: bool,
}

/// Where a kernel writes sums, or their parts.
#[derive(Clone, Copy)]
struct Sums<'a> {
    window: Window<'a>,
    dtype: DType,
    /// Whether they are added to what is there.
    accumulates: bool,
}

/// The dispatches of `plan`, which write `gradient`; with `parts` for those of its elements.
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

/// The same, of a tensor that a score function captures.
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

/// The dispatches that `write` gives for the gradient, or for its parts in scratch, as many as it says, and those that add them.
fn in_parts<'a>(
    problem: &BackwardProblem<'a>,
    gradient: TensorView<'a>,
    parts: Option<(&'a wgpu::Buffer, usize)>,
    device: &DeviceFacts,
    write: impl FnOnce(Sums<'a>) -> Dispatches<'a>,
) -> Dispatches<'a> {
    let accumulates = problem.adds_to_added;
    let Some((parts, count_of_parts)) = parts else {
        return write(Sums { window: gradient.window(device), dtype: gradient.dtype, accumulates });
    };
    let elements = count(gradient.shape());
    let whole = in_scratch(parts, DType::F32, [1, 1, elements, count_of_parts], 0);
    let mut layout = in_scratch(parts, DType::F32, gradient.shape(), 0).layout;
    layout.strides = layout.strides.map(|stride| stride * count_of_parts);
    let first_parts = Window { layout, ..whole.window(device) };
    let mut dispatches = write(Sums { window: first_parts, dtype: DType::F32, accumulates: false });
    dispatches.extend(part_sums(whole, gradient, accumulates, device));
    dispatches
}

/// The dispatches that add `parts`, `[1, 1, elements, parts of an element]`, to the elements of `sums`.
pub(super) fn part_sums<'a>(
    parts: TensorView<'a>,
    sums: TensorView<'a>,
    accumulates: bool,
    device: &DeviceFacts,
) -> impl Iterator<Item = Dispatch<'a, KernelVariant>> {
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
        .map(move |(first, grid)| PartSumsCall { first, ..call }.dispatch(grid.map(|n| n as usize), device))
}

/// The dispatches of the kernel of pairs or of sinks.
fn rule_sums<'a>(
    problem: &BackwardProblem<'a>,
    plan: &ScoreGradientsPlan,
    sums: Sums<'a>,
    stats: QueryStats<'a>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let gradient = sums.window;
    let BackwardProblem { shape, q, k, v, d_out, .. } = *problem;
    let of = plan.of;
    // Sinks need no pairs.
    let inputs = if of == Added::Sinks { Vec::new() } else { vec![q, k, v, d_out] };
    let dropout = problem.dropout.as_ref().filter(|_| of != Added::Sinks);
    let variant = ScoreGradients {
        of,
        shared: plan.shared,
        gradient: sums.dtype,
        dtype: inputs.first().map_or(DType::F32, |t| t.dtype),
        width: Width::of(inputs.iter().copied().all(in_fours)),
        chains: stats.chains && of != Added::Sinks,
        drop: DropoutKind::of(dropout),
        mask: match of {
            Added::Sinks => {
                mask::MaskVariant::with_sink_logits(problem.mask.floats(of.id()).map(|t| t.dtype))
            }
            _ => mask::MaskVariant::of(&problem.mask, problem.softcap.is_some(), problem.appended > 0)
                .scores_only(),
        },
    };
    let drop = Dropped::new(dropout, device);
    let mut tensors: Vec<_> = inputs.iter().map(|t| t.window(device)).collect();
    tensors.extend([stats.window, gradient]);
    tensors.extend(variant.mask.windows(&problem.mask, device));
    tensors.extend(drop.keep);
    let [q, k, v, d_out] = match inputs[..] {
        [q, k, v, d_out] => [q, k, v, d_out].map(|t| View::of(t, device)),
        _ => [View::default(); 4],
    };
    let params = Params {
        q,
        k,
        v,
        d_out,
        gradient: View::from(gradient.layout),
        dropout: drop.params.dropout,
        mask: mask::MaskParams::new(&problem.mask, &shape, problem.appended, problem.softcap, device),
        shape: gradient.layout.shape.map(|n| n as u32),
        first: [0; 4],
        seed: drop.params.seed,
        batch: shape.batch as u32,
        heads: shape.heads as u32,
        group: shape.group() as u32,
        head_dim: shape.head_dim as u32,
        value_dim: shape.value_dim as u32,
        accumulates: u32::from(sums.accumulates),
        dropout_threshold: drop.params.dropout_threshold,
        dropout_scale: drop.params.dropout_scale,
        scale: problem.scale,
        key_lanes: plan.key_lanes,
        parts: plan.parts as u32,
        part_rows: u32::try_from(plan.part_rows).unwrap_or(u32::MAX),
        pad: [0; 2],
    };
    let dispatches = plan.pieces().map(move |piece| {
        let first = [piece.first[0], piece.first[1], piece.first[2], 0];
        Dispatch {
            variant: KernelVariant::ScoreGradients(variant),
            params: variant.mask.with_mods(&Params { first, ..params }, &problem.mask, device),
            tensors: tensors.clone(),
            grid: piece.grid,
        }
    });
    dispatches.collect()
}

/// The dispatches of the kernel of readings.
fn captured_sums<'a>(
    problem: &BackwardProblem<'a>,
    plan: &CapturedGradientsPlan,
    sums: Sums<'a>,
    stats: QueryStats<'a>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let BackwardProblem { shape, q, k, v, d_out, .. } = *problem;
    let inputs = [q, k, v, d_out];
    let variant = CapturedGradients {
        captured: plan.captured,
        gradient: sums.dtype,
        dtype: q.dtype,
        width: Width::of(inputs.into_iter().all(in_fours)),
        chains: stats.chains,
        drop: DropoutKind::of(problem.dropout.as_ref()),
        mask: mask::MaskVariant::of(&problem.mask, problem.softcap.is_some(), problem.appended > 0)
            .scores_only(),
    };
    let drop = Dropped::new(problem.dropout.as_ref(), device);
    let mut tensors: Vec<_> = inputs.map(|t| t.window(device)).into();
    tensors.extend([stats.window, sums.window]);
    tensors.extend(variant.mask.windows(&problem.mask, device));
    tensors.extend(drop.keep);
    let [q, k, v, d_out] = inputs.map(|t| View::of(t, device));
    let gradient = sums.window.layout;
    let params = captured_gradients::Params {
        q,
        k,
        v,
        d_out,
        gradient: View::from(gradient),
        dropout: drop.params.dropout,
        mask: mask::MaskParams::new(&problem.mask, &shape, problem.appended, problem.softcap, device),
        shape: gradient.shape.map(|n| n as u32),
        seed: drop.params.seed,
        heads: shape.heads as u32,
        group: shape.group() as u32,
        head_dim: shape.head_dim as u32,
        value_dim: shape.value_dim as u32,
        accumulates: u32::from(sums.accumulates),
        dropout_threshold: drop.params.dropout_threshold,
        dropout_scale: drop.params.dropout_scale,
        scale: problem.scale,
        first: 0,
        elements: count(gradient.shape) as u32,
        rows: count(shape.lse()) as u32,
        parts: plan.parts as u32,
        part_rows: plan.part_rows as u32,
        pad: 0,
    };
    let dispatches = plan.pieces().map(move |piece| {
        let params = captured_gradients::Params { first: piece.first[0], ..params };
        Dispatch {
            variant: KernelVariant::CapturedGradients(variant),
            params: variant.mask.with_mods(&params, &problem.mask, device),
            tensors: tensors.clone(),
            grid: piece.grid,
        }
    });
    dispatches.collect()
}
