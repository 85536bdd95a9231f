//! Dispatches of an indexer, from checked tensors.

use super::kernels::indexer_d_keys::IndexerDKeysCall;
use super::kernels::indexer_d_queries::{CHUNK, IndexerDQueriesCall};
use super::kernels::indexer_ranges::{self, IndexerRangesCall};
use super::kernels::indexer_scatter::IndexerScatterCall;
use super::kernels::indexer_scores::{IndexerScoresCall, IndexerTiles};
use crate::device::DeviceFacts;
use crate::kernel::{
    Dispatch, Dispatches, KernelOptions, Scratch, ScratchSize, Slot, Width, fits, in_scratch,
};
use crate::mask::DeviceMask;
use crate::mask::kernels::{MaskParams, MaskVariant, Masked};
use crate::rows::logits::dispatch::{MOST_IN_PLACE, TopKProblem};
use crate::selected::span::{Span, spans};
use crate::tensor::{DType, Error, Shape, TensorView};

/// The elements that a span of queries may have in scratch: 64 MiB of scores.
const SPAN: usize = 16 << 20;

/// Checked tensors of a call.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a> {
    /// One head of keys. `heads` counts the heads of queries.
    pub shape: Shape,
    pub q: TensorView<'a>,
    /// Floats, or words if there are scales.
    pub k: TensorView<'a>,
    pub k_scales: Option<TensorView<'a>>,
    pub w: TensorView<'a>,
    pub mask: DeviceMask<'a>,
    pub scale: f32,
    pub kernel_options: KernelOptions,
}

/// The outputs of a forward call.
#[derive(Clone, Copy)]
pub(super) struct Outputs<'a> {
    pub indices: Option<TensorView<'a>>,
    pub values: Option<TensorView<'a>>,
    pub scores: Option<TensorView<'a>>,
}

/// The tensors of a backward call.
#[derive(Clone, Copy)]
pub(super) struct Gradients<'a> {
    pub d_scores: TensorView<'a>,
    pub indices: Option<TensorView<'a>>,
    pub d_q: Option<TensorView<'a>>,
    pub d_k: Option<TensorView<'a>>,
    pub d_w: Option<TensorView<'a>>,
}

fn slot_of(bytes: u64, slot: Slot, scratch: &Scratch) -> Result<Option<&wgpu::Buffer>, Error> {
    if bytes == 0 { Ok(None) } else { scratch.buffer(slot).map(Some) }
}

impl<'a> Problem<'a> {
    fn is_cpu(&self, device: &DeviceFacts) -> bool {
        self.kernel_options.target.is_cpu(device)
    }

    fn lanes(&self, device: &DeviceFacts) -> u32 {
        if self.is_cpu(device) { 8 } else { 64 }
    }

    fn tiles(&self, device: &DeviceFacts) -> IndexerTiles {
        let Shape { heads, q_len, kv_len, .. } = self.shape;
        IndexerTiles::of(heads, q_len, kv_len, self.is_cpu(device))
    }

    /// Spans whose rows have this many elements in scratch.
    fn spans(&self, elements: usize, device: &DeviceFacts) -> Vec<Span> {
        let most = device.max_workgroups as usize;
        let limit = (SPAN as u64).min(device.max_binding_bytes / 4) as usize;
        let rows = limit.checked_div(elements).unwrap_or(usize::MAX).min(most);
        let [tile, _] = self.tiles(device).size();
        spans([self.shape.batch, self.shape.q_len], rows, tile)
    }

    fn ranges_bytes(&self, device: &DeviceFacts) -> Result<u64, Error> {
        let Shape { batch, q_len, .. } = self.shape;
        fits((batch as u64).saturating_mul(q_len as u64).saturating_mul(2), 4, device)
    }

    /// Writes the range of keys of each query.
    fn ranges(&self, ranges: TensorView<'a>, device: &DeviceFacts) -> Dispatch<'a> {
        let shape = Shape { heads: 1, ..self.shape };
        let params = MaskParams::new(&self.mask, &shape, 0, None, device);
        let variant = MaskVariant::of(&self.mask, false, false);
        let mask = Masked::new(variant, &self.mask, params, device);
        let call = IndexerRangesCall { ranges, mask };
        call.dispatch([shape.q_len.div_ceil(indexer_ranges::WORKGROUP), shape.batch, 1], device)
    }

    fn ranges_in(&self, scratch: &'a Scratch) -> Result<TensorView<'a>, Error> {
        let Shape { batch, q_len, .. } = self.shape;
        let buffer = scratch.buffer(Slot::KeyRanges)?;
        Ok(in_scratch(buffer, DType::U32, [1, 1, 1, 2 * batch * q_len], 0))
    }

    fn forward_spans(&self, outputs: &Outputs, device: &DeviceFacts) -> Vec<Span> {
        let scores = if outputs.scores.is_some() { 0 } else { self.columns() };
        let k = outputs.indices.map_or(0, |indices| indices.shape()[3]);
        let pairs = if k > MOST_IN_PLACE { 4 * k } else { 0 };
        self.spans(scores.max(pairs), device)
    }

    /// The columns of scores in scratch: the keys, rounded up to whole vectors.
    fn columns(&self) -> usize {
        self.shape.kv_len.next_multiple_of(4)
    }

    /// The temporary memory of a forward call.
    pub fn scratch_size(&self, outputs: &Outputs, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let (mut scores, mut pairs) = (0, 0);
        for span in self.forward_spans(outputs, device) {
            let rows = span.rows();
            if outputs.scores.is_none() {
                scores = scores.max(fits((rows as u64).saturating_mul(self.columns() as u64), 4, device)?);
            }
            if let Some(indices) = outputs.indices {
                pairs = pairs.max(TopKProblem::pairs_bytes(rows, indices.shape()[3], device)?);
            }
        }
        Ok(ScratchSize::default()
            .with(Slot::KeyRanges, self.ranges_bytes(device)?)
            .with(Slot::Scores, scores)
            .with(Slot::TopKPairs, pairs))
    }

    /// The dispatches of a forward call.
    pub fn forward(
        &self,
        outputs: &Outputs<'a>,
        scratch: &'a Scratch,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let ranges = self.ranges_in(scratch)?;
        let mut all = vec![self.ranges(ranges, device)];
        for span in self.forward_spans(outputs, device) {
            let scores = match outputs.scores {
                Some(scores) => span.of(scores),
                None => {
                    let shape = [span.batch[1], 1, span.queries[1], self.columns()];
                    in_scratch(scratch.buffer(Slot::Scores)?, DType::F32, shape, 0)
                }
            };
            all.push(self.scores(&span, ranges, scores, device));
            let Some(indices) = outputs.indices else { continue };
            let problem = TopKProblem {
                x: scores,
                values: outputs.values.map(|values| span.of(values)),
                indices: span.of(indices),
                skips_neg_inf: true,
            };
            let rows = span.rows();
            let bytes = TopKProblem::pairs_bytes(rows, indices.shape()[3], device)?;
            let pairs = slot_of(bytes, Slot::TopKPairs, scratch)?;
            all.extend(problem.dispatches(pairs, &self.kernel_options, device));
        }
        Ok(all)
    }

    fn scores(
        &self,
        span: &Span,
        ranges: TensorView<'a>,
        scores: TensorView<'a>,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let Shape { heads, q_len, kv_len, head_dim, .. } = self.shape;
        let tiles = self.tiles(device);
        let (q, k) = (span.of(self.q), span.of_batch(self.k));
        let has_words = self.k_scales.is_some();
        let groups = self.k_scales.map_or(1, |scales| scales.shape()[3]);
        let columns = scores.shape()[3];
        let call = IndexerScoresCall {
            q,
            k: (!has_words).then_some(k),
            k_words: has_words.then_some(k),
            k_scales: self.k_scales.map(|scales| span.of_batch(scales)),
            w: span.of(self.w),
            ranges,
            scores,
            span: span.first(),
            all_queries: q_len as u32,
            heads: heads as u32,
            queries: span.queries[1] as u32,
            keys: kv_len as u32,
            columns: columns as u32,
            head_dim: head_dim as u32,
            group: (head_dim / groups) as u32,
            scale: self.scale,
            neg_inf: f32::NEG_INFINITY,
            tiles,
            width: if has_words { Width::of_rows(&[q]) } else { Width::of_rows(&[q, k]) },
            store: Width::of_rows(&[scores]),
        };
        let [rows, keys] = tiles.size();
        call.dispatch([columns.div_ceil(keys), span.queries[1].div_ceil(rows), span.batch[1]], device)
    }

    /// The spans of the gradient of keys: all queries of a batch entry at once, unless there are
    /// lists.
    fn backward_spans(&self, gradients: &Gradients, device: &DeviceFacts) -> Vec<Span> {
        self.spans(if gradients.indices.is_some() { self.shape.kv_len } else { 0 }, device)
    }

    /// True if the sums of spans need memory: a gradient of F32 holds them itself.
    fn has_sums(&self, gradients: &Gradients, spans: &[Span]) -> bool {
        let is_cut = spans.iter().any(|span| span.queries[1] < self.shape.q_len);
        gradients.d_k.is_some_and(|d_k| d_k.dtype() != DType::F32) && is_cut
    }

    /// The temporary memory of a backward call.
    pub fn backward_scratch_size(
        &self,
        gradients: &Gradients,
        device: &DeviceFacts,
    ) -> Result<ScratchSize, Error> {
        let Shape { batch, kv_len, head_dim, .. } = self.shape;
        let size = ScratchSize::default().with(Slot::KeyRanges, self.ranges_bytes(device)?);
        if gradients.d_k.is_none() {
            return Ok(size);
        }
        let spans = self.backward_spans(gradients, device);
        let rows = spans.iter().map(Span::rows).max().unwrap_or(0);
        let dense = if gradients.indices.is_some() { rows as u64 * kv_len as u64 } else { 0 };
        let sums =
            if self.has_sums(gradients, &spans) { batch as u64 * kv_len as u64 * head_dim as u64 } else { 0 };
        Ok(size
            .with(Slot::ScoreGradients, fits(dense, 4, device)?)
            .with(Slot::GradientTerms, fits(sums, 4, device)?))
    }

    /// The dispatches of a backward call.
    pub fn backward(
        &self,
        gradients: &Gradients<'a>,
        scratch: &'a Scratch,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let ranges = self.ranges_in(scratch)?;
        let mut all = vec![self.ranges(ranges, device)];
        if gradients.d_q.is_some() || gradients.d_w.is_some() {
            self.d_queries(gradients, ranges, device, &mut all);
        }
        let Some(d_k) = gradients.d_k else { return Ok(all) };
        let Shape { batch, q_len, kv_len, head_dim, .. } = self.shape;
        let spans = self.backward_spans(gradients, device);
        let sums = if self.has_sums(gradients, &spans) {
            let buffer = scratch.buffer(Slot::GradientTerms)?;
            in_scratch(buffer, DType::F32, [batch, 1, kv_len, head_dim], 0)
        } else {
            d_k
        };
        for span in spans {
            let d_scores = match gradients.indices {
                None => span.of(gradients.d_scores),
                Some(indices) => {
                    let shape = [span.batch[1], 1, span.queries[1], kv_len];
                    let dense = in_scratch(scratch.buffer(Slot::ScoreGradients)?, DType::F32, shape, 0);
                    let call = IndexerScatterCall {
                        indices: span.of(indices),
                        d_scores: span.of(gradients.d_scores),
                        dense,
                        queries: span.queries[1] as u32,
                        keys: kv_len as u32,
                        k: indices.shape()[3] as u32,
                        lanes: self.lanes(device),
                    };
                    all.push(call.dispatch([span.queries[1], span.batch[1], 1], device));
                    dense
                }
            };
            let ([i, queries], is_cut) = (span.queries, span.queries[1] < q_len);
            let is_last = i + queries == q_len;
            let is_own = d_k.dtype() == DType::F32;
            let (q, k) = (span.of(self.q), span.of_batch(self.k));
            let call = IndexerDKeysCall {
                q,
                k,
                w: span.of(self.w),
                ranges,
                d_scores,
                sums: is_cut.then(|| span.of_batch(sums)),
                d_k: (!is_cut || is_last && !is_own).then(|| span.of_batch(d_k)),
                span: span.first(),
                all_queries: q_len as u32,
                heads: self.shape.heads as u32,
                queries: queries as u32,
                group: (CHUNK as usize / self.shape.heads).max(1) as u32,
                head_dim: head_dim as u32,
                adds: u32::from(i > 0),
                scale: self.scale,
                lanes: self.lanes(device),
                width: Width::of_rows(&[q, k]),
            };
            let slices = head_dim.div_ceil(4 * call.lanes as usize);
            all.push(call.dispatch([kv_len, slices, span.batch[1]], device));
        }
        Ok(all)
    }

    fn d_queries(
        &self,
        gradients: &Gradients<'a>,
        ranges: TensorView<'a>,
        device: &DeviceFacts,
        all: &mut Dispatches<'a>,
    ) {
        let Shape { batch, heads, q_len, head_dim, .. } = self.shape;
        let call = IndexerDQueriesCall {
            q: self.q,
            k: self.k,
            w: self.w,
            ranges,
            d_scores: gradients.d_scores,
            indices: gradients.indices,
            d_q: gradients.d_q,
            d_w: gradients.d_w,
            span: [0; 2],
            all_queries: q_len as u32,
            heads: heads as u32,
            head_dim: head_dim as u32,
            listed: gradients.indices.map_or(0, |indices| indices.shape()[3]) as u32,
            scale: self.scale,
            lanes: self.lanes(device),
            width: Width::of_rows(&[self.q, self.k]),
        };
        let slices = if gradients.d_q.is_some() { head_dim.div_ceil(4 * call.lanes as usize) } else { 1 };
        all.push(call.dispatch([q_len * heads, slices, batch], device));
    }
}
