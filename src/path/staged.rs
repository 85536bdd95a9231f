//! scores → softmax → weighted sum, with the score matrix in memory.

use super::{Calls, grid};
use crate::dropout::Dropout;
use crate::kernel::{Call, View, Width};
use crate::kernels::{Stage, average_weights, mask, scores, softmax, weighted_sum};
use crate::mask::DeviceMask;
use crate::plan::{self, Product, Tiling};
use crate::problem::Shape;
use crate::scratch::{ScratchSize, Slot};
use crate::tensor::{DType, DeviceFacts, Layout, TensorView, broadcast, dense_strides};

/// A checked attention problem.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub shape: Shape,
    pub q: TensorView<'a>,
    pub k: TensorView<'a>,
    pub v: TensorView<'a>,
    pub out: TensorView<'a>,
    pub mask: DeviceMask<'a>,
    /// How many of the last keys stand outside of the mask.
    pub appended: usize,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub lse: Option<TensorView<'a>>,
    pub weights: Option<TensorView<'a>>,
    pub dropout: Option<Dropout<TensorView<'a>>>,
    pub tiling: Tiling,
}

/// Whether the caller's weights tensor can be the score matrix itself.
fn is_matrix(weights: &TensorView, shape: &Shape) -> bool {
    weights.dtype == DType::F32 && weights.shape() == shape.weights()
}

/// The score matrix in scratch: rows padded to whole vectors.
fn matrix_layout(shape: &Shape) -> Layout {
    let [b, h, i, j] = shape.weights();
    Layout::dense([b, h, i, j.next_multiple_of(4)])
}

/// Temporary memory for the score matrix: none if the caller's weights tensor serves.
pub(crate) fn scratch_size(shape: &Shape, weights: Option<&TensorView>) -> ScratchSize {
    if weights.is_some_and(|w| is_matrix(w, shape)) {
        return ScratchSize::default();
    }
    let [b, h, i, j] = matrix_layout(shape).shape.map(|n| n as u64);
    let bytes = b.saturating_mul(h).saturating_mul(i).saturating_mul(j).saturating_mul(4);
    ScratchSize::default().with(Slot::Scores, bytes)
}

/// The dispatches of `problem`. `matrix` is the scratch's score buffer, unless the weights serve.
pub(crate) fn calls<'a>(
    problem: &Problem<'a>,
    matrix: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Calls<'a> {
    let Problem { shape, q, k, v, out, tiling, .. } = *problem;
    let direct = problem.weights.filter(|w| is_matrix(w, &shape));
    let scratch =
        matrix.map(|buffer| TensorView { buffer, dtype: DType::F32, layout: matrix_layout(&shape) });
    let Some(matrix) = direct.or(scratch) else { return Vec::new() };
    let in_fours = |t: TensorView| t.layout.in_fours(3);
    let view = |t: TensorView| View::from(t.window(device).layout);
    let parts = mask::Parts::of(&problem.mask, problem.softcap.is_some(), problem.appended > 0);
    let range = parts.range_only();
    let mask_params = mask::MaskParams::new(&problem.mask, &shape, problem.appended, problem.softcap, device);
    let (heads, group) = (shape.heads as u32, shape.group() as u32);
    let batch = shape.batch * shape.heads;
    let mut calls = Vec::with_capacity(4);

    let product = Product { batch, rows: shape.q_len, cols: shape.kv_len };
    let tiles = plan::tiles(product, tiling, device);
    let mut tensors = vec![q.window(device), k.window(device), matrix.window(device)];
    tensors.extend(range.windows(&problem.mask, device));
    calls.push(Call {
        variant: Stage::Scores(scores::Scores {
            tiles,
            dtype: q.dtype,
            width: Width::of(in_fours(q) && in_fours(k)),
            put: Width::of(in_fours(matrix)),
            range,
        }),
        params: bytemuck::bytes_of(&scores::Params {
            q: view(q),
            k: view(k),
            scores: view(matrix),
            mask: mask_params,
            heads,
            group,
            head_dim: shape.head_dim as u32,
            scale: problem.scale,
        })
        .to_vec(),
        tensors,
        grid: grid(plan::grid(tiles, product)),
    });

    let rows = plan::rows(shape.kv_len, tiling, device);
    let dropout = problem.dropout.as_ref();
    let drop = match dropout {
        None => softmax::Drop::None,
        Some(Dropout::Seeded { .. }) => softmax::Drop::Seeded,
        Some(Dropout::Given { .. }) => softmax::Drop::Given,
    };
    let keep = dropout.and_then(Dropout::given).copied();
    let seed = dropout.map_or(0, Dropout::seed);
    let mut tensors = vec![matrix.window(device)];
    tensors.extend(problem.lse.map(|t| t.window(device)));
    tensors.extend(parts.windows(&problem.mask, device));
    tensors.extend(keep.map(|t| t.window(device)));
    let row_groups =
        if rows.lanes == 1 { shape.q_len.div_ceil(rows.workgroup as usize) } else { shape.q_len };
    calls.push(Call {
        variant: Stage::Softmax(softmax::Softmax {
            rows,
            width: Width::of(in_fours(matrix)),
            lse: problem.lse.is_some(),
            drop,
            mask: parts,
        }),
        params: bytemuck::bytes_of(&softmax::Params {
            scores: view(matrix),
            lse: problem.lse.map_or(View::default(), view),
            dropout: keep.map_or(View::default(), |t| View::from(broadcast(t.window(device).layout))),
            mask: mask_params,
            seed: [seed as u32, (seed >> 32) as u32],
            heads,
            dropout_threshold: dropout.map_or(0, Dropout::threshold),
            dropout_scale: dropout.map_or(1.0, |d| 1.0 / (1.0 - d.p())),
            pad0: 0,
            pad1: 0,
            pad2: 0,
        })
        .to_vec(),
        tensors,
        grid: grid([row_groups, shape.heads, shape.batch]),
    });

    let product = Product { batch, rows: shape.q_len, cols: shape.value_dim };
    let tiles = plan::tiles(product, tiling, device);
    let mut tensors = vec![matrix.window(device), v.window(device), out.window(device)];
    tensors.extend(range.windows(&problem.mask, device));
    calls.push(Call {
        variant: Stage::WeightedSum(weighted_sum::WeightedSum {
            tiles,
            v: v.dtype,
            out: out.dtype,
            width: Width::of(in_fours(matrix) && in_fours(v)),
            put: Width::of(in_fours(out)),
            range,
        }),
        params: bytemuck::bytes_of(&weighted_sum::Params {
            weights: view(matrix),
            v: view(v),
            out: view(out),
            mask: mask_params,
            heads,
            group,
            value_dim: shape.value_dim as u32,
            pad: 0,
        })
        .to_vec(),
        tensors,
        grid: grid(plan::grid(tiles, product)),
    });

    if let Some(weights) = problem.weights.filter(|_| direct.is_none()) {
        let out_heads = weights.shape()[1];
        calls.push(Call {
            variant: Stage::AverageWeights(average_weights::AverageWeights { out: weights.dtype }),
            params: bytemuck::bytes_of(&average_weights::Params {
                weights: view(matrix),
                out: view(weights),
                out_heads: out_heads as u32,
                group: (shape.heads / out_heads) as u32,
                q_len: shape.q_len as u32,
                kv_len: shape.kv_len as u32,
            })
            .to_vec(),
            tensors: vec![matrix.window(device), weights.window(device)],
            grid: grid([
                shape.kv_len.div_ceil(average_weights::WORKGROUP),
                shape.q_len,
                shape.batch * out_heads,
            ]),
        });
    }
    calls
}

/// A dense tensor in a scratch buffer, from element `offset` on.
pub(crate) fn in_scratch(
    buffer: &wgpu::Buffer,
    dtype: DType,
    shape: [usize; 4],
    offset: usize,
) -> TensorView<'_> {
    TensorView { buffer, dtype, layout: Layout { shape, strides: dense_strides(shape), offset } }
}
