//! scores → softmax → weighted sum, with the score matrix in memory.

use super::dispatches::{Dispatches, grid};
use super::problem::{Extras, Keys, Problem};
use crate::device::DeviceFacts;
use crate::family::STAGED;
use crate::kernel::{Dispatch, View, Width};
use crate::kernels::additive_scores::{self, AdditiveScores};
use crate::kernels::average_weights::{AverageWeightsCall, WORKGROUP};
use crate::kernels::dropout::{DropoutKind, DropoutParams};
use crate::kernels::{KernelVariant, mask, score_stage, scores, softmax, weighted_sum};
use crate::plan::{self, MatmulShape, Tiles, WeightsOutput};
use crate::problem::{ScoreStage, Shape};
use crate::tensor::{DType, TensorView, Window};

/// The dispatches of `problem`. `matrix` is the scratch's score buffer, unless the weights serve.
pub(crate) fn dispatches<'a>(
    problem: &Problem<'a>,
    matrix: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let shape = &problem.shape;
    let extras = &problem.extras;
    let is_matrix = |w: &TensorView| WeightsOutput::of(w.dtype, w.shape(), shape) == WeightsOutput::Matrix;
    let direct = extras.weights.filter(is_matrix);
    let scratch = matrix.map(|buffer| TensorView::with_layout(buffer, DType::F32, plan::score_matrix(shape)));
    // A cache never comes here.
    let (Some(matrix), Keys::Tensors { k, v }) = (direct.or(scratch), problem.keys) else {
        return Vec::new();
    };
    let softcap = problem.softcap;
    let staged = Staged {
        problem,
        k,
        v,
        matrix,
        mask: mask::MaskVariant::of(&extras.mask, softcap.is_some(), extras.appended > 0),
        mask_params: mask::MaskParams::new(&extras.mask, shape, extras.appended, softcap, device),
        device,
    };
    let scores = match problem.score_vector {
        Some(score_vector) => staged.additive_scores(score_vector),
        None => staged.scores(),
    };
    let mut dispatches = vec![scores];
    dispatches.extend(extras.scores.map(|(out, stage)| staged.score_stage(out, stage)));
    dispatches.extend([staged.softmax(), staged.weighted_sum()]);
    if direct.is_none() {
        dispatches.extend(extras.weights.map(|weights| staged.average_weights(weights)));
    }
    dispatches
}

/// What the stages of one problem share.
struct Staged<'p, 'a> {
    problem: &'p Problem<'a>,
    k: TensorView<'a>,
    v: TensorView<'a>,
    /// Scores, then weights: `[batch, heads, q_len, kv_len]`, f32, perhaps padded.
    matrix: TensorView<'a>,
    mask: mask::MaskVariant,
    mask_params: mask::MaskParams,
    device: &'p DeviceFacts,
}

fn in_fours(t: TensorView) -> bool {
    t.layout.in_fours(3)
}

impl<'a> Staged<'_, 'a> {
    fn view(&self, t: TensorView) -> View {
        View::of(t, self.device)
    }

    fn windows(&self, tensors: &[TensorView<'a>], mask: mask::MaskVariant) -> Vec<Window<'a>> {
        let mut windows: Vec<_> = tensors.iter().map(|t| t.window(self.device)).collect();
        windows.extend(mask.windows(&self.problem.extras.mask, self.device));
        windows
    }

    fn is_cpu(&self) -> bool {
        self.problem.tuning.form.choose(STAGED, self.device)
    }

    /// One product per batch and head, and its tiles.
    fn product(&self, cols: usize) -> (Tiles, MatmulShape) {
        let Shape { batch, heads, q_len, .. } = self.problem.shape;
        let product = MatmulShape { batch: batch * heads, rows: q_len, cols };
        (plan::tiles(product, self.is_cpu(), self.device), product)
    }

    /// What bounds the keys that are scored.
    fn scored_range(&self) -> mask::MaskVariant {
        match self.problem.extras.scores {
            // Those of pairs that nobody sees are wanted too.
            Some((_, ScoreStage::Scaled | ScoreStage::Softcapped)) => mask::MaskVariant::default(),
            _ => self.mask.range_only(),
        }
    }

    fn scores(&self) -> Dispatch<'a, KernelVariant> {
        let Problem { shape, q, scale, .. } = *self.problem;
        let k = self.k;
        let (tiles, product) = self.product(shape.kv_len);
        let range = self.scored_range();
        let params = scores::Params {
            q: self.view(q),
            k: self.view(k),
            scores: self.view(self.matrix),
            mask: self.mask_params,
            heads: shape.heads as u32,
            group: shape.group() as u32,
            head_dim: shape.head_dim as u32,
            scale,
        };
        Dispatch {
            variant: KernelVariant::Scores(scores::Scores {
                tiles,
                dtype: q.dtype,
                width: Width::of(in_fours(q) && in_fours(k)),
                store: Width::of(in_fours(self.matrix)),
                range,
            }),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: self.windows(&[q, k, self.matrix], range),
            grid: grid(plan::grid(tiles, product)),
        }
    }

    fn additive_scores(&self, score_vector: TensorView<'a>) -> Dispatch<'a, KernelVariant> {
        let Problem { shape, q, .. } = *self.problem;
        let (k, cpu) = (self.k, self.is_cpu());
        let variant = AdditiveScores {
            cpu,
            key_lanes: AdditiveScores::key_lanes(shape.q_len, cpu),
            dtype: q.dtype,
            width: Width::of(in_fours(q) && in_fours(k)),
            score_vector: score_vector.dtype,
            range: additive_scores::fitting(self.scored_range(), 4, self.device),
        };
        let params = additive_scores::Params {
            q: self.view(q),
            k: self.view(k),
            score_vector: View::repeating(score_vector, self.device),
            scores: self.view(self.matrix),
            mask: self.mask_params,
            first: [0; 4],
            end: [shape.batch as u32, shape.q_len as u32, shape.kv_len as u32, 0],
            heads: shape.heads as u32,
            group: shape.group() as u32,
            hidden: shape.head_dim as u32,
            pad: 0,
        };
        let [rows, keys] = variant.tile();
        Dispatch {
            variant: KernelVariant::AdditiveScores(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: self.windows(&[q, k, score_vector, self.matrix], variant.range),
            grid: grid([shape.kv_len.div_ceil(keys), shape.q_len.div_ceil(rows), shape.batch * shape.heads]),
        }
    }

    /// The scores as the caller wants them, before the softmax overwrites them.
    fn score_stage(&self, out: TensorView<'a>, stage: ScoreStage) -> Dispatch<'a, KernelVariant> {
        let Shape { batch, heads, q_len, kv_len, .. } = self.problem.shape;
        let mask = match stage {
            ScoreStage::Scaled => mask::MaskVariant::default(),
            ScoreStage::Softcapped => self.mask.softcap_only(),
            ScoreStage::Biased => self.mask.scores_only(),
        };
        let params = score_stage::Params {
            scores: self.view(self.matrix),
            out: self.view(out),
            mask: self.mask_params,
            heads: heads as u32,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        Dispatch {
            variant: KernelVariant::ScoreStage(score_stage::ScoreStage { out: out.dtype, mask }),
            params: mask.with_mods(&params, &self.problem.extras.mask, self.device),
            tensors: self.windows(&[self.matrix, out], mask),
            grid: grid([kv_len.div_ceil(score_stage::WORKGROUP), q_len, batch * heads]),
        }
    }

    fn softmax(&self) -> Dispatch<'a, KernelVariant> {
        let Problem { shape, extras: Extras { lse, .. }, .. } = *self.problem;
        let rows = plan::rows(shape.kv_len, self.is_cpu());
        let dropout = self.problem.extras.dropout.as_ref();
        let drop = DropoutParams::new(dropout, self.device);
        let params = softmax::Params {
            scores: self.view(self.matrix),
            lse: lse.map_or(View::default(), |t| self.view(t)),
            dropout: drop.view,
            mask: self.mask_params,
            seed: drop.seed,
            heads: shape.heads as u32,
            dropout_threshold: drop.threshold,
            dropout_scale: drop.scale,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let mut tensors = vec![self.matrix];
        tensors.extend(lse);
        let mut tensors = self.windows(&tensors, self.mask);
        tensors.extend(drop.keep);
        let row_groups = if rows.lanes == 1 { rows.workgroup as usize } else { 1 };
        Dispatch {
            variant: KernelVariant::Softmax(softmax::Softmax {
                rows,
                width: Width::of(in_fours(self.matrix)),
                lse: lse.is_some(),
                drop: DropoutKind::of(dropout),
                mask: self.mask,
            }),
            params: self.mask.with_mods(&params, &self.problem.extras.mask, self.device),
            tensors,
            grid: grid([shape.q_len.div_ceil(row_groups), shape.heads, shape.batch]),
        }
    }

    fn weighted_sum(&self) -> Dispatch<'a, KernelVariant> {
        let Problem { shape, extras: Extras { out, .. }, .. } = *self.problem;
        let v = self.v;
        let (tiles, product) = self.product(shape.value_dim);
        let range = self.mask.range_only();
        let params = weighted_sum::Params {
            weights: self.view(self.matrix),
            v: self.view(v),
            out: self.view(out),
            mask: self.mask_params,
            heads: shape.heads as u32,
            group: shape.group() as u32,
            value_dim: shape.value_dim as u32,
            pad: 0,
        };
        Dispatch {
            variant: KernelVariant::WeightedSum(weighted_sum::WeightedSum {
                tiles,
                v: v.dtype,
                out: out.dtype,
                width: Width::of(in_fours(self.matrix) && in_fours(v)),
                store: Width::of(in_fours(out)),
                range,
            }),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: self.windows(&[self.matrix, v, out], range),
            grid: grid(plan::grid(tiles, product)),
        }
    }

    /// The weights as the caller wants them, where the matrix itself is in scratch.
    fn average_weights(&self, out: TensorView<'a>) -> Dispatch<'a, KernelVariant> {
        let Shape { batch, heads, q_len, kv_len, .. } = self.problem.shape;
        let out_heads = out.shape()[1];
        let call = AverageWeightsCall {
            weights: self.matrix,
            out,
            out_heads: out_heads as u32,
            group: (heads / out_heads) as u32,
            q_len: q_len as u32,
            kv_len: kv_len as u32,
        };
        call.dispatch([kv_len.div_ceil(WORKGROUP), q_len, batch * out_heads], self.device)
    }
}
