//! The fused path: one kernel, cut into dispatches of bounded work. If the plan splits the keys, a
//! second kernel merges the partial results.

use super::{Extras, Keys, Problem};
use crate::attention::kernels::fused::{Fused, FusedCall};
use crate::attention::kernels::key_lists::KeyLists;
use crate::attention::kernels::merge_splits::{self, MergeSplitsCall};
use crate::attention::plan::FusedPlan;
use crate::cache::kernels::cache::CacheParams;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, Width};
use crate::mask::Id;
use crate::mask::kernels::dropout::Dropped;
use crate::mask::kernels::{MaskParams, MaskVariant, Masked};
use crate::tensor::{Layout, TensorView, Window};

/// Returns the dispatches of `problem`. `partials` is the scratch's memory for splits, if any.
pub(crate) fn dispatches<'a>(
    problem: &Problem<'a>,
    plan: &FusedPlan,
    partials: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let partial = partials.map(|buffer| Window {
        buffer,
        start: 0,
        size: plan.partial_bytes(),
        layout: Layout::dense([1; 4]),
    });
    let extras = &problem.extras;
    let mask = MaskParams::new(&extras.mask, &problem.shape, extras.appended, problem.softcap, device);
    let call = call(problem, plan, mask, partial, device);
    // One dispatch for each part of the plan's grid.
    let mut dispatches: Dispatches = plan
        .pieces()
        .map(|piece| {
            let first = [piece.first[0], piece.first[1], piece.first[2], 0];
            FusedCall { first, ..call.clone() }.dispatch(piece.grid, device)
        })
        .collect();
    dispatches.extend(partial.into_iter().flat_map(|partial| merge(problem, plan, mask, partial, device)));
    dispatches
}

/// Returns the call of the attention kernel. It writes `partial` if that is present, else out and
/// lse.
fn call<'a>(
    problem: &Problem<'a>,
    plan: &FusedPlan,
    mask: MaskParams,
    partial: Option<Window<'a>>,
    device: &DeviceFacts,
) -> FusedCall<'a> {
    let Problem { shape, q, scale, .. } = *problem;
    let extras = &problem.extras;
    let reaches_far = |t: &TensorView| t.extent().1 / t.dtype.bytes() as u64 >= 1 << 28;
    let fours = |t: TensorView| t.layout.in_fours(3);
    let (kv, layer) = match problem.keys {
        Keys::Tensors { k, v } => (Some([k, v]), None),
        Keys::Cache(layer) => (None, Some(layer)),
    };
    let contiguous = |kv: [TensorView; 2]| kv.iter().all(|t| t.strides()[3] == 1);
    let words = layer.is_none() && problem.keys.layout().in_words() && plan.tiles.takes_words();
    let width = Width::of(fours(q) && kv.is_none_or(|kv| kv.into_iter().all(fours)));
    let by_channel = Fused::by_channel(plan.tiles, width) && !words;
    let rules = MaskVariant::of(&extras.mask, problem.softcap.is_some(), extras.appended > 0);
    // The lengths of lists stand for the lengths of a cache.
    let cached = layer.filter(|_| problem.lists.is_none());
    let rules = cached.map_or(rules, |layer| rules.in_cache(&layer.cached));
    let [key_lists, key_batches] = KeyLists::numbers(problem.lists);
    let whole = partial.is_none();
    FusedCall {
        q,
        k: kv.map(|[k, _]| k),
        v: kv.map(|[_, v]| v),
        cache_k: layer.map(|layer| layer.k),
        cache_v: layer.map(|layer| layer.v),
        sequence_table: layer.map(|layer| layer.sequence_table),
        score_vector: problem.score_vector,
        partial,
        out: whole.then_some(extras.out),
        lse: extras.lse.filter(|_| whole),
        mask: Masked::new(rules, &extras.mask, mask, device),
        drop: Dropped::new(extras.dropout.as_ref(), device),
        cache: layer.map_or(CacheParams::default(), |layer| layer.params),
        first: [0; 4],
        key_lists,
        key_batches,
        heads: shape.heads as u32,
        kv_heads: shape.kv_heads as u32,
        group: shape.group() as u32,
        head_dim: shape.head_dim as u32,
        value_dim: shape.value_dim as u32,
        scale,
        splits: plan.splits as u32,
        fixed_split: plan.fixed_split as u32,
        stats: plan.stats() as u32,
        tiles: plan.tiles,
        cached: layer.map(|layer| layer.cached),
        words,
        width,
        // The merge kernel writes out and lse.
        store: Width::of(!whole || fours(extras.out)),
        wide: plan.tiles.is_cpu()
            && match problem.keys {
                Keys::Tensors { k, v } => [k, v].iter().any(reaches_far),
                Keys::Cache(layer) => layer.k.size.max(layer.v.size) > 1 << 30,
            },
        contiguous: by_channel && kv.is_some_and(contiguous),
        listed: problem.lists.is_some(),
    }
}

/// Returns the dispatches that merge the splits' sums into the results.
fn merge<'a>(
    problem: &Problem<'a>,
    plan: &FusedPlan,
    mask_params: MaskParams,
    partial: Window<'a>,
    device: &DeviceFacts,
) -> impl Iterator<Item = Dispatch<'a>> {
    let Problem { shape, .. } = problem;
    let Extras { out, lse, mask, .. } = &problem.extras;
    let call = MergeSplitsCall {
        partial,
        out: *out,
        lse: *lse,
        sink_logits: mask.floats(Id::SinkLogits).copied(),
        mask: mask_params,
        heads: shape.heads as u32,
        kv_heads: shape.kv_heads as u32,
        group: shape.group() as u32,
        value_dim: shape.value_dim as u32,
        rows: plan.rows() as u32,
        splits: plan.splits as u32,
        stats: plan.stats() as u32,
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
