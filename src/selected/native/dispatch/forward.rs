//! The dispatches of a forward call. Compressed attention and the selection of blocks go over spans
//! of queries. Selected attention, the window and the gated sum follow.

use super::problem::{COMPRESSED, NativeSparseProblem, SELECTED, WINDOW, bytes};
use crate::attention::dispatch::{self as attention, Extras, Keys, Problem};
use crate::device::DeviceFacts;
use crate::kernel::vec4_grid::Vec4Grid;
use crate::kernel::{
    Algorithm, Dispatch, Dispatches, KernelOptions, MatrixUnits, Scratch, ScratchSize, Slot, Width,
    in_scratch,
};
use crate::mask::DeviceMask;
use crate::rows::logits::dispatch::TopKProblem;
use crate::selected::dispatch::SelectedProblem;
use crate::selected::native::call::NativeSparseBranches;
use crate::selected::native::config::NativeSparseConfig;
use crate::selected::native::kernels::block_scores::{self, BlockScoresCall};
use crate::selected::native::kernels::gated_sum::GatedSumCall;
use crate::selected::span::{Span, spans, spans_by_entry};
use crate::tensor::{DType, Error, Layout, Shape, TensorView};

/// The elements of scores that a span of queries may have: 64 MiB.
const SPAN: u64 = 16 << 20;

/// The queries of a tile. Spans are multiples of it.
const TILE: usize = 16;

/// True if one stride leads from every head to the next, over batch entries too.
fn has_even_heads(t: &TensorView) -> bool {
    let ([batch, heads, ..], [of_batch, of_head, ..]) = (t.shape(), t.strides());
    batch == 1 || of_batch == heads * of_head
}

/// The view in which each key/value head is a batch entry.
fn by_kv_head(t: TensorView<'_>, kv_heads: usize) -> TensorView<'_> {
    let Layout { shape: [batch, heads, length, dim], strides: [_, h, i, d], offset } = t.layout;
    let group = heads / kv_heads;
    let layout =
        Layout { shape: [batch * kv_heads, group, length, dim], strides: [group * h, h, i, d], offset };
    TensorView { layout, ..t }
}

/// The dispatches of attention.
fn dispatches_of<'a>(
    problem: &Problem<'a>,
    scratch: &'a Scratch,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    let chosen = attention::choose(&problem.outline(), device)?;
    Ok(attention::dispatches(problem, chosen, chosen.memory(scratch)?, device))
}

impl<'a> NativeSparseProblem<'a> {
    /// Spans of queries, whose scores of compressed keys and of blocks fit in scratch.
    fn spans(
        &self,
        results: &NativeSparseBranches,
        compressed: &[TensorView; 2],
        device: &DeviceFacts,
    ) -> Vec<Span> {
        let Shape { batch, heads, kv_heads, q_len, kv_len, .. } = self.shape;
        let columns = [self.compressed_shape().kv_len, kv_len.div_ceil(self.config.block)];
        let [scores, blocks] = columns.map(|columns| columns.next_multiple_of(4));
        let row = heads.saturating_mul(scores).max(kv_heads.saturating_mul(blocks));
        let most = SPAN.min(device.max_binding_bytes / 4) as usize / row;
        let [k, v] = compressed;
        // Then the heads of several entries are the batch entries of one call.
        match [&self.q, k, v, &results.out, &results.lse].into_iter().all(has_even_heads) {
            true => spans([batch, q_len], most, TILE),
            false => spans_by_entry([batch, q_len], most, TILE),
        }
    }

    /// The position after the last query of a span.
    fn end(&self, span: &Span) -> usize {
        self.first_position() + span.queries[0] + span.queries[1]
    }

    /// Compressed keys that a query of a span sees, at least 1.
    fn seen(&self, span: &Span) -> usize {
        self.config.visible(self.end(span) - 1).clamp(1, self.compressed_shape().kv_len)
    }

    /// Blocks that a query of a span may select.
    fn columns(&self, span: &Span) -> usize {
        self.end(span).div_ceil(self.config.block)
    }

    /// A row of `columns` numbers for each query and key/value head of a span.
    fn rows(&self, span: &Span, columns: usize) -> [usize; 4] {
        [span.batch[1], self.shape.kv_heads, span.queries[1], columns.next_multiple_of(4)]
    }

    /// The mean weights of compressed keys over the heads that share keys.
    fn weights(&self, span: &Span, buffer: &'a wgpu::Buffer) -> TensorView<'a> {
        let seen = self.seen(span);
        let rows = in_scratch(buffer, DType::F32, self.rows(span, seen), 0).slice(3, 0, seen);
        by_kv_head(rows, self.shape.kv_heads)
    }

    fn scores(&self, span: &Span, buffer: &'a wgpu::Buffer) -> TensorView<'a> {
        let columns = self.columns(span);
        in_scratch(buffer, DType::F32, self.rows(span, columns), 0).slice(3, 0, columns)
    }

    /// Attention of a span to the compressed keys.
    fn compressed_attention(
        &self,
        span: &Span,
        results: &NativeSparseBranches<'a>,
        compressed: [TensorView<'a>; 2],
        weights: TensorView<'a>,
    ) -> Result<Problem<'a>, Error> {
        let Shape { heads, kv_heads, .. } = self.shape;
        let seen = self.seen(span);
        let rows = |t| by_kv_head(span.of(t), kv_heads);
        let [k, v] = compressed.map(|t| by_kv_head(span.of_batch(t), kv_heads).slice(2, 0, seen));
        let mask = self.complete_blocks(span.queries[0])?;
        let whole = self.attention(results, COMPRESSED, compressed, mask);
        let Extras { out, lse, .. } = whole.extras;
        // Only the staged path stores weights, and it has no matrix units.
        let mut kernel_options = KernelOptions { algorithm: Algorithm::Staged, ..whole.kernel_options };
        if kernel_options.matrix_units == MatrixUnits::Always {
            kernel_options.matrix_units = MatrixUnits::Auto;
        }
        Ok(Problem {
            shape: Shape {
                batch: span.batch[1] * kv_heads,
                heads: heads / kv_heads,
                kv_heads: 1,
                q_len: span.queries[1],
                kv_len: seen,
                ..self.shape
            },
            q: rows(self.q),
            keys: Keys::Tensors { k, v },
            extras: Extras { out: rows(out), lse: lse.map(rows), weights: Some(weights), ..whole.extras },
            kernel_options,
            ..whole
        })
    }

    fn block_scores(
        &self,
        span: &Span,
        weights: TensorView<'a>,
        scores: TensorView<'a>,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let NativeSparseConfig { length, stride, block, initial, local, .. } = self.config;
        let columns = scores.shape()[3];
        let [rows, _, queries, compressed] = weights.shape();
        let call = BlockScoresCall {
            weights,
            scores: by_kv_head(scores, self.shape.kv_heads),
            position: (self.end(span) - span.queries[1]) as u32,
            block: block as u32,
            block_strides: (block / stride) as u32,
            compressed_strides: (length / stride) as u32,
            initial: initial as u32,
            local: local as u32,
            compressed: compressed as u32,
            columns: columns as u32,
            inf: f32::INFINITY,
            neg_inf: f32::NEG_INFINITY,
        };
        call.dispatch([columns.div_ceil(block_scores::WORKGROUP as usize), queries, rows], device)
    }

    fn selected(&self, results: &NativeSparseBranches<'a>, device: &DeviceFacts) -> SelectedProblem<'a> {
        let mut problem = self.attention(results, SELECTED, [self.k, self.v], DeviceMask::causal());
        // Only the fused kernels read lists.
        problem.kernel_options.algorithm = Algorithm::Fused;
        SelectedProblem { selection: self.selection(results.indices, device), problem, weights: None }
    }

    fn window_attention(&self, results: &NativeSparseBranches<'a>) -> Problem<'a> {
        self.attention(results, WINDOW, self.window_keys(), self.window_mask())
    }

    /// The temporary memory of a forward call.
    pub fn scratch_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        // There is no scratch yet, so any buffer replaces it: only layouts matter.
        let any = |_| self.q.buffer;
        let (results, compressed) = (self.results(&any), self.compressed(&any));
        let (mut size, mut weight_bytes, mut score_bytes) = (ScratchSize::default(), 0, 0);
        for span in self.spans(&results, &compressed, device) {
            let of = |columns| bytes(self.rows(&span, columns), DType::F32, device);
            weight_bytes = of(self.seen(&span))?.max(weight_bytes);
            score_bytes = of(self.columns(&span))?.max(score_bytes);
            let weights = self.weights(&span, self.q.buffer);
            let problem = self.compressed_attention(&span, &results, compressed, weights)?;
            size = size.max(attention::choose(&problem.outline(), device)?.scratch_size());
        }
        size = size.max(self.selected(&results, device).scratch_size(device)?);
        size =
            size.max(attention::choose(&self.window_attention(&results).outline(), device)?.scratch_size());
        size = size.with(Slot::BlockWeights, weight_bytes).with(Slot::BlockScores, score_bytes);
        if self.branches.is_none() {
            size = size
                .with(Slot::BranchOutputs, bytes(self.out_shape(), self.dtype(), device)?)
                .with(Slot::BranchLse, bytes(self.branch_shape(1), DType::F32, device)?)
                .with(Slot::BlockIndices, bytes(self.indices_shape(), DType::U32, device)?);
        }
        self.with_compressed(size, device)
    }

    /// The dispatches of a forward call, which writes `out`.
    pub fn forward(
        &self,
        out: TensorView<'a>,
        scratch: &'a Scratch,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        scratch.check(self.scratch_size(device)?)?;
        let part = |slot| scratch.buffer(slot).unwrap_or(self.q.buffer);
        let (results, compressed) = (self.results(&part), self.compressed(&part));
        let mut all = self.compress(compressed, device);
        for span in self.spans(&results, &compressed, device) {
            let weights = self.weights(&span, part(Slot::BlockWeights));
            let scores = self.scores(&span, part(Slot::BlockScores));
            let problem = self.compressed_attention(&span, &results, compressed, weights)?;
            all.extend(dispatches_of(&problem, scratch, device)?);
            all.push(self.block_scores(&span, weights, scores, device));
            let best = TopKProblem {
                x: scores,
                values: None,
                indices: span.of(results.indices),
                skips_neg_inf: true,
            };
            all.extend(best.dispatches(None, &self.kernel_options(), device));
        }
        all.extend(self.selected(&results, device).dispatches(scratch, device)?);
        all.extend(dispatches_of(&self.window_attention(&results), scratch, device)?);
        let grid = Vec4Grid::of(out.shape(), device);
        let sum = GatedSumCall {
            branches: results.out,
            gates: self.gates,
            out,
            batch: self.shape.batch as u32,
            dim: self.shape.value_dim as u32,
            fours: grid.in_row,
            work: grid.in_head,
            step: grid.step,
            width: Width::of_rows(&[results.out, out]),
        };
        all.push(sum.dispatch(grid.workgroups, device));
        Ok(all)
    }
}
