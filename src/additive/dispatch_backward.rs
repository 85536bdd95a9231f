//! The gradients of additive attention. The first dispatches compute the statistics of queries.
//! Then, for each rectangle of pairs, they compute scores, gradients of weights, gradients of
//! scores, and the sums.

use super::kernels::additive_backward::{AdditiveBackward, AdditiveBackwardCall};
use super::kernels::additive_pairs::{self, AdditivePairsCall};
use crate::attention::dispatch::BackwardProblem;
use crate::attention::dispatch::backward::{STATS_BYTES, row_stats, row_totals};
use crate::attention::dispatch::backward_problem::in_fours;
use crate::attention::dispatch::score_gradients::part_sums;
use crate::attention::kernels::additive_scores::{AdditiveScores, AdditiveScoresCall, fitting};
use crate::attention::kernels::scores::ScoresCall;
use crate::attention::plan::{GradientsOf, Rectangle, Sides};
use crate::device::DeviceFacts;
use crate::device::family::{GRADIENTS, STAGED};
use crate::kernel::{Dispatch, Dispatches, Placed, Scratch, ScratchSize, Slot, Width, in_scratch};
use crate::mask::kernels::dropout::Dropped;
use crate::mask::kernels::{MaskParams, MaskVariant, Masked};
use crate::mask::{DeviceMask, Dropout, Id};
use crate::matmul::plan::MatmulShape;
use crate::tensor::{DType, Error, Layout, Shape, TensorView, Window, count};
use crate::{attention, matmul};

/// Checked tensors of a backward call of additive attention.
#[derive(Clone, Copy)]
pub(crate) struct AdditiveProblem<'a> {
    /// The tensors of queries, keys and values, without gradients of the mask.
    pub problem: BackwardProblem<'a>,
    /// `[1, heads or 1, 1, hidden]`.
    pub score_vector: TensorView<'a>,
    pub d_score_vector: Option<TensorView<'a>>,
}

/// The parts of the scratch that the call uses.
#[derive(Clone, Copy)]
pub(crate) struct AdditiveMemory<'a> {
    stats: &'a wgpu::Buffer,
    /// Two matrices for the pairs of a rectangle. The first holds scores, then their gradients. The
    /// second holds gradients of weights, then weights.
    pairs: &'a wgpu::Buffer,
    parts: Option<&'a wgpu::Buffer>,
}

/// The rectangles of a call, and the sizes of its dispatches.
pub(crate) struct AdditivePlan {
    rectangles: Vec<(Rectangle, Sides)>,
    rows: usize,
    /// True if a gradient of queries or of the vector is wanted.
    of_queries: bool,
    /// Rows of queries in each part of the vector's gradient.
    row_lanes: u32,
    /// Parts of an element of the vector's gradient.
    parts: usize,
    cpu: bool,
}

/// # Errors
/// More mask tensors than the device can bind with the others. Scratch that is larger than the
/// device can bind. Disabled kernels without a replacement.
pub(crate) fn plan(call: &AdditiveProblem, device: &DeviceFacts) -> Result<AdditivePlan, Error> {
    let problem = &call.problem;
    let shape = problem.shape;
    for forms in [STAGED, GRADIENTS] {
        if device.lacks_both(forms) {
            return Err(Error::Disabled { family: forms.of(device.software) });
        }
    }
    let keep = problem.dropout.as_ref().and_then(Dropout::given);
    let of_mask = problem.mask.buffers();
    // The kernel of pairs binds three tensors and dropout's, but no sinks. The kernel of totals
    // binds four.
    let of_pairs = 3 + of_mask - usize::from(problem.mask.has(Id::SinkLogits)) + usize::from(keep.is_some());
    let needed = of_pairs.max(4 + of_mask) as u64;
    let limit = u64::from(device.max_storage_buffers);
    if needed > limit {
        let what = "storage buffers for the backward pass with this mask";
        return Err(Error::Limit { what, needed, limit, name: "max_storage_buffers_per_shader_stage" });
    }
    let of_queries = problem.d_q.is_some() || call.d_score_vector.is_some();
    let of_keys = problem.d_k.is_some() || problem.d_v.is_some();
    // The sums of weights need the rectangles of queries too.
    let wanted = Sides { queries: true, keys: of_keys };
    let rectangles = attention::plan::rectangles(&shape, wanted, problem.kernel_options.most_work(), device);
    let cpu = problem.kernel_options.target.choose(GRADIENTS, device);
    let of_rows = rectangles.iter().filter(|(_, sides)| sides.queries);
    let longest = of_rows.map(|(r, _)| r.queries.len()).max().unwrap_or(1);
    let row_lanes = AdditiveBackward::row_lanes(longest.min(shape.q_len), cpu);
    let rows_of_vector =
        if call.score_vector.shape()[1] == 1 { shape.batch * shape.heads } else { shape.batch };
    let plan = AdditivePlan {
        rectangles,
        rows: count(shape.lse()),
        of_queries,
        row_lanes,
        parts: rows_of_vector.saturating_mul(shape.q_len.div_ceil(row_lanes as usize)),
        cpu,
    };
    let limit = device.max_binding_bytes.min(4 * u64::from(u32::MAX));
    let sizes = [
        ("row_stats (scratch)", plan.stats_bytes()),
        ("pairs (scratch)", 2 * plan.matrix_bytes(&shape)),
        ("partials (scratch)", plan.part_bytes(call)),
    ];
    match sizes.into_iter().find(|(_, bytes)| *bytes > limit) {
        Some((tensor, bytes)) => Err(Error::BindingLimit { tensor, bytes, limit }),
        None => Ok(plan),
    }
}

/// Returns the layout of the matrix of a rectangle's pairs.
fn matrix(rectangle: &Rectangle, shape: &Shape) -> Layout {
    let [batch, queries, keys] = rectangle.sizes();
    Layout::dense([batch, shape.heads, queries, keys.next_multiple_of(4)])
}

impl AdditivePlan {
    fn stats_bytes(&self) -> u64 {
        STATS_BYTES * self.rows as u64
    }

    /// Returns the bytes of one of the two matrices, in whole bindings.
    fn matrix_bytes(&self, shape: &Shape) -> u64 {
        let bytes = |(rectangle, _): &(Rectangle, Sides)| 4 * count(matrix(rectangle, shape).shape) as u64;
        self.rectangles.iter().map(bytes).max().unwrap_or(0).next_multiple_of(256)
    }

    fn part_bytes(&self, call: &AdditiveProblem) -> u64 {
        let elements = call.d_score_vector.map_or(0, |t| count(t.shape()) as u64);
        elements.saturating_mul(4).saturating_mul(self.parts as u64)
    }

    /// Returns the temporary memory of the plan.
    pub fn scratch_size(&self, call: &AdditiveProblem) -> ScratchSize {
        ScratchSize::default()
            .with(Slot::RowStats, self.stats_bytes())
            .with(Slot::Scores, 2 * self.matrix_bytes(&call.problem.shape))
            .with(Slot::Partials, self.part_bytes(call))
    }

    /// Returns the parts of the scratch that the plan uses.
    ///
    /// # Errors
    /// A scratch that is too small.
    pub fn memory<'a>(
        &self,
        call: &AdditiveProblem,
        scratch: &'a Scratch,
    ) -> Result<AdditiveMemory<'a>, Error> {
        scratch.check(self.scratch_size(call))?;
        let parts = call.d_score_vector.map(|_| scratch.buffer(Slot::Partials)).transpose()?;
        Ok(AdditiveMemory {
            stats: scratch.buffer(Slot::RowStats)?,
            pairs: scratch.buffer(Slot::Scores)?,
            parts,
        })
    }
}

/// Returns the dispatches of `call`, whose scratch is `memory`.
pub(crate) fn dispatches<'a>(
    call: &AdditiveProblem<'a>,
    plan: &AdditivePlan,
    memory: AdditiveMemory<'a>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let problem = &call.problem;
    let stats = in_scratch(memory.stats, DType::F32, [1, 1, plan.rows, 4], 0).window(device);
    let mut dispatches: Dispatches = row_stats(problem, plan.rows, stats, device).collect();
    dispatches.extend(row_totals(problem, Some(call.score_vector), plan.rows, stats, device));
    let mask = MaskVariant::of(&problem.mask, false, false);
    for (rectangle, sides) in &plan.rectangles {
        let part = Part { call, plan, memory, mask, rectangle, device };
        dispatches.push(part.scores());
        if sides.queries {
            dispatches.push(part.pairs(stats, true));
        }
        if plan.of_queries || sides.keys {
            dispatches.extend([part.d_weights(), part.pairs(stats, false)]);
        }
        if sides.queries && plan.of_queries {
            dispatches.push(part.of_queries());
        }
        if sides.keys {
            dispatches.extend(problem.d_k.map(|d_k| part.of_keys(d_k)));
            dispatches.extend(problem.d_v.map(|d_v| part.of_values(d_v)));
        }
    }
    if let Some((d_vector, parts)) = call.d_score_vector.zip(memory.parts) {
        let parts = in_scratch(parts, DType::F32, [1, 1, count(d_vector.shape()), plan.parts], 0);
        dispatches.extend(part_sums(parts, d_vector, problem.accumulates, device));
    }
    dispatches
}

/// A rectangle of pairs of a call.
struct Part<'p, 'a> {
    call: &'p AdditiveProblem<'a>,
    plan: &'p AdditivePlan,
    memory: AdditiveMemory<'a>,
    mask: MaskVariant,
    rectangle: &'p Rectangle,
    device: &'p DeviceFacts,
}

impl<'a> Part<'_, 'a> {
    /// Returns one of the two matrices: scores and their gradients, or weights and their gradients.
    fn matrix(&self, of_weights: bool) -> Window<'a> {
        let layout = matrix(self.rectangle, &self.call.problem.shape);
        let size = 4 * count(layout.shape) as u64;
        let start = if of_weights { self.plan.matrix_bytes(&self.call.problem.shape) } else { 0 };
        Window { buffer: self.memory.pairs, start, size, layout }
    }

    /// Returns a matrix for kernels that use the indices of the whole problem. The offset of its
    /// first element is before the matrix, in arithmetic that wraps as in the kernels.
    fn placed(&self, of_weights: bool) -> Placed<'a> {
        let mut window = self.matrix(of_weights);
        let [batch, query, key, _] = self.first();
        let [x, _, z, w] = window.layout.strides.map(|s| s as u32);
        let skipped = [batch.wrapping_mul(x), query.wrapping_mul(z), key.wrapping_mul(w)];
        window.layout.offset = skipped.into_iter().fold(0u32, u32::wrapping_sub) as usize;
        Placed { window, dtype: DType::F32 }
    }

    fn first(&self) -> [u32; 4] {
        let Rectangle { batch, queries, keys } = self.rectangle;
        [batch.start as u32, queries.start as u32, keys.start as u32, 0]
    }

    fn end(&self) -> [u32; 4] {
        let Rectangle { batch, queries, keys } = self.rectangle;
        [batch.end as u32, queries.end as u32, keys.end as u32, 0]
    }

    /// Returns the rules of `variant` in the call's mask.
    fn masked(&self, variant: MaskVariant) -> Masked<'a> {
        let problem = &self.call.problem;
        let params = MaskParams::new(&problem.mask, &problem.shape, 0, None, self.device);
        Masked::new(variant, &problem.mask, params, self.device)
    }

    fn scores(&self) -> Dispatch<'a> {
        let AdditiveProblem {
            problem: BackwardProblem { shape, q, k, kernel_options, .. },
            score_vector,
            ..
        } = *self.call;
        let cpu = kernel_options.target.choose(STAGED, self.device);
        let [batch, queries, keys] = self.rectangle.sizes();
        let key_lanes = AdditiveScores::key_lanes(queries, cpu);
        let call = AdditiveScoresCall {
            q,
            k,
            score_vector,
            scores: self.placed(false),
            mask: self.masked(fitting(self.mask.range_only(), 4, self.device)),
            first: self.first(),
            end: self.end(),
            heads: shape.heads as u32,
            group: shape.group() as u32,
            hidden: shape.head_dim as u32,
            cpu,
            key_lanes,
            width: Width::of(in_fours(q) && in_fours(k)),
        };
        let [rows, columns] = AdditiveScores::tile(cpu, key_lanes);
        call.dispatch([keys.div_ceil(columns), queries.div_ceil(rows), batch * shape.heads], self.device)
    }

    /// Returns the dispatch of `d_out · v` for all pairs of the rectangle, a matrix product.
    fn d_weights(&self) -> Dispatch<'a> {
        let BackwardProblem { shape, v, d_out, kernel_options, .. } = self.call.problem;
        let Rectangle { batch, queries, keys } = self.rectangle;
        let part = |t: TensorView<'a>, rows: &std::ops::Range<usize>| {
            t.slice(0, batch.start, batch.len()).slice(2, rows.start, rows.len())
        };
        let (d_out, v) = (part(d_out, queries), part(v, keys));
        let inner = Shape { batch: batch.len(), q_len: queries.len(), kv_len: keys.len(), ..shape };
        let product = MatmulShape { batch: inner.batch * shape.heads, rows: inner.q_len, cols: inner.kv_len };
        let tiles =
            matmul::plan::tiles(product, kernel_options.target.choose(STAGED, self.device), self.device);
        let none = DeviceMask::none();
        let mask_params = MaskParams::new(&none, &inner, 0, None, self.device);
        let call = ScoresCall {
            q: d_out,
            k: v,
            scores: Placed { window: self.matrix(true), dtype: DType::F32 },
            mask: Masked::new(MaskVariant::default(), &none, mask_params, self.device),
            heads: shape.heads as u32,
            group: shape.group() as u32,
            head_dim: shape.value_dim as u32,
            scale: 1.0,
            tiles,
            width: Width::of(in_fours(d_out) && in_fours(v)),
            store: Width::Four,
        };
        call.dispatch(matmul::plan::grid(tiles, product), self.device)
    }

    /// Returns the dispatch of the pairs' gradients, or of the sums of the weights of queries.
    fn pairs(&self, stats: Window<'a>, totals: bool) -> Dispatch<'a> {
        let problem = &self.call.problem;
        let dropout = problem.dropout.as_ref().filter(|_| !totals);
        let [batch, queries, keys] = self.rectangle.sizes();
        let call = AdditivePairsCall {
            d_scores: self.placed(false),
            weights: self.placed(true),
            row_stats: stats,
            mask: self.masked(self.mask.scores_only()),
            drop: Dropped::new(dropout, self.device),
            first: self.first(),
            end: self.end(),
            heads: problem.shape.heads as u32,
            scale: 1.0,
            totals,
        };
        let workgroups = if totals { 1 } else { keys.div_ceil(additive_pairs::WORKGROUP) };
        call.dispatch([workgroups, queries, batch * problem.shape.heads], self.device)
    }

    fn of_queries(&self) -> Dispatch<'a> {
        let BackwardProblem { q, k, d_q, .. } = self.call.problem;
        self.sums(GradientsOf::Queries, Some(q), k, d_q)
    }

    fn of_keys(&self, d_k: TensorView<'a>) -> Dispatch<'a> {
        let BackwardProblem { q, k, .. } = self.call.problem;
        self.sums(GradientsOf::Keys, Some(k), q, Some(d_k))
    }

    fn of_values(&self, d_v: TensorView<'a>) -> Dispatch<'a> {
        self.sums(GradientsOf::Values, None, self.call.problem.d_out, Some(d_v))
    }

    fn sums(
        &self,
        of: GradientsOf,
        own: Option<TensorView<'a>>,
        others: TensorView<'a>,
        gradient: Option<TensorView<'a>>,
    ) -> Dispatch<'a> {
        let AdditiveProblem { problem, score_vector, .. } = self.call;
        let shape = problem.shape;
        let [batch, queries, keys] = self.rectangle.sizes();
        let (rows, heads) =
            if of == GradientsOf::Queries { (queries, shape.heads) } else { (keys, shape.kv_heads) };
        let cpu = self.plan.cpu;
        let parts = self.memory.parts.filter(|_| of == GradientsOf::Queries);
        let row_lanes = if of == GradientsOf::Queries {
            self.plan.row_lanes
        } else {
            AdditiveBackward::row_lanes(rows, cpu)
        };
        let range = if of == GradientsOf::Queries { self.mask.range_only() } else { MaskVariant::default() };
        let call = AdditiveBackwardCall {
            own,
            others,
            pairs: self.placed(of == GradientsOf::Values),
            score_vector: of.scores().then_some(*score_vector),
            gradient,
            parts: parts.map(|buffer| {
                let elements = count(score_vector.shape());
                in_scratch(buffer, DType::F32, [1, 1, elements, self.plan.parts], 0)
            }),
            mask: self.masked(fitting(range, 6, self.device)),
            first: self.first(),
            end: self.end(),
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            group: shape.group() as u32,
            channels: others.shape()[3] as u32,
            accumulates: u32::from(problem.accumulates),
            part_count: self.plan.parts as u32,
            vector_heads: score_vector.shape()[1] as u32,
            cpu,
            of,
            row_lanes,
            width: Width::of(in_fours(others)),
            store: Width::of(gradient.is_some_and(in_fours)),
        };
        let channels = others.shape()[3].div_ceil(AdditiveBackward::channels(cpu, row_lanes));
        call.dispatch([rows.div_ceil(row_lanes as usize), channels, batch * heads], self.device)
    }
}
