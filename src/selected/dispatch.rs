//! The dispatches of a call. First come lists of keys, then attention with each query as a batch
//! entry. Sums of the gradients of keys follow.

use super::kernels::selected_keys::{LANES, SelectedKeysCall};
use super::kernels::selected_sums::{Lanes, SelectedSumsCall};
use super::kernels::selected_weights::{SelectedWeightsCall, WORKGROUP};
use super::plan::SelectedPlan;
use super::span::Span;
use crate::attention::dispatch::{
    self as attention, AddedGradients, BackwardProblem, Extras, Keys, Problem, backward,
};
use crate::attention::kernels::key_lists::KeyLists;
use crate::cache::dispatch::CacheLayer;
use crate::cache::kernels::cache::CacheParams;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, Scratch, ScratchSize, Slot, Width, fits};
use crate::mask::kernels::{MaskParams, MaskVariant, Masked};
use crate::mask::{DeviceMask, Id};
use crate::tensor::{DType, Error, Layout, Shape, TensorView, Window};

/// The parts of a call that forward and backward share.
#[derive(Clone, Copy)]
pub(crate) struct Selection<'a> {
    pub indices: TensorView<'a>,
    /// The mask of the call, with all keys.
    pub mask: DeviceMask<'a>,
    pub layer: Option<CacheLayer<'a>>,
    pub plan: SelectedPlan,
    pub cpu: bool,
}

impl<'a> Selection<'a> {
    /// The queries of a span as batch entries of one query.
    fn queries(&self, t: TensorView<'a>, span: Span) -> TensorView<'a> {
        let Layout { shape: [_, heads, _, dim], strides: [b, h, i, d], offset } = t.layout;
        let offset = offset + span.batch[0] * b + span.queries[0] * i;
        let step = if span.queries[1] == 1 { b } else { i };
        let layout = Layout { shape: [span.rows(), heads, 1, dim], strides: [step, h, i, d], offset };
        TensorView::with_layout(t.buffer, t.dtype, layout)
    }

    /// The dispatches that write the lists of a span, and the bitmap of keys for a backward pass.
    fn lists(
        &self,
        span: Span,
        lists: &'a wgpu::Buffer,
        bitmap: Option<&'a wgpu::Buffer>,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let plan = &self.plan;
        let params = MaskParams::new(&self.mask, &plan.shape, 0, None, device);
        let variant = MaskVariant::of(&self.mask, false, false).scores_only();
        let variant = self.layer.map_or(variant, |layer| variant.in_cache(&layer.cached));
        let call = SelectedKeysCall {
            indices: self.indices,
            sequence_table: self.layer.map(|layer| layer.sequence_table),
            lists: words(lists, plan.list_words(span.rows())),
            bitmap: bitmap.map(|buffer| words(buffer, plan.bitmap_words(span.rows()))),
            mask: Masked::new(variant, &self.mask, params, device),
            cache: self.layer.map_or(CacheParams::default(), |layer| layer.params),
            batch: span.batch[0] as u32,
            query: span.queries[0] as u32,
            queries: span.queries[1] as u32,
            count: plan.count as u32,
            block: plan.block as u32,
            window: plan.window as u32,
            list_heads: plan.list_heads as u32,
            heads_each: (plan.shape.heads / plan.list_heads) as u32,
            capacity: plan.capacity as u32,
            row: plan.row() as u32,
            bitmap_words: plan.words() as u32,
            layout_kind: self.layer.map(|layer| layer.cached.layout_kind),
            with_bitmap: bitmap.is_some(),
            lanes: LANES[usize::from(!self.cpu)],
        };
        call.dispatch([span.queries[1], plan.list_heads, span.batch[1]], device)
    }

    /// The lengths of a span's lists as a mask, for `heads` heads of queries.
    fn mask_of(&self, span: Span, heads: usize, lists: &'a wgpu::Buffer) -> DeviceMask<'a> {
        let row = self.plan.row();
        // One more batch entry, so that the view spans all lists.
        let shape = [span.rows() + 1, heads, 1, 1];
        let layout = Layout { shape, strides: [row, self.plan.shape.heads / heads, 1, 1], offset: 0 };
        DeviceMask::none().lengths(TensorView::with_layout(lists, DType::U32, layout))
    }

    fn key_lists(&self, span: Span) -> KeyLists {
        let plan = &self.plan;
        KeyLists {
            row: plan.row() as u32,
            start: plan.shape.heads as u32,
            step: if plan.list_heads == 1 { 0 } else { plan.capacity as u32 },
            share: plan.share() as u32,
            batch: span.batch[0] as u32,
            // One batch entry of keys for all queries, or one for each.
            queries: if span.queries[1] == 1 { 1 } else { u32::MAX },
        }
    }
}

/// The part of sinks for a span, whose batch entries are queries.
fn of_span(sinks: TensorView, span: Span) -> TensorView {
    match sinks.shape()[0] {
        1 => sinks,
        _ => sinks.slice(0, span.batch[0], span.batch[1]),
    }
}

/// A part of the scratch as words.
fn words(buffer: &wgpu::Buffer, words: u64) -> Window<'_> {
    Window { buffer, start: 0, size: 4 * words, layout: Layout::dense([1; 4]) }
}

/// A checked forward call.
#[derive(Clone, Copy)]
pub(crate) struct SelectedProblem<'a> {
    pub selection: Selection<'a>,
    pub problem: Problem<'a>,
    pub weights: Option<TensorView<'a>>,
}

impl<'a> SelectedProblem<'a> {
    /// The attention of a span.
    fn attention(&self, span: Span, lists: &'a wgpu::Buffer) -> Problem<'a> {
        let selection = &self.selection;
        let view = |t| selection.queries(t, span);
        let extras = self.problem.extras;
        let mask = selection.mask_of(span, selection.plan.shape.heads, lists);
        let mask = match selection.mask.floats(Id::SinkLogits) {
            Some(sinks) => mask.sink_logits(of_span(*sinks, span)),
            None => mask,
        };
        Problem {
            shape: selection.plan.attention(span),
            q: view(self.problem.q),
            extras: Extras { out: view(extras.out), lse: extras.lse.map(view), mask, ..extras },
            lists: Some(selection.key_lists(span)),
            ..self.problem
        }
    }

    /// The temporary memory of the call.
    pub fn scratch_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let plan = &self.selection.plan;
        let mut size = ScratchSize::default();
        for span in plan.spans() {
            // The plan needs a buffer only to make views.
            let problem = self.attention(span, self.problem.q.buffer);
            size = size.max(attention::choose(&problem.outline(), device)?.scratch_size());
        }
        Ok(size.with(Slot::KeyLists, plan.list_bytes(device)?))
    }

    /// The dispatches of the call.
    pub fn dispatches(&self, scratch: &'a Scratch, device: &DeviceFacts) -> Result<Dispatches<'a>, Error> {
        scratch.check(self.scratch_size(device)?)?;
        let lists = scratch.buffer(Slot::KeyLists)?;
        let mut all = Dispatches::new();
        for span in self.selection.plan.spans() {
            all.push(self.selection.lists(span, lists, None, device));
            let problem = self.attention(span, lists);
            let chosen = attention::choose(&problem.outline(), device)?;
            all.extend(attention::dispatches(&problem, chosen, chosen.memory(scratch)?, device));
        }
        all.extend(self.weights.and_then(|weights| self.weights(weights, device)));
        Ok(all)
    }

    /// The dispatches that write the weights of indices.
    fn weights(&self, weights: TensorView<'a>, device: &DeviceFacts) -> Option<Dispatch<'a>> {
        let Problem { q, keys, extras, shape, scale, .. } = self.problem;
        let (Keys::Tensors { k, .. }, Some(lse)) = (keys, extras.lse) else { return None };
        let Selection { indices, mask, plan, .. } = self.selection;
        let params = MaskParams::new(&mask, &shape, 0, None, device);
        let variant = MaskVariant::of(&mask, false, false).scores_only();
        let out_heads = weights.shape()[1];
        let call = SelectedWeightsCall {
            q,
            k,
            lse,
            indices,
            weights,
            mask: Masked::new(variant, &mask, params, device),
            heads: shape.heads as u32,
            out_heads: out_heads as u32,
            group: shape.group() as u32,
            heads_each: (shape.heads / plan.list_heads) as u32,
            count: plan.count as u32,
            block: plan.block as u32,
            head_dim: shape.head_dim as u32,
            scale,
            width: Width::of_rows(&[q, k]),
        };
        let groups = plan.count.div_ceil(WORKGROUP as usize);
        Some(call.dispatch([groups, shape.q_len, shape.batch * out_heads], device))
    }
}

/// A checked backward call.
#[derive(Clone, Copy)]
pub(crate) struct SelectedBackwardProblem<'a> {
    pub selection: Selection<'a>,
    pub problem: BackwardProblem<'a>,
    pub latent: bool,
}

impl<'a> SelectedBackwardProblem<'a> {
    /// Plans the memory of lists, bitmaps and terms.
    pub fn new(mut selection: Selection<'a>, problem: BackwardProblem<'a>, latent: bool) -> Self {
        selection.plan.with_bitmap = problem.d_k.is_some() || problem.d_v.is_some();
        let mut planned = SelectedBackwardProblem { selection, problem, latent };
        planned.selection.plan.extra_bytes = planned.term_bytes();
        planned
    }

    /// True if the call needs terms of keys, and of values.
    fn terms(&self) -> [bool; 2] {
        let [k, v] = [self.problem.d_k, self.problem.d_v].map(|t| t.is_some());
        [k, v || k && self.latent]
    }

    /// Bytes of terms for each query.
    fn term_bytes(&self) -> u64 {
        let plan = &self.selection.plan;
        let [k, v] = self.terms();
        let channels = u64::from(k) * plan.padded(plan.shape.head_dim)
            + u64::from(v) * plan.padded(plan.shape.value_dim);
        4 * channels * plan.call_heads() as u64 * plan.capacity as u64
    }

    /// The terms of a span in scratch.
    fn terms_in(&self, buffer: &'a wgpu::Buffer, span: Span, channels: usize) -> TensorView<'a> {
        let plan = &self.selection.plan;
        let [rows, heads, capacity] = [span.rows(), plan.call_heads(), plan.capacity];
        let row = plan.padded(channels) as usize;
        let strides = [heads * capacity * row, capacity * row, row, 1];
        let layout = Layout { shape: [rows, heads, capacity, channels], strides, offset: 0 };
        TensorView::with_layout(buffer, DType::F32, layout)
    }

    /// The heads that share keys as the queries of a head, so that they fill a tile.
    fn rows(&self, t: TensorView<'a>, span: Span) -> TensorView<'a> {
        let heads = self.selection.plan.call_heads();
        let t = self.selection.queries(t, span);
        let Layout { shape: [rows, all, _, dim], strides: [b, h, _, d], offset } = t.layout;
        let each = all / heads;
        let layout = Layout { shape: [rows, heads, each, dim], strides: [b, h * each, h, d], offset };
        TensorView::with_layout(t.buffer, t.dtype, layout)
    }

    /// The attention of a span: gradients of queries, and terms of the gradients of keys. If the
    /// call accumulates, they are separate problems, because terms are written.
    fn attention(&self, span: Span, part: &impl Fn(Slot) -> &'a wgpu::Buffer) -> Vec<BackwardProblem<'a>> {
        let selection = &self.selection;
        let plan = &selection.plan;
        let view = |t| self.rows(t, span);
        let BackwardProblem { q, out, lse, d_out, d_lse, d_q, .. } = self.problem;
        let [of_k, of_v] = self.terms();
        let terms = |used: bool, slot, channels| used.then(|| self.terms_in(part(slot), span, channels));
        let heads = plan.call_heads();
        let all = BackwardProblem {
            shape: Shape { heads, q_len: plan.shape.heads / heads, ..plan.attention(span) },
            q: view(q),
            out: view(out),
            lse: view(lse),
            d_out: view(d_out),
            d_lse: d_lse.map(view),
            d_q: d_q.map(view),
            d_k: terms(of_k, Slot::KeyTerms, plan.shape.head_dim),
            d_v: terms(of_v, Slot::ValueTerms, plan.shape.value_dim),
            d_added: AddedGradients::default(),
            mask: selection.mask_of(span, heads, part(Slot::KeyLists)),
            lists: Some(selection.key_lists(span)),
            // Sinks have a number for each head. Without them, lse has all weights.
            partial: self.problem.partial || self.problem.mask.has(Id::SinkLogits),
            ..self.problem
        };
        let of_queries = BackwardProblem { d_k: None, d_v: None, ..all };
        let of_keys = BackwardProblem { d_q: None, accumulates: false, ..all };
        match (all.d_q.is_some(), of_k || of_v) {
            (true, true) if all.accumulates => vec![of_queries, of_keys],
            (true, true) => vec![all],
            (true, false) => vec![of_queries],
            (false, true) => vec![of_keys],
            (false, false) => Vec::new(),
        }
    }

    /// The gradients of sinks, which depend on no key.
    fn of_sinks(&self) -> Option<BackwardProblem<'a>> {
        let sinks = *self.problem.mask.floats(Id::SinkLogits)?;
        let mask = DeviceMask::none().sink_logits(sinks);
        let problem =
            BackwardProblem { d_q: None, d_k: None, d_v: None, mask, partial: true, ..self.problem };
        (!problem.d_added.is_empty()).then_some(problem)
    }

    /// The temporary memory of the call.
    pub fn scratch_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let plan = &self.selection.plan;
        let any = |_| self.problem.q.buffer;
        let mut size = ScratchSize::default();
        let spans = plan.spans();
        let problems = spans.iter().flat_map(|span| self.attention(*span, &any));
        for problem in problems.chain(self.of_sinks()) {
            size = size.max(backward::plan(&problem, device)?.scratch_size());
        }
        let longest = plan.longest();
        let [k, v] = self.terms();
        let terms = |channels| {
            let row = plan.call_heads() as u64 * plan.capacity as u64 * plan.padded(channels);
            fits(longest as u64 * row, 4, device)
        };
        size = size.with(Slot::KeyLists, plan.list_bytes(device)?);
        if k || v {
            size = size.with(Slot::KeyBitmap, fits(plan.bitmap_words(longest), 4, device)?);
        }
        let Shape { batch, kv_heads, kv_len, head_dim, value_dim, .. } = plan.shape;
        let sums = |channels| {
            let rows = batch as u64 * kv_heads as u64 * kv_len as u64;
            fits(rows.saturating_mul(plan.padded(channels)), 4, device)
        };
        let parts =
            [(k, Slot::KeyTerms, Slot::KeySums, head_dim), (v, Slot::ValueTerms, Slot::ValueSums, value_dim)];
        for (_, of_terms, of_sums, channels) in parts.into_iter().filter(|part| part.0) {
            size = size.with(of_terms, terms(channels)?);
            if spans.len() > 1 && !(self.latent && of_sums == Slot::ValueSums) {
                size = size.with(of_sums, sums(channels)?);
            }
        }
        Ok(size)
    }

    /// The dispatches of the call.
    pub fn dispatches(&self, scratch: &'a Scratch, device: &DeviceFacts) -> Result<Dispatches<'a>, Error> {
        let size = self.scratch_size(device)?;
        scratch.check(size)?;
        // No dispatch uses a missing part, so any buffer can stand in.
        let part = |slot| scratch.buffer(slot).unwrap_or(self.problem.q.buffer);
        let bitmap = size.has(Slot::KeyBitmap).then(|| part(Slot::KeyBitmap));
        let mut all = Dispatches::new();
        let add = |problem: &BackwardProblem<'a>, all: &mut Dispatches<'a>| {
            let plans = backward::plan(problem, device)?;
            all.extend(backward::dispatches(problem, &plans, plans.memory(scratch)?, device));
            Ok(())
        };
        for span in self.selection.plan.spans() {
            let problems = self.attention(span, &part);
            if !problems.is_empty() {
                all.push(self.selection.lists(span, part(Slot::KeyLists), bitmap, device));
            }
            for problem in problems {
                add(&problem, &mut all)?;
            }
            for gradient in self.gradients(&part) {
                all.extend(self.sums(gradient, span, bitmap, device));
            }
        }
        if let Some(problem) = self.of_sinks() {
            add(&problem, &mut all)?;
        }
        Ok(all)
    }

    /// The gradients of keys and values.
    fn gradients(&self, part: &impl Fn(Slot) -> &'a wgpu::Buffer) -> Vec<KeyGradient<'a>> {
        let Shape { head_dim, value_dim, .. } = self.selection.plan.shape;
        let terms = |slot, channels| (part(slot), channels);
        let of_keys = self.problem.d_k.map(|out| KeyGradient {
            out,
            terms: terms(Slot::KeyTerms, head_dim),
            values: self.latent.then(|| terms(Slot::ValueTerms, value_dim)),
            sums: part(Slot::KeySums),
        });
        let of_values = self.problem.d_v.map(|out| KeyGradient {
            out,
            terms: terms(Slot::ValueTerms, value_dim),
            values: None,
            sums: part(Slot::ValueSums),
        });
        of_keys.into_iter().chain(of_values).collect()
    }

    /// The dispatches that add the terms of a span.
    fn sums(
        &self,
        gradient: KeyGradient<'a>,
        span: Span,
        bitmap: Option<&'a wgpu::Buffer>,
        device: &DeviceFacts,
    ) -> Option<Dispatch<'a>> {
        let bitmap = bitmap?;
        let plan = &self.selection.plan;
        let Shape { q_len, kv_heads, kv_len, .. } = plan.shape;
        let KeyGradient { out, terms: (terms, channels), values, sums } = gradient;
        let rows = plan.call_heads() as u64 * plan.capacity as u64 * span.rows() as u64;
        let window = |buffer, channels| words(buffer, rows * plan.padded(channels));
        let [starts, ends] = [span.queries[0] == 0, span.queries[0] + span.queries[1] == q_len];
        let all_sums = plan.shape.batch as u64 * kv_heads as u64 * kv_len as u64 * plan.padded(channels);
        let lanes = if self.selection.cpu { Lanes::CPU } else { Lanes::GPU };
        let call = SelectedSumsCall {
            bitmap: words(bitmap, plan.bitmap_words(span.rows())),
            terms: window(terms, channels),
            values: values.map(|(buffer, channels)| window(buffer, channels)),
            sums: (!(starts && ends)).then(|| words(sums, all_sums)),
            out: ends.then_some(out),
            batch: span.batch[0] as u32,
            queries: span.queries[1] as u32,
            kv_heads: kv_heads as u32,
            kv_len: kv_len as u32,
            list_heads: plan.list_heads as u32,
            call_heads: plan.call_heads() as u32,
            share: plan.share() as u32,
            capacity: plan.capacity as u32,
            bitmap_words: plan.words() as u32,
            channels: channels as u32,
            channels_each: plan.padded(channels) as u32,
            values_each: values.map_or(0, |(_, channels)| plan.padded(channels) as u32),
            adds: u32::from(!starts),
            accumulates: u32::from(self.problem.accumulates),
            lanes,
            with_values: values.is_some(),
            with_sums: !(starts && ends),
        };
        let slices = channels.div_ceil(4 * lanes.channels as usize);
        Some(call.dispatch([plan.words(), slices, span.batch[1] * kv_heads], device))
    }
}

/// The gradient of keys or values, and its terms with their channels.
struct KeyGradient<'a> {
    out: TensorView<'a>,
    terms: (&'a wgpu::Buffer, usize),
    values: Option<(&'a wgpu::Buffer, usize)>,
    sums: &'a wgpu::Buffer,
}
