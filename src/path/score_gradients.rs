//! The gradients of what scores are changed by, each a dispatch of its own, and one for its parts.

use super::backward_problem::{BackwardProblem, in_fours, view};
use super::dispatches::{Dispatches, in_scratch, runs};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, View, Width};
use crate::kernels::dropout::{DropoutKind, DropoutParams};
use crate::kernels::part_sums::{self, PartSums};
use crate::kernels::score_gradients::{Params, ScoreGradients};
use crate::kernels::{KernelVariant, mask};
use crate::plan::{Added, ScoreGradientsPlan};
use crate::tensor::{DType, TensorView, Window, count};

/// The dispatches of `plan`, which write `gradient`; with `parts` for those of its elements.
pub(super) fn dispatches<'a>(
    problem: &BackwardProblem<'a>,
    plan: &ScoreGradientsPlan,
    gradient: TensorView<'a>,
    stats: Window<'a>,
    parts: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let Some(parts) = parts.filter(|_| plan.parts > 1) else {
        let (window, adds) = (gradient.window(device), problem.adds_to_added);
        return sums(problem, plan, window, gradient.dtype, stats, adds, device).collect();
    };
    let elements = count(gradient.shape());
    let whole = in_scratch(parts, DType::F32, [1, 1, elements, plan.parts], 0).window(device);
    let mut layout = in_scratch(parts, DType::F32, gradient.shape(), 0).layout;
    layout.strides = layout.strides.map(|stride| stride * plan.parts);
    let first_parts = Window { layout, ..whole };
    let mut dispatches: Dispatches =
        sums(problem, plan, first_parts, DType::F32, stats, false, device).collect();
    let params = part_sums::Params {
        sums: view(gradient, device),
        shape: gradient.shape().map(|n| n as u32),
        elements: elements as u32,
        count: plan.parts as u32,
        first: 0,
        pad: 0,
    };
    let variant = PartSums { sums: gradient.dtype, accumulates: problem.adds_to_added };
    dispatches.extend(runs(elements.div_ceil(part_sums::WORKGROUP), device).map(|(first, grid)| Dispatch {
        variant: KernelVariant::PartSums(variant),
        params: bytemuck::bytes_of(&part_sums::Params { first, ..params }).to_vec(),
        tensors: vec![whole, gradient.window(device)],
        grid,
    }));
    dispatches
}

/// The dispatches of the kernel of pairs or of sinks.
fn sums<'a>(
    problem: &BackwardProblem<'a>,
    plan: &ScoreGradientsPlan,
    gradient: Window<'a>,
    dtype: DType,
    stats: Window<'a>,
    accumulates: bool,
    device: &DeviceFacts,
) -> impl Iterator<Item = Dispatch<'a, KernelVariant>> {
    let BackwardProblem { shape, q, k, v, d_out, .. } = *problem;
    let of = plan.of;
    // Sinks need no pairs.
    let inputs = if of == Added::Sinks { Vec::new() } else { vec![q, k, v, d_out] };
    let dropout = problem.dropout.as_ref().filter(|_| of != Added::Sinks);
    let variant = ScoreGradients {
        of,
        shared: plan.shared,
        gradient: dtype,
        dtype: inputs.first().map_or(DType::F32, |t| t.dtype),
        width: Width::of(inputs.iter().copied().all(in_fours)),
        drop: DropoutKind::of(dropout),
        mask: match of {
            Added::Sinks => {
                mask::MaskVariant::with_sink_logits(problem.mask.floats(of.id()).map(|t| t.dtype))
            }
            _ => mask::MaskVariant::of(&problem.mask, problem.softcap.is_some(), problem.appended > 0)
                .scores_only(),
        },
    };
    let drop = DropoutParams::new(dropout, device);
    let mut tensors: Vec<_> = inputs.iter().map(|t| t.window(device)).collect();
    tensors.extend([stats, gradient]);
    tensors.extend(variant.mask.windows(&problem.mask, device));
    tensors.extend(drop.keep);
    let [q, k, v, d_out] = match inputs[..] {
        [q, k, v, d_out] => [q, k, v, d_out].map(|t| view(t, device)),
        _ => [View::default(); 4],
    };
    let params = Params {
        q,
        k,
        v,
        d_out,
        gradient: View::from(gradient.layout),
        dropout: drop.view,
        mask: mask::MaskParams::new(&problem.mask, &shape, problem.appended, problem.softcap, device),
        shape: gradient.layout.shape.map(|n| n as u32),
        first: [0; 4],
        seed: drop.seed,
        batch: shape.batch as u32,
        heads: shape.heads as u32,
        group: shape.group() as u32,
        head_dim: shape.head_dim as u32,
        value_dim: shape.value_dim as u32,
        accumulates: u32::from(accumulates),
        dropout_threshold: drop.threshold,
        dropout_scale: drop.scale,
        scale: problem.scale,
        key_lanes: plan.key_lanes,
        parts: plan.parts as u32,
        part_rows: u32::try_from(plan.part_rows).unwrap_or(u32::MAX),
        pad: [0; 2],
    };
    plan.pieces().map(move |piece| {
        let first = [piece.first[0], piece.first[1], piece.first[2], 0];
        Dispatch {
            variant: KernelVariant::ScoreGradients(variant),
            params: variant.mask.with_mods(&Params { first, ..params }, &problem.mask, device),
            tensors: tensors.clone(),
            grid: piece.grid,
        }
    })
}
