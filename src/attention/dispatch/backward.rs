//! The backward pass: statistics of queries, then gradients of q, of k and v, and of the mask's
//! tensors.

use super::BackwardProblem;
use super::backward_problem::in_fours;
use super::score_gradients::{self, QueryStats};
use crate::attention::kernels::fused_backward::FusedBackwardCall;
use crate::attention::kernels::key_lists::KeyLists;
use crate::attention::kernels::row_stats::RowStatsCall;
use crate::attention::kernels::row_totals::RowTotalsCall;
pub(crate) use crate::attention::kernels::{row_stats, row_totals};
use crate::attention::plan::{
    Added, BackwardPlan, BackwardTiles, CapturedGradientsPlan, GradientsOf, ScoreGradientsPlan,
};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, Scratch, ScratchSize, Slot, View, Width, in_scratch, runs};
use crate::mask::kernels::dropout::Dropped;
use crate::mask::{Dropout, Id};
use crate::tensor::{DType, Error, Shape, TensorView, Window, count};

/// Bytes of statistics for each query: four numbers.
pub(crate) const STATS_BYTES: u64 = 16;

/// The parts of a scratch that a backward call uses.
#[derive(Clone, Copy)]
pub(crate) struct BackwardMemory<'a> {
    stats: &'a wgpu::Buffer,
    parts: Option<&'a wgpu::Buffer>,
}

/// The plans of a backward call. Each plan is cut into dispatches later.
pub(crate) struct BackwardPlans {
    plans: Vec<BackwardPlan>,
    added: Vec<ScoreGradientsPlan>,
    captured: Vec<CapturedGradientsPlan>,
    rows: usize,
}

/// Plans a backward call.
///
/// # Errors
/// Returns an error if:
///
/// - the device cannot bind so many mask tensors together with the other tensors,
/// - the call needs too many dispatches,
/// - the scratch is larger than the device can bind,
/// - a kernel is disabled and no other kernel replaces it.
pub(crate) fn plan(problem: &BackwardProblem, device: &DeviceFacts) -> Result<BackwardPlans, Error> {
    let Shape { batch, heads, q_len, .. } = problem.shape;
    let rows = batch.saturating_mul(heads).saturating_mul(q_len);
    let bytes = STATS_BYTES * rows as u64;
    let limit = device.max_binding_bytes.min(4 * u64::from(u32::MAX));
    if bytes > limit {
        return Err(Error::BindingLimit { tensor: "row_stats (scratch)", bytes, limit });
    }
    let keep = problem.dropout.as_ref().and_then(Dropout::given);
    let sinks = problem.mask.has(Id::SinkLogits);
    let of_rules = problem.mask.buffers() - usize::from(sinks) + usize::from(keep.is_some());
    let only_sinks = [problem.d_q, problem.d_k, problem.d_v].iter().all(Option::is_none)
        && problem.d_added.wanted().all(|(of, _)| of == Added::Sinks)
        && problem.d_added.captured().next().is_none();
    // q, k, v, d_out, the statistics and a gradient. For sinks alone: q, k, the statistics and all
    // tensors of the mask.
    let needed = if only_sinks { 3 + problem.mask.buffers() } else { 6 + of_rules };
    let (needed, limit) = (needed as u64, u64::from(device.max_storage_buffers));
    if needed > limit {
        let what = "storage buffers for the backward pass with this mask";
        return Err(Error::Limit { what, needed, limit, name: "max_storage_buffers_per_shader_stage" });
    }
    let mut wanted = Vec::new();
    wanted.extend(problem.d_q.map(|_| GradientsOf::Queries));
    match (problem.d_k, problem.d_v) {
        (Some(_), Some(_))
            if needed < limit
                && BackwardPlan::has_room_for_both(
                    &problem.shape,
                    problem.q.dtype,
                    &problem.kernel_options,
                    device,
                ) =>
        {
            wanted.push(GradientsOf::KeysAndValues);
        }
        (d_k, d_v) => {
            wanted.extend(d_k.map(|_| GradientsOf::Keys));
            wanted.extend(d_v.map(|_| GradientsOf::Values));
        }
    }
    let plan_of =
        |of| BackwardPlan::new(of, &problem.shape, problem.q.dtype, &problem.kernel_options, device);
    let mut plans = wanted.into_iter().map(plan_of).collect::<Result<Vec<_>, _>>()?;
    let added = problem.d_added.wanted().map(|(of, gradient)| {
        ScoreGradientsPlan::new(of, gradient.shape(), &problem.shape, &problem.kernel_options, device)
    });
    // The mask does not cover appended keys.
    let masked = Shape { kv_len: problem.shape.kv_len - problem.appended, ..problem.shape };
    let captured = problem.d_added.captured().map(|(n, gradient)| {
        CapturedGradientsPlan::new(n, count(gradient.shape()), &masked, &problem.kernel_options, device)
    });
    let (added, captured) = (added.collect::<Result<_, _>>()?, captured.collect::<Result<_, _>>()?);
    // Matrix units round weights to f16. This rounding error is larger than the rounding of lse.
    let exact = plans.iter().any(|plan| !matches!(plan.tiles, BackwardTiles::Matrix(_)));
    let gives = plans.first().is_some_and(|plan| plan.tiles.normalise(plan.of));
    if !problem.partial && !gives && (exact || !problem.d_added.is_empty()) {
        plans.insert(0, plan_of(GradientsOf::Totals)?);
    }
    Ok(BackwardPlans { plans, added, captured, rows })
}

impl BackwardPlans {
    /// The temporary memory that the plans need.
    pub fn scratch_size(&self) -> ScratchSize {
        ScratchSize::default()
            .with(Slot::RowStats, STATS_BYTES * self.rows as u64)
            .with(Slot::Partials, self.part_bytes())
    }

    /// The bytes of the gradients' parts. The gradients use the same memory one after the other.
    fn part_bytes(&self) -> u64 {
        let of_rules = self.added.iter().map(ScoreGradientsPlan::part_bytes);
        of_rules.chain(self.captured.iter().map(CapturedGradientsPlan::part_bytes)).max().unwrap_or(0)
    }

    /// The parts of the scratch that the plans use.
    ///
    /// # Errors
    /// Returns an error if the scratch is too small.
    pub fn memory<'a>(&self, scratch: &'a Scratch) -> Result<BackwardMemory<'a>, Error> {
        scratch.check(self.scratch_size())?;
        let parts = (self.part_bytes() > 0).then(|| scratch.buffer(Slot::Partials)).transpose()?;
        Ok(BackwardMemory { stats: scratch.buffer(Slot::RowStats)?, parts })
    }
}

/// Returns the dispatches of `problem`, with `memory` as scratch.
pub(crate) fn dispatches<'a>(
    problem: &BackwardProblem<'a>,
    plans: &BackwardPlans,
    memory: BackwardMemory<'a>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let stats = in_scratch(memory.stats, DType::F32, [1, 1, plans.rows, 4], 0).window(device);
    let mut dispatches: Dispatches = row_stats(problem, plans.rows, stats, device).collect();
    if !problem.partial {
        dispatches.extend(row_totals(problem, None, plans.rows, stats, device));
    }
    for plan in &plans.plans {
        dispatches.extend(gradients(problem, plan, stats, device));
    }
    let parts = memory.parts;
    let normalising = plans.plans.iter().find(|plan| plan.tiles.normalise(plan.of));
    let stats = QueryStats { window: stats, chains: normalising.is_some_and(|plan| plan.tiles.is_cpu()) };
    for plan in &plans.added {
        if let Some(gradient) = problem.d_added.get(plan.of) {
            dispatches.extend(score_gradients::of_rule(problem, plan, gradient, stats, parts, device));
        }
    }
    for (plan, (_, gradient)) in plans.captured.iter().zip(problem.d_added.captured()) {
        dispatches.extend(score_gradients::of_captured(problem, plan, gradient, stats, parts, device));
    }
    dispatches
}

pub(crate) fn row_stats<'a>(
    problem: &BackwardProblem<'a>,
    rows: usize,
    stats: Window<'a>,
    device: &DeviceFacts,
) -> impl Iterator<Item = Dispatch<'a>> {
    let BackwardProblem { shape, out, d_out, lse, d_lse, .. } = *problem;
    let call = RowStatsCall {
        out,
        d_out,
        lse,
        d_lse,
        row_stats: stats,
        heads: shape.heads as u32,
        q_len: shape.q_len as u32,
        value_dim: shape.value_dim as u32,
        first: 0,
        rows: rows as u32,
        neg_inf: f32::NEG_INFINITY,
        width: Width::of(in_fours(out) && in_fours(d_out)),
    };
    runs(rows.div_ceil(row_stats::WORKGROUP), device)
        .map(move |(first, grid)| RowStatsCall { first, ..call }.dispatch(grid, device))
}

pub(crate) fn row_totals<'a>(
    problem: &BackwardProblem<'a>,
    score_vector: Option<TensorView<'a>>,
    rows: usize,
    stats: Window<'a>,
    device: &DeviceFacts,
) -> impl Iterator<Item = Dispatch<'a>> {
    let BackwardProblem { shape, q, k, .. } = *problem;
    let [key_lists, key_batches] = KeyLists::numbers(problem.lists);
    let call = RowTotalsCall {
        q,
        k,
        score_vector,
        row_stats: stats,
        mask: problem.masked(problem.mask_variant(), device),
        key_lists,
        key_batches,
        heads: shape.heads as u32,
        group: shape.group() as u32,
        head_dim: shape.head_dim as u32,
        first: 0,
        rows: rows as u32,
        scale: problem.scale,
        width: Width::of(in_fours(q) && in_fours(k)),
        listed: problem.lists.is_some(),
    };
    runs(rows.div_ceil(row_totals::WORKGROUP), device)
        .map(move |(first, grid)| RowTotalsCall { first, ..call.clone() }.dispatch(grid, device))
}

fn gradients<'a>(
    problem: &BackwardProblem<'a>,
    plan: &BackwardPlan,
    stats: Window<'a>,
    device: &DeviceFacts,
) -> impl Iterator<Item = Dispatch<'a>> {
    let BackwardProblem { shape, q, k, v, d_out, d_q, d_k, d_v, .. } = *problem;
    let scored = match plan.of {
        GradientsOf::Queries => d_q,
        GradientsOf::Values | GradientsOf::Totals => None,
        GradientsOf::Keys | GradientsOf::KeysAndValues => d_k,
    };
    let valued = if plan.of.values() { d_v } else { None };
    let reaches_far = |t: &TensorView| t.extent().1 / t.dtype.bytes() as u64 >= 1 << 28;
    let totals = plan.of == GradientsOf::Totals;
    let [v, d_out] = [v, d_out].map(|t| (!totals).then_some(t));
    let inputs = || [Some(q), Some(k), v, d_out].into_iter().flatten();
    let view_of = |t: Option<TensorView>| View::optional(t, device);
    let [key_lists, key_batches] = KeyLists::numbers(problem.lists);
    let call = FusedBackwardCall {
        q,
        k,
        v,
        d_out,
        row_stats: stats,
        d_scored: scored,
        d_v: valued,
        mask: problem.masked(problem.mask_variant().scores_only(), device),
        drop: Dropped::new(problem.dropout.as_ref().filter(|_| !totals), device),
        d_q: view_of(d_q),
        d_k: view_of(d_k),
        first: [0; 4],
        key_lists,
        key_batches,
        heads: shape.heads as u32,
        kv_heads: shape.kv_heads as u32,
        group: shape.group() as u32,
        head_dim: shape.head_dim as u32,
        value_dim: shape.value_dim as u32,
        accumulates: u32::from(problem.accumulates),
        scale: problem.scale,
        partial: u32::from(problem.partial),
        tiles: plan.tiles,
        of: plan.of,
        width: Width::of(inputs().all(in_fours)),
        store: Width::of([scored, valued].into_iter().flatten().all(in_fours)),
        wide: plan.tiles.is_cpu() && inputs().any(|t| reaches_far(&t)),
        listed: problem.lists.is_some(),
    };
    plan.pieces().map(move |piece| {
        let first = [piece.first[0], piece.first[1], piece.first[2], 0];
        FusedBackwardCall { first, ..call.clone() }.dispatch(piece.grid, device)
    })
}
