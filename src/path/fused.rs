//! Everything in one kernel, cut into dispatches of bounded work; where keys are split, a second one that merges.

use super::dispatches::Dispatches;
use super::problem::{Extras, Keys, Problem};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, View, Width};
use crate::kernels::cache::CacheParams;
use crate::kernels::dropout::{DropoutKind, Dropped};
use crate::kernels::merge_splits::{self, MergeSplitsCall};
use crate::kernels::{KernelVariant, fused, mask};
use crate::mask::Id;
use crate::plan::{FusedPlan, Piece};
use crate::tensor::{Layout, TensorView, Window};

fn variant(problem: &Problem, plan: &FusedPlan) -> fused::Fused {
    let extras = &problem.extras;
    let reaches_far = |t: &TensorView| t.extent().1 / t.dtype.bytes() as u64 >= 1 << 28;
    let fours = |t: TensorView| t.layout.in_fours(3);
    let mask = mask::MaskVariant::of(&extras.mask, problem.softcap.is_some(), extras.appended > 0);
    let (kv, cache) = match problem.keys {
        Keys::Tensors { k, v } => (Some([k, v]), None),
        Keys::Cache(layer) => (None, Some(layer.cached)),
    };
    let splits = plan.splits > 1;
    let contiguous = |kv: [TensorView; 2]| kv.iter().all(|t| t.strides()[3] == 1);
    let variant = fused::Fused {
        tiles: plan.tiles,
        cache,
        halves: cache.is_none() && problem.keys.layout().in_words() && plan.tiles.takes_words(),
        splits,
        dtype: problem.q.dtype,
        width: Width::of(fours(problem.q) && kv.is_none_or(|kv| kv.into_iter().all(fours))),
        // Merging writes out, and lse.
        store: Width::of(splits || fours(extras.out)),
        wide: plan.tiles.is_cpu()
            && match problem.keys {
                Keys::Tensors { k, v } => [k, v].iter().any(reaches_far),
                Keys::Cache(layer) => layer.k.size.max(layer.v.size) > 1 << 30,
            },
        contiguous: false,
        lse: extras.lse.is_some() && !splits,
        drop: DropoutKind::of(extras.dropout.as_ref()),
        mask: cache.map_or(mask, |cache| mask.in_cache(&cache)),
        score_vector: problem.score_vector.map(|t| t.dtype),
    };
    fused::Fused { contiguous: variant.loads_by_channel() && kv.is_some_and(contiguous), ..variant }
}

/// The dispatches of `problem`. `partials` is the scratch's memory for splits, if there are any.
pub(crate) fn dispatches<'a>(
    problem: &Problem<'a>,
    plan: &FusedPlan,
    partials: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let Extras { out, lse, .. } = problem.extras;
    let partials = partials.map(|buffer| Window {
        buffer,
        start: 0,
        size: plan.partial_bytes(),
        layout: Layout::dense([1; 4]),
    });
    let variant = variant(problem, plan);
    let drop = Dropped::new(problem.extras.dropout.as_ref(), device);
    let params = params(problem, plan, &drop, device);
    let Some(partials) = partials else {
        let results = [Some(out), lse].into_iter().flatten().map(|t| t.window(device)).collect();
        return attend(problem, plan, variant, params, results, drop.keep, device);
    };
    let mut dispatches = attend(problem, plan, variant, params, vec![partials], drop.keep, device);
    dispatches.extend(merge(problem, plan, params, partials, device));
    dispatches
}

fn params(problem: &Problem, plan: &FusedPlan, drop: &Dropped, device: &DeviceFacts) -> fused::Params {
    let Problem { shape, q, keys, extras, .. } = problem;
    let (k, v, cache) = match *keys {
        Keys::Tensors { k, v } => (View::of(k, device), View::of(v, device), CacheParams::default()),
        Keys::Cache(layer) => (View::default(), View::default(), layer.params),
    };
    fused::Params {
        q: View::of(*q, device),
        k,
        v,
        out: View::of(extras.out, device),
        lse: View::optional(extras.lse, device),
        dropout: drop.params.dropout,
        score_vector: problem.score_vector.map_or(View::default(), |t| View::repeating(t, device)),
        mask: mask::MaskParams::new(&extras.mask, shape, extras.appended, problem.softcap, device),
        first: [0; 4],
        seed: drop.params.seed,
        heads: shape.heads as u32,
        kv_heads: shape.kv_heads as u32,
        group: shape.group() as u32,
        head_dim: shape.head_dim as u32,
        value_dim: shape.value_dim as u32,
        dropout_threshold: drop.params.dropout_threshold,
        dropout_scale: drop.params.dropout_scale,
        scale: problem.scale,
        splits: plan.splits as u32,
        stats: plan.stats() as u32,
        cache,
    }
}

/// The attention itself, in the plan's pieces; it writes `outputs`.
fn attend<'a>(
    problem: &Problem<'a>,
    plan: &FusedPlan,
    variant: fused::Fused,
    mut params: fused::Params,
    outputs: Vec<Window<'a>>,
    keep: Option<Window<'a>>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let mut tensors = vec![problem.q.window(device)];
    match problem.keys {
        Keys::Tensors { k, v } => tensors.extend([k, v].map(|t| t.window(device))),
        Keys::Cache(layer) => tensors.extend([layer.k, layer.v, layer.sequence_table]),
    }
    tensors.extend(problem.score_vector.map(|t| t.window(device)));
    tensors.extend(outputs);
    tensors.extend(variant.mask.windows(&problem.extras.mask, device));
    tensors.extend(keep);
    let dispatch = |piece: Piece| {
        params.first = [piece.first[0], piece.first[1], piece.first[2], 0];
        Dispatch {
            variant: KernelVariant::Fused(variant),
            params: variant.mask.with_mods(&params, &problem.extras.mask, device),
            tensors: tensors.clone(),
            grid: piece.grid,
        }
    };
    plan.pieces().map(dispatch).collect()
}

/// Merges the splits' sums into the results.
fn merge<'a>(
    problem: &Problem<'a>,
    plan: &FusedPlan,
    params: fused::Params,
    partial: Window<'a>,
    device: &DeviceFacts,
) -> impl Iterator<Item = Dispatch<'a, KernelVariant>> {
    let Extras { out, lse, mask, .. } = &problem.extras;
    let call = MergeSplitsCall {
        partial,
        out: *out,
        lse: *lse,
        sink_logits: mask.floats(Id::SinkLogits).copied(),
        mask: params.mask,
        heads: params.heads,
        kv_heads: params.kv_heads,
        group: params.group,
        value_dim: params.value_dim,
        rows: plan.rows() as u32,
        splits: params.splits,
        stats: params.stats,
        first: 0,
        store: Width::of(out.layout.in_fours(3)),
    };
    let groups = plan.rows().div_ceil(merge_splits::ROWS);
    let most = device.max_workgroups as usize;
    (0..groups).step_by(most).map(move |first| {
        let call = MergeSplitsCall { first: first as u32, ..call };
        call.dispatch([(groups - first).min(most), 1, 1], device)
    })
}
