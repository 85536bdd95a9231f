//! Everything in one kernel, cut into dispatches of bounded work.

use super::{Calls, Problem};
use crate::dropout::Dropout;
use crate::kernel::{Call, View, Width};
use crate::kernels::dropout::{Drop, DropParams};
use crate::kernels::{Stage, fused, mask};
use crate::plan::{FusedPlan, FusedTiles, Piece};
use crate::tensor::{DeviceFacts, TensorView};

/// Storage buffers that `problem` binds: q, k, v, out, and what else it has.
pub(crate) fn bindings(problem: &Problem) -> usize {
    let dropout = problem.dropout.as_ref().and_then(Dropout::given);
    4 + problem.lse.iter().count() + problem.mask.tensors().len() + dropout.iter().count()
}

fn variant(problem: &Problem, tiles: FusedTiles) -> fused::Fused {
    let reaches_far = |t: &TensorView| t.extent().1 / t.dtype.bytes() as u64 >= 1 << 28;
    let fours = |t: TensorView| t.layout.in_fours(3);
    fused::Fused {
        tiles,
        dtype: problem.q.dtype,
        width: Width::of([problem.q, problem.k, problem.v].into_iter().all(fours)),
        put: Width::of(fours(problem.out)),
        wide: matches!(tiles, FusedTiles::Uniform { .. }) && [problem.k, problem.v].iter().any(reaches_far),
        lse: problem.lse.is_some(),
        drop: Drop::of(problem.dropout.as_ref()),
        mask: mask::Parts::of(&problem.mask, problem.softcap.is_some(), problem.appended > 0),
    }
}

/// The dispatches of `problem`.
pub(crate) fn calls<'a>(problem: &Problem<'a>, plan: &FusedPlan, device: &DeviceFacts) -> Calls<'a> {
    let Problem { shape, q, k, v, out, lse, .. } = *problem;
    let variant = variant(problem, plan.tiles);
    let view = |t: TensorView| View::from(t.window(device).layout);
    let drop = DropParams::new(problem.dropout.as_ref(), device);
    let mut params = fused::Params {
        q: view(q),
        k: view(k),
        v: view(v),
        out: view(out),
        lse: lse.map_or(View::default(), view),
        dropout: drop.view,
        mask: mask::MaskParams::new(&problem.mask, &shape, problem.appended, problem.softcap, device),
        first: [0; 4],
        seed: drop.seed,
        heads: shape.heads as u32,
        kv_heads: shape.kv_heads as u32,
        group: shape.group() as u32,
        head_dim: shape.head_dim as u32,
        value_dim: shape.value_dim as u32,
        dropout_threshold: drop.threshold,
        dropout_scale: drop.scale,
        scale: problem.scale,
        pad0: 0,
        pad1: 0,
    };
    let mut tensors: Vec<_> =
        [Some(q), Some(k), Some(v), Some(out), lse].into_iter().flatten().map(|t| t.window(device)).collect();
    tensors.extend(variant.mask.windows(&problem.mask, device));
    tensors.extend(drop.keep);
    let call = |piece: Piece| {
        params.first = [piece.first[0], piece.first[1], piece.first[2], 0];
        Call {
            variant: Stage::Fused(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: tensors.clone(),
            grid: piece.grid,
        }
    };
    plan.pieces().map(call).collect()
}
