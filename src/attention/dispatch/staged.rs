//! The staged path: scores → softmax → weighted sum, with the score matrix in memory.

use super::{Extras, Keys, Problem};
use crate::attention::kernels::additive_scores::{self, AdditiveScores, AdditiveScoresCall};
use crate::attention::kernels::average_weights::{AverageWeightsCall, WORKGROUP};
use crate::attention::kernels::score_stage::{self, ScoreStageCall};
use crate::attention::kernels::scores::ScoresCall;
use crate::attention::kernels::softmax::SoftmaxCall;
use crate::attention::kernels::weighted_sum::WeightedSumCall;
use crate::attention::plan::WeightsOutput;
use crate::attention::{self, ScoreStage};
use crate::device::DeviceFacts;
use crate::device::family::STAGED;
use crate::kernel::{Dispatch, Dispatches, Placed, Width};
use crate::mask::kernels::dropout::Dropped;
use crate::mask::kernels::{MaskParams, MaskVariant, Masked};
use crate::matmul::plan::{MatmulShape, Tiles};
use crate::tensor::{DType, Shape, TensorView};
use crate::{matmul, rows};

/// Returns the dispatches of `problem`. `matrix` is the scratch's score buffer. It is absent if the
/// weights tensor holds the scores.
pub(crate) fn dispatches<'a>(
    problem: &Problem<'a>,
    matrix: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let shape = &problem.shape;
    let extras = &problem.extras;
    let is_matrix = |w: &TensorView| WeightsOutput::of(w.dtype, w.shape(), shape) == WeightsOutput::Matrix;
    let direct = extras.weights.filter(is_matrix);
    let scratch = matrix
        .map(|buffer| TensorView::with_layout(buffer, DType::F32, attention::plan::score_matrix(shape)));
    // The plan never chooses this path for a cache.
    let (Some(matrix), Keys::Tensors { k, v }) = (direct.or(scratch), problem.keys) else {
        return Vec::new();
    };
    let softcap = problem.softcap;
    let staged = Staged {
        problem,
        k,
        v,
        matrix,
        mask: MaskVariant::of(&extras.mask, softcap.is_some(), extras.appended > 0),
        mask_params: MaskParams::new(&extras.mask, shape, extras.appended, softcap, device),
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

/// The values that the stages of one problem share.
struct Staged<'p, 'a> {
    problem: &'p Problem<'a>,
    k: TensorView<'a>,
    v: TensorView<'a>,
    /// Scores, then weights: `[batch, heads, q_len, kv_len]`, f32, perhaps padded.
    matrix: TensorView<'a>,
    mask: MaskVariant,
    mask_params: MaskParams,
    device: &'p DeviceFacts,
}

fn in_fours(t: TensorView) -> bool {
    t.layout.in_fours(3)
}

impl<'a> Staged<'_, 'a> {
    /// Returns the given rules of the call's mask, with their tensors.
    fn masked(&self, variant: MaskVariant) -> Masked<'a> {
        Masked::new(variant, &self.problem.extras.mask, self.mask_params, self.device)
    }

    fn is_cpu(&self) -> bool {
        self.problem.kernel_options.target.choose(STAGED, self.device)
    }

    /// Returns one product per batch and head, and its tiles.
    fn product(&self, cols: usize) -> (Tiles, MatmulShape) {
        let Shape { batch, heads, q_len, .. } = self.problem.shape;
        let product = MatmulShape { batch: batch * heads, rows: q_len, cols };
        (matmul::plan::tiles(product, self.is_cpu(), self.device), product)
    }

    /// Returns the rules that bound the range of scored keys.
    fn scored_range(&self) -> MaskVariant {
        match self.problem.extras.scores {
            // These outputs include the scores of pairs that the mask hides.
            Some((_, ScoreStage::Scaled | ScoreStage::Softcapped)) => MaskVariant::default(),
            _ => self.mask.range_only(),
        }
    }

    fn scores(&self) -> Dispatch<'a> {
        let Problem { shape, q, scale, .. } = *self.problem;
        let k = self.k;
        let (tiles, product) = self.product(shape.kv_len);
        let call = ScoresCall {
            q,
            k,
            scores: Placed::of(self.matrix, self.device),
            mask: self.masked(self.scored_range()),
            heads: shape.heads as u32,
            group: shape.group() as u32,
            head_dim: shape.head_dim as u32,
            scale,
            tiles,
            width: Width::of(in_fours(q) && in_fours(k)),
            store: Width::of(in_fours(self.matrix)),
        };
        call.dispatch(matmul::plan::grid(tiles, product), self.device)
    }

    fn additive_scores(&self, score_vector: TensorView<'a>) -> Dispatch<'a> {
        let Problem { shape, q, .. } = *self.problem;
        let (k, cpu) = (self.k, self.is_cpu());
        let key_lanes = AdditiveScores::key_lanes(shape.q_len, cpu);
        let call = AdditiveScoresCall {
            q,
            k,
            score_vector,
            scores: Placed::of(self.matrix, self.device),
            mask: self.masked(additive_scores::fitting(self.scored_range(), 4, self.device)),
            first: [0; 4],
            end: [shape.batch as u32, shape.q_len as u32, shape.kv_len as u32, 0],
            heads: shape.heads as u32,
            group: shape.group() as u32,
            hidden: shape.head_dim as u32,
            cpu,
            key_lanes,
            width: Width::of(in_fours(q) && in_fours(k)),
        };
        let [rows, keys] = AdditiveScores::tile(cpu, key_lanes);
        let grid = [shape.kv_len.div_ceil(keys), shape.q_len.div_ceil(rows), shape.batch * shape.heads];
        call.dispatch(grid, self.device)
    }

    /// Returns the dispatch that writes the scores of the caller's stage. It runs before the
    /// softmax overwrites the matrix.
    fn score_stage(&self, out: TensorView<'a>, stage: ScoreStage) -> Dispatch<'a> {
        let Shape { batch, heads, q_len, kv_len, .. } = self.problem.shape;
        let mask = match stage {
            ScoreStage::Scaled => MaskVariant::default(),
            ScoreStage::Softcapped => self.mask.softcap_only(),
            ScoreStage::Biased => self.mask.scores_only(),
        };
        let call = ScoreStageCall { scores: self.matrix, out, mask: self.masked(mask), heads: heads as u32 };
        call.dispatch([kv_len.div_ceil(score_stage::WORKGROUP), q_len, batch * heads], self.device)
    }

    fn softmax(&self) -> Dispatch<'a> {
        let Problem { shape, extras: Extras { lse, .. }, .. } = *self.problem;
        let rows = rows::plan::rows(shape.kv_len, self.is_cpu());
        let call = SoftmaxCall {
            scores: self.matrix,
            lse,
            mask: self.masked(self.mask),
            drop: Dropped::new(self.problem.extras.dropout.as_ref(), self.device),
            heads: shape.heads as u32,
            rows,
            width: Width::of(in_fours(self.matrix)),
        };
        let row_groups = if rows.lanes == 1 { rows.workgroup as usize } else { 1 };
        call.dispatch([shape.q_len.div_ceil(row_groups), shape.heads, shape.batch], self.device)
    }

    fn weighted_sum(&self) -> Dispatch<'a> {
        let Problem { shape, extras: Extras { out, .. }, .. } = *self.problem;
        let v = self.v;
        let (tiles, product) = self.product(shape.value_dim);
        let call = WeightedSumCall {
            weights: self.matrix,
            v,
            out,
            mask: self.masked(self.mask.range_only()),
            heads: shape.heads as u32,
            group: shape.group() as u32,
            value_dim: shape.value_dim as u32,
            tiles,
            width: Width::of(in_fours(self.matrix) && in_fours(v)),
            store: Width::of(in_fours(out)),
        };
        call.dispatch(matmul::plan::grid(tiles, product), self.device)
    }

    /// Returns the dispatch that writes the caller's weights, if the matrix is in scratch.
    fn average_weights(&self, out: TensorView<'a>) -> Dispatch<'a> {
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
