//! The dispatches of a call. Compressed attention and the selection of blocks go over spans of
//! queries. Selected attention, the window and the gated sum follow.

use super::call::NativeSparseBranches;
use super::config::NativeSparseConfig;
use super::kernels::block_means::BlockMeansCall;
use super::kernels::block_scores::{self, BlockScoresCall};
use super::kernels::gated_sum::GatedSumCall;
use crate::attention::dispatch::{
    self as attention, AddedGradients, BackwardProblem, Extras, Keys, backward,
};
use crate::attention::scale_in_f32;
use crate::device::DeviceFacts;
use crate::kernel::pieces::Fours;
use crate::kernel::{
    Algorithm, Dispatch, Dispatches, KernelOptions, MatrixUnits, Scratch, ScratchSize, Slot, Width, fits,
    in_scratch,
};
use crate::mask::{DeviceMask, MaskMod};
use crate::rows::elementwise::dispatch::ElementwiseOp;
use crate::rows::logits::dispatch::TopKProblem;
use crate::selected::dispatch::{SelectedBackwardProblem, SelectedProblem, Selection};
use crate::selected::plan::SelectedPlan;
use crate::selected::span::{Span, spans};
use crate::tensor::{DType, Error, Layout, Shape, TensorView, count};

/// The elements of scores of compressed keys that a span of queries may have: 64 MiB.
const SPAN: usize = 16 << 20;

/// The queries of a tile. Spans are multiples of it.
const TILE: usize = 16;

/// The branches of a call.
pub(super) const BRANCHES: usize = 3;
const COMPRESSED: usize = 0;
const SELECTED: usize = 1;
const WINDOW: usize = 2;

/// A query sees the compressed blocks that are complete at its position.
const COMPLETE: &str = "struct Uniforms { length: u32, stride: u32, past: u32 }
fn mask_mod(at: At) -> bool {
    return at.key * uniforms().stride + uniforms().length <= at.query + uniforms().past;
}";

/// Checked tensors of a call.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a> {
    pub shape: Shape,
    pub config: NativeSparseConfig,
    pub q: TensorView<'a>,
    pub k: TensorView<'a>,
    pub v: TensorView<'a>,
    pub gates: TensorView<'a>,
    /// Separate keys and values.
    pub compressed: Option<[TensorView<'a>; 2]>,
    pub window: Option<[TensorView<'a>; 2]>,
    pub branches: Option<NativeSparseBranches<'a>>,
}

/// The tensors of a backward call.
#[derive(Clone, Copy)]
pub(super) struct Gradients<'a> {
    pub d_out: TensorView<'a>,
    pub d_q: Option<TensorView<'a>>,
    pub d_k: Option<TensorView<'a>>,
    pub d_v: Option<TensorView<'a>>,
    pub d_gates: Option<TensorView<'a>>,
    pub d_compressed: Option<[TensorView<'a>; 2]>,
    pub d_window: Option<[TensorView<'a>; 2]>,
    pub accumulates: bool,
}

impl Gradients<'_> {
    fn of_keys(&self) -> bool {
        self.d_k.is_some() || self.d_v.is_some()
    }

    fn of_branches(&self) -> bool {
        let own = self.d_compressed.is_some() || self.d_window.is_some();
        self.d_q.is_some() || self.of_keys() || own
    }
}

/// A gradient, and whether it is added to what is there.
type Target<'a> = Option<(TensorView<'a>, bool)>;

/// The part of a tensor for a branch.
fn of_branch(t: TensorView<'_>, branch: usize) -> TensorView<'_> {
    let batch = t.shape()[0] / BRANCHES;
    t.slice(0, branch * batch, batch)
}

/// True if one stride leads from every head to the next, over batch entries too.
fn has_even_heads(t: &TensorView) -> bool {
    let ([batch, heads, ..], [of_batch, of_head, ..]) = (t.shape(), t.strides());
    batch == 1 || of_batch == heads * of_head
}

/// The queries of a span, with each key/value head as a batch entry.
fn by_kv_head<'a>(t: TensorView<'a>, kv_heads: usize) -> TensorView<'a> {
    let Layout { shape: [batch, heads, length, dim], strides: [_, h, i, d], offset } = t.layout;
    let group = heads / kv_heads;
    let layout =
        Layout { shape: [batch * kv_heads, group, length, dim], strides: [group * h, h, i, d], offset };
    TensorView { layout, ..t }
}

fn in_fours(tensors: &[TensorView]) -> Width {
    Width::of(tensors.iter().all(|t| t.layout.in_fours(3)))
}

fn copy<'a>(from: TensorView<'a>, to: TensorView<'a>, device: &DeviceFacts) -> Dispatch<'a> {
    ElementwiseOp { activation: None, x: from, multiply: None, residual: None }.forward(to, device)
}

impl<'a> Problem<'a> {
    fn dtype(&self) -> DType {
        self.config.attention.dtype
    }

    fn options(&self) -> KernelOptions {
        self.config.attention.kernel_options
    }

    /// The position of the first query.
    fn first_position(&self) -> usize {
        self.shape.kv_len - self.shape.q_len
    }

    /// The shape of attention to the compressed keys.
    fn compressed_shape(&self) -> Shape {
        Shape { kv_len: self.config.compressed_len(self.shape.kv_len), ..self.shape }
    }

    /// The shapes of a tensor for all branches, of the indices, and of compressed keys and values.
    fn branch_shape(&self, dim: usize) -> [usize; 4] {
        [BRANCHES * self.shape.batch, self.shape.heads, self.shape.q_len, dim]
    }

    fn indices_shape(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.kv_heads, self.shape.q_len, self.config.count]
    }

    /// The results of the branches: the caller's tensors, or scratch.
    fn results(&self, part: &impl Fn(Slot) -> &'a wgpu::Buffer) -> NativeSparseBranches<'a> {
        self.branches.unwrap_or_else(|| NativeSparseBranches {
            out: in_scratch(
                part(Slot::BranchOutputs),
                self.dtype(),
                self.branch_shape(self.shape.value_dim),
                0,
            ),
            lse: in_scratch(part(Slot::BranchLse), DType::F32, self.branch_shape(1), 0),
            indices: in_scratch(part(Slot::BlockIndices), DType::U32, self.indices_shape(), 0),
        })
    }

    /// The compressed keys and values: the caller's tensors, or scratch.
    fn compressed(&self, part: &impl Fn(Slot) -> &'a wgpu::Buffer) -> [TensorView<'a>; 2] {
        let shape = self.compressed_shape();
        self.compressed.unwrap_or_else(|| {
            let of = |slot, shape| in_scratch(part(slot), self.dtype(), shape, 0);
            [of(Slot::CompressedKeys, shape.k()), of(Slot::CompressedValues, shape.v())]
        })
    }

    /// Writes means of blocks to `out`, or with `backward` the gradient of the rows.
    fn means(
        &self,
        x: TensorView<'a>,
        out: TensorView<'a>,
        [backward, accumulates]: [bool; 2],
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let NativeSparseConfig { length, stride, .. } = self.config;
        let [batch, heads, _, dim] = out.shape();
        let Fours { each, work, groups, step } = Fours::of(out.shape(), device);
        let call = BlockMeansCall {
            x,
            out,
            terms: x.shape()[2] as u32,
            length: length as u32,
            stride: stride as u32,
            dim: dim as u32,
            fours: each as u32,
            work: work as u32,
            step,
            scale: 1.0 / length as f32,
            backward,
            accumulates,
            width: in_fours(&[x, out]),
        };
        call.dispatch([groups, heads, batch], device)
    }

    /// Writes the compressed keys and values, unless the caller has them.
    fn compress(&self, to: [TensorView<'a>; 2], device: &DeviceFacts) -> Dispatches<'a> {
        if self.compressed.is_some() {
            return Dispatches::new();
        }
        [(self.k, to[0]), (self.v, to[1])].map(|(x, out)| self.means(x, out, [false; 2], device)).into()
    }

    /// The mask of compressed keys for queries from `first` on.
    fn complete(&self, first: usize) -> Result<DeviceMask<'a>, Error> {
        let past = self.first_position() + first + 1;
        let words = [self.config.length, self.config.stride, past].map(|n| n as u32);
        let complete = MaskMod::new(COMPLETE)?.uniforms(bytemuck::cast_slice(&words));
        Ok(DeviceMask::none().mask_mod(complete))
    }

    fn window_mask(&self) -> DeviceMask<'a> {
        DeviceMask::causal().window(self.config.window - 1, 0)
    }

    fn attention(
        &self,
        shape: Shape,
        q: TensorView<'a>,
        [k, v]: [TensorView<'a>; 2],
        extras: Extras<'a>,
        kernel_options: KernelOptions,
    ) -> attention::Problem<'a> {
        attention::Problem {
            shape,
            q,
            keys: Keys::Tensors { k, v },
            extras,
            scale: scale_in_f32(self.config.attention.scale, shape.head_dim),
            softcap: self.config.attention.softcap.map(|c| c as f32),
            score_vector: None,
            lists: None,
            kernel_options,
        }
    }

    fn extras(&self, results: &NativeSparseBranches<'a>, branch: usize, mask: DeviceMask<'a>) -> Extras<'a> {
        Extras {
            out: of_branch(results.out, branch),
            mask,
            appended: 0,
            lse: Some(of_branch(results.lse, branch)),
            weights: None,
            scores: None,
            dropout: None,
        }
    }

    /// Spans of queries, whose scores of compressed keys fit in scratch.
    fn spans(
        &self,
        results: &NativeSparseBranches,
        compressed: &[TensorView; 2],
        device: &DeviceFacts,
    ) -> Vec<Span> {
        let Shape { batch, heads, q_len, kv_len, .. } = self.compressed_shape();
        let limit = (SPAN as u64).min(device.max_binding_bytes / 4) as usize;
        let scores = heads.saturating_mul(kv_len.next_multiple_of(4));
        let blocks = self.shape.kv_len.div_ceil(self.config.block).next_multiple_of(4);
        let most = limit / scores.max(self.shape.kv_heads.saturating_mul(blocks));
        let [k, v] = compressed;
        // Then the heads of several entries are the batch entries of one call.
        if [&self.q, k, v, &results.out, &results.lse].into_iter().all(has_even_heads) {
            return spans([batch, q_len], most, TILE);
        }
        let of_entry =
            |b| spans([1, q_len], most, TILE).into_iter().map(move |span| Span { batch: [b, 1], ..span });
        (0..batch).flat_map(of_entry).collect()
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

    /// The mean weights of compressed keys over the heads that share keys, and the scores of
    /// blocks.
    fn weights(&self, span: &Span, buffer: &'a wgpu::Buffer) -> TensorView<'a> {
        let seen = self.seen(span);
        let rows = [span.batch[1] * self.shape.kv_heads, 1, span.queries[1], seen.next_multiple_of(4)];
        in_scratch(buffer, DType::F32, rows, 0).slice(3, 0, seen)
    }

    fn scores(&self, span: &Span, buffer: &'a wgpu::Buffer) -> TensorView<'a> {
        let columns = self.columns(span);
        let heads = self.shape.kv_heads;
        let rows = [span.batch[1], heads, span.queries[1], columns.next_multiple_of(4)];
        in_scratch(buffer, DType::F32, rows, 0).slice(3, 0, columns)
    }

    /// Attention of a span to the compressed keys.
    fn compressed_attention(
        &self,
        span: &Span,
        results: &NativeSparseBranches<'a>,
        compressed: [TensorView<'a>; 2],
        weights: TensorView<'a>,
    ) -> Result<attention::Problem<'a>, Error> {
        let Shape { heads, kv_heads, .. } = self.shape;
        let seen = self.seen(span);
        let own = |t| by_kv_head(span.of(t), kv_heads);
        let keys = compressed.map(|t| by_kv_head(span.of_batch(t), kv_heads).slice(2, 0, seen));
        let extras = self.extras(results, COMPRESSED, self.complete(span.queries[0])?);
        let extras =
            Extras { out: own(extras.out), lse: extras.lse.map(own), weights: Some(weights), ..extras };
        let shape = Shape {
            batch: span.batch[1] * kv_heads,
            heads: heads / kv_heads,
            kv_heads: 1,
            q_len: span.queries[1],
            kv_len: seen,
            ..self.shape
        };
        // Only the staged path stores weights, and it has no matrix units.
        let mut options = KernelOptions { algorithm: Algorithm::Staged, ..self.options() };
        if options.matrix_units == MatrixUnits::Always {
            options.matrix_units = MatrixUnits::Auto;
        }
        Ok(self.attention(shape, own(self.q), keys, extras, options))
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
            strides_each: (block / stride) as u32,
            strides_wide: (length / stride) as u32,
            initial: initial as u32,
            local: local as u32,
            compressed: compressed as u32,
            columns: columns as u32,
            inf: f32::INFINITY,
            neg_inf: f32::NEG_INFINITY,
        };
        call.dispatch([columns.div_ceil(block_scores::WORKGROUP as usize), queries, rows], device)
    }

    fn selection(&self, indices: TensorView<'a>, device: &DeviceFacts) -> Selection<'a> {
        let NativeSparseConfig { block, count, .. } = self.config;
        let plan = SelectedPlan::new(self.shape, [self.shape.kv_heads, count], [block, 0], device);
        let cpu = self.options().target.is_cpu(device);
        Selection { indices, mask: DeviceMask::causal(), layer: None, plan, cpu }
    }

    fn selected(&self, results: &NativeSparseBranches<'a>, device: &DeviceFacts) -> SelectedProblem<'a> {
        let extras = self.extras(results, SELECTED, DeviceMask::causal());
        // Only the fused kernels read lists.
        let options = KernelOptions { algorithm: Algorithm::Fused, ..self.options() };
        let problem = self.attention(self.shape, self.q, [self.k, self.v], extras, options);
        SelectedProblem { selection: self.selection(results.indices, device), problem, weights: None }
    }

    fn window(&self, results: &NativeSparseBranches<'a>) -> attention::Problem<'a> {
        let extras = self.extras(results, WINDOW, self.window_mask());
        let keys = self.window.unwrap_or([self.k, self.v]);
        self.attention(self.shape, self.q, keys, extras, self.options())
    }

    /// The memory of compressed keys that the caller does not have.
    fn compressed_size(&self, size: ScratchSize, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        if self.compressed.is_some() {
            return Ok(size);
        }
        let shape = self.compressed_shape();
        let of = |shape| fits(elements(shape), self.dtype().bytes() as u64, device);
        Ok(size.with(Slot::CompressedKeys, of(shape.k())?).with(Slot::CompressedValues, of(shape.v())?))
    }

    /// The temporary memory of a forward call.
    pub fn scratch_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        // There is no scratch yet, so any buffer replaces it: only layouts matter.
        let any = |_| self.q.buffer;
        let (results, compressed) = (self.results(&any), self.compressed(&any));
        let (mut size, mut weight_bytes, mut score_bytes) = (ScratchSize::default(), 0, 0);
        for span in self.spans(&results, &compressed, device) {
            let rows = span.rows() as u64 * self.shape.kv_heads as u64;
            let of =
                |columns: usize| fits(rows.saturating_mul(columns.next_multiple_of(4) as u64), 4, device);
            weight_bytes = of(self.seen(&span))?.max(weight_bytes);
            score_bytes = of(self.columns(&span))?.max(score_bytes);
            let weights = self.weights(&span, self.q.buffer);
            let problem = self.compressed_attention(&span, &results, compressed, weights)?;
            size = size.max(attention::choose(&problem.outline(), device)?.scratch_size());
        }
        size = size.max(self.selected(&results, device).scratch_size(device)?);
        size = size.max(attention::choose(&self.window(&results).outline(), device)?.scratch_size());
        size = size.with(Slot::BlockWeights, weight_bytes).with(Slot::BlockScores, score_bytes);
        if self.branches.is_none() {
            let outs = self.branch_shape(self.shape.value_dim);
            size = size
                .with(Slot::BranchOutputs, fits(elements(outs), self.dtype().bytes() as u64, device)?)
                .with(Slot::BranchLse, fits(elements(self.branch_shape(1)), 4, device)?)
                .with(Slot::BlockIndices, fits(elements(self.indices_shape()), 4, device)?);
        }
        self.compressed_size(size, device)
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
            all.extend(chosen(&problem, scratch, device)?);
            all.push(self.block_scores(&span, weights, scores, device));
            let top = TopKProblem {
                x: scores,
                values: None,
                indices: span.of(results.indices),
                skips_neg_inf: true,
            };
            all.extend(top.dispatches(None, &self.options(), device));
        }
        all.extend(self.selected(&results, device).dispatches(scratch, device)?);
        all.extend(chosen(&self.window(&results), scratch, device)?);
        let Fours { each, work, groups, step } = Fours::of(out.shape(), device);
        let [batch, heads, _, dim] = out.shape();
        let sum = GatedSumCall {
            branches: results.out,
            gates: self.gates,
            out,
            batch: batch as u32,
            dim: dim as u32,
            fours: each as u32,
            work: work as u32,
            step,
            width: in_fours(&[results.out, out]),
        };
        all.push(sum.dispatch([groups, heads, batch], device));
        Ok(all)
    }

    /// The backward pass of a branch. Gradients that are added are a problem apart from those that
    /// are not.
    fn branch_backward(
        &self,
        (results, d_out): (&NativeSparseBranches<'a>, TensorView<'a>),
        branch: usize,
        [k, v]: [TensorView<'a>; 2],
        mask: DeviceMask<'a>,
        targets: [Target<'a>; 3],
    ) -> Vec<BackwardProblem<'a>> {
        let of = |adds: bool| {
            let [d_q, d_k, d_v] =
                targets.map(|target| Some(target?.0).filter(|_| target.is_some_and(|t| t.1 == adds)));
            let is_empty = [d_q, d_k, d_v].iter().all(Option::is_none);
            (!is_empty).then(|| BackwardProblem {
                shape: Shape { kv_len: k.shape()[2], ..self.shape },
                appended: 0,
                q: self.q,
                k,
                v,
                out: of_branch(results.out, branch),
                lse: of_branch(results.lse, branch),
                d_out: of_branch(d_out, branch),
                d_lse: None,
                d_q,
                d_k,
                d_v,
                d_added: AddedGradients::default(),
                accumulates: adds,
                adds_to_added: false,
                mask,
                dropout: None,
                partial: false,
                lists: None,
                scale: scale_in_f32(self.config.attention.scale, self.shape.head_dim),
                softcap: self.config.attention.softcap.map(|c| c as f32),
                kernel_options: self.options(),
            })
        };
        [of(false), of(true)].into_iter().flatten().collect()
    }

    /// The sums of gradients over branches: the caller's tensors, or scratch if those are not F32.
    fn sums(
        &self,
        gradients: &Gradients<'a>,
        part: &impl Fn(Slot) -> &'a wgpu::Buffer,
    ) -> [Option<TensorView<'a>>; 3] {
        self.wanted(gradients).map(|(target, slot)| {
            let target = target?;
            let is_own = target.dtype() == DType::F32;
            Some(if is_own { target } else { in_scratch(part(slot), DType::F32, target.shape(), 0) })
        })
    }

    fn wanted(&self, gradients: &Gradients<'a>) -> [(Option<TensorView<'a>>, Slot); 3] {
        [
            (gradients.d_q, Slot::QuerySums),
            (gradients.d_k, Slot::BranchKeySums),
            (gradients.d_v, Slot::BranchValueSums),
        ]
    }

    /// The gradients of compressed keys and values: the caller's tensors, or scratch if they are
    /// means.
    fn d_compressed(
        &self,
        gradients: &Gradients<'a>,
        part: &impl Fn(Slot) -> &'a wgpu::Buffer,
    ) -> [Target<'a>; 2] {
        if self.compressed.is_some() {
            let own = gradients.d_compressed.map(|of| of.map(|t| Some((t, gradients.accumulates))));
            return own.unwrap_or_default();
        }
        let shape = self.compressed_shape();
        let of =
            |wanted: bool, slot, shape| wanted.then(|| (in_scratch(part(slot), DType::F32, shape, 0), false));
        [
            of(gradients.d_k.is_some(), Slot::CompressedKeyGradients, shape.k()),
            of(gradients.d_v.is_some(), Slot::CompressedValueGradients, shape.v()),
        ]
    }

    fn d_branches(&self, part: &impl Fn(Slot) -> &'a wgpu::Buffer) -> TensorView<'a> {
        let shape = self.branch_shape(self.shape.value_dim);
        in_scratch(part(Slot::BranchGradients), self.dtype(), shape, 0)
    }

    /// The backward passes of the branches. Selected attention is first, so that it writes what the
    /// others add to.
    fn passes(
        &self,
        gradients: &Gradients<'a>,
        results: &NativeSparseBranches<'a>,
        part: &impl Fn(Slot) -> &'a wgpu::Buffer,
        device: &DeviceFacts,
    ) -> Result<(Option<SelectedBackwardProblem<'a>>, Vec<BackwardProblem<'a>>), Error> {
        let of = (results, self.d_branches(part));
        let sums = self.sums(gradients, part);
        // Scratch has the previous values too.
        let targets = sums.map(|sum| Some((sum?, gradients.accumulates)));
        let keys = [self.k, self.v];
        let problem = self.branch_backward(of, SELECTED, keys, DeviceMask::causal(), targets).pop();
        let selected = problem.map(|mut problem| {
            problem.kernel_options.algorithm = Algorithm::Fused;
            let mut selection = self.selection(results.indices, device);
            selection.plan.with_bitmap = gradients.of_keys();
            let mut selected = SelectedBackwardProblem { selection, problem, latent: false };
            selected.selection.plan.extra_bytes = selected.term_bytes();
            selected
        });
        let [d_q, d_k, d_v] = sums.map(|sum| Some((sum?, true)));
        let (keys, of_keys) = match self.window {
            None => (keys, [d_k, d_v]),
            Some(own) => {
                let d_own = gradients.d_window.map(|of| of.map(|t| Some((t, gradients.accumulates))));
                (own, d_own.unwrap_or_default())
            }
        };
        let [of_k, of_v] = of_keys;
        let mut all = self.branch_backward(of, WINDOW, keys, self.window_mask(), [d_q, of_k, of_v]);
        let [of_k, of_v] = self.d_compressed(gradients, part);
        let keys = self.compressed(part);
        all.extend(self.branch_backward(of, COMPRESSED, keys, self.complete(0)?, [d_q, of_k, of_v]));
        Ok((selected, all))
    }

    /// The temporary memory of a backward call.
    pub fn backward_scratch_size(
        &self,
        gradients: &Gradients<'a>,
        device: &DeviceFacts,
    ) -> Result<ScratchSize, Error> {
        let mut size = ScratchSize::default();
        if !gradients.of_branches() {
            return Ok(size);
        }
        let any = |_| self.q.buffer;
        let results = self.results(&any);
        let (selected, problems) = self.passes(gradients, &results, &any, device)?;
        if let Some(selected) = selected {
            size = size.max(selected.scratch_size(device)?);
        }
        for problem in problems {
            size = size.max(backward::plan(&problem, device)?.scratch_size());
        }
        let outs = self.branch_shape(self.shape.value_dim);
        size = size.with(Slot::BranchGradients, fits(elements(outs), self.dtype().bytes() as u64, device)?);
        for (target, slot) in self.wanted(gradients) {
            if let Some(target) = target.filter(|t| t.dtype() != DType::F32) {
                size = size.with(slot, fits(elements(target.shape()), 4, device)?);
            }
        }
        if self.compressed.is_none() {
            let shape = self.compressed_shape();
            let parts = [
                (gradients.d_k, Slot::CompressedKeyGradients, shape.k()),
                (gradients.d_v, Slot::CompressedValueGradients, shape.v()),
            ];
            for (_, slot, shape) in parts.into_iter().filter(|(wanted, ..)| wanted.is_some()) {
                size = size.with(slot, fits(elements(shape), 4, device)?);
            }
        }
        self.compressed_size(size, device)
    }

    /// Writes the gradients of the gates and of the branches' outputs.
    fn d_gates(
        &self,
        gradients: &Gradients<'a>,
        results: &NativeSparseBranches<'a>,
        d_branches: Option<TensorView<'a>>,
        device: &DeviceFacts,
    ) -> Dispatches<'a> {
        let mut all = Dispatches::new();
        for branch in 0..BRANCHES {
            let gate = |t: TensorView<'a>| t.slice(3, branch, 1);
            let product = ElementwiseOp {
                activation: None,
                x: gate(self.gates),
                multiply: Some(of_branch(results.out, branch)),
                residual: None,
            };
            let d_branch = d_branches.map(|t| of_branch(t, branch));
            let d_gate = gradients.d_gates.map(gate);
            let mut add = |d_gate: Option<_>, d_branch: Option<_>, accumulates| {
                if d_gate.is_some() || d_branch.is_some() {
                    all.push(product.backward(gradients.d_out, d_gate, d_branch, accumulates, device));
                }
            };
            if gradients.accumulates {
                add(d_gate, None, true);
                add(None, d_branch, false);
            } else {
                add(d_gate, d_branch, false);
            }
        }
        all
    }

    /// The dispatches of a backward call.
    pub fn backward(
        &self,
        gradients: &Gradients<'a>,
        scratch: &'a Scratch,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        scratch.check(self.backward_scratch_size(gradients, device)?)?;
        let part = |slot| scratch.buffer(slot).unwrap_or(self.q.buffer);
        let results = self.results(&part);
        if !gradients.of_branches() {
            return Ok(self.d_gates(gradients, &results, None, device));
        }
        let mut all = self.d_gates(gradients, &results, Some(self.d_branches(&part)), device);
        let sums = self.sums(gradients, &part);
        let copied = self.wanted(gradients).into_iter().zip(sums);
        let copied: Vec<_> = copied
            .filter_map(|((target, _), sum)| Some((target?, sum?)))
            .filter(|(target, _)| target.dtype() != DType::F32)
            .collect();
        if gradients.accumulates {
            all.extend(copied.iter().map(|(target, sum)| copy(*target, *sum, device)));
        }
        all.extend(self.compress(self.compressed(&part), device));
        let (selected, problems) = self.passes(gradients, &results, &part, device)?;
        if let Some(selected) = selected {
            all.extend(selected.dispatches(scratch, device)?);
        }
        for problem in problems {
            let plans = backward::plan(&problem, device)?;
            all.extend(backward::dispatches(&problem, &plans, plans.memory(scratch)?, device));
        }
        if self.compressed.is_none() {
            let [_, d_k, d_v] = sums;
            for (of_means, sum) in self.d_compressed(gradients, &part).into_iter().zip([d_k, d_v]) {
                if let (Some((of_means, _)), Some(sum)) = (of_means, sum) {
                    all.push(self.means(of_means, sum, [true; 2], device));
                }
            }
        }
        all.extend(copied.iter().map(|(target, sum)| copy(*sum, *target, device)));
        Ok(all)
    }
}

fn elements(shape: [usize; 4]) -> u64 {
    count(shape) as u64
}

/// The dispatches of attention on the chosen path.
fn chosen<'a>(
    problem: &attention::Problem<'a>,
    scratch: &'a Scratch,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    let chosen = attention::choose(&problem.outline(), device)?;
    Ok(attention::dispatches(problem, chosen, chosen.memory(scratch)?, device))
}
