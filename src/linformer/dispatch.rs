//! Keys and values projected along the length, and the gradients of that.

use std::ops::Range;

use super::kernels::keep_rows::{KeepRowsCall, ROWS};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, KernelOptions, Width};
use crate::matmul::projection::dispatch_backward::{Axis, Gradient, Product, b_loads};
use crate::tensor::{Error, TensorView};

/// `low = projection · x` for each head, of checked tensors.
#[derive(Clone, Copy)]
pub(crate) struct LowRank<'a> {
    /// `[1, heads or 1, rank, length]`.
    pub projection: TensorView<'a>,
    /// `[batch, heads, length, dim]`.
    pub x: TensorView<'a>,
    /// `[batch, heads, rank, dim]`.
    pub low: TensorView<'a>,
}

/// So many products at once, of batch entries and heads: how far the next is in a tensor of both,
/// and in the projection.
struct Run {
    batch: Range<usize>,
    heads: Range<usize>,
    count: usize,
    axis: usize,
    per_head: bool,
}

impl<'a> LowRank<'a> {
    fn per_head(&self) -> bool {
        self.projection.shape()[1] > 1
    }

    /// As few runs of products as the layouts of `x` and its like allow.
    fn runs(&self, tensors: [TensorView; 2]) -> Vec<Run> {
        let [batch, heads, ..] = self.x.shape();
        let per_head = self.per_head();
        let run = |batch, heads, count, axis| Run { batch, heads, count, axis, per_head };
        let follow = |t: &TensorView| t.strides()[0] as u64 == heads as u64 * t.strides()[1] as u64;
        if batch > 1 && heads > 1 && !per_head && tensors.iter().all(follow) {
            vec![run(0..batch, 0..heads, batch.saturating_mul(heads), 1)]
        } else if heads < batch {
            (0..heads).map(|h| run(0..batch, h..h + 1, batch, 0)).collect()
        } else {
            (0..batch).map(|b| run(b..b + 1, 0..heads, heads, 1)).collect()
        }
    }

    /// `low = projection · x`.
    ///
    /// # Errors
    /// A `kernel_options` that insists on what these products cannot have; kernels that are put aside and that nothing replaces.
    pub fn forward(
        &self,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let LowRank { projection: e, x, low } = *self;
        let [.., length, dim] = x.shape();
        let product = |run: Run| {
            let [x, low] = [x, low].map(|t| run.of(t));
            let e = run.projection(e);
            let (of_e, of_x, of_low) = (e.strides(), x.strides(), low.strides());
            let product = Product {
                a: e,
                b: x,
                c: Gradient { view: low, accumulates: false },
                rows: vec![Axis { n: e.shape()[2], left: of_e[2], right: of_low[2] }],
                cols: Axis { n: dim, left: of_x[3], right: of_low[3] },
                inner: vec![Axis { n: length, left: of_e[3], right: of_x[2] }],
                inner_is_channels: true,
                b_loads: b_loads(&x.layout, x.layout.in_fours(2)),
                c_width: Width::of(low.layout.in_fours(3)),
                count: run.count,
                step: [run.of_projection(of_e), of_x[run.axis], of_low[run.axis]],
            };
            product.dispatch(kernel_options, device)
        };
        self.runs([x, low]).into_iter().map(product).collect()
    }

    /// `d_x = projectionᵀ · low`, where `low` holds the gradient of what it names.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn d_x(
        &self,
        d_x: Gradient<'a>,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let LowRank { projection: e, low, .. } = *self;
        let [.., length, dim] = self.x.shape();
        let product = |run: Run| {
            let [low, view] = [low, d_x.view].map(|t| run.of(t));
            let e = run.projection(e);
            let (of_e, of_low, of_x) = (e.strides(), low.strides(), view.strides());
            let product = Product {
                a: e,
                b: low,
                c: Gradient { view, ..d_x },
                rows: vec![Axis { n: length, left: of_e[3], right: of_x[2] }],
                cols: Axis { n: dim, left: of_low[3], right: of_x[3] },
                inner: vec![Axis { n: e.shape()[2], left: of_e[2], right: of_low[2] }],
                inner_is_channels: false,
                b_loads: b_loads(&low.layout, false),
                c_width: Width::of(view.layout.in_fours(3)),
                count: run.count,
                step: [run.of_projection(of_e), of_low[run.axis], of_x[run.axis]],
            };
            product.dispatch(kernel_options, device)
        };
        self.runs([low, d_x.view]).into_iter().map(product).collect()
    }

    /// `d_projection = Σ low · xᵀ`, where `low` holds the gradient of what it names: over the
    /// batch, and over heads that share it.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn d_projection(
        &self,
        d_projection: Gradient<'a>,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<Dispatch<'a>, Error> {
        let LowRank { x, low, .. } = *self;
        let (of_x, of_low, of_e) = (x.strides(), low.strides(), d_projection.view.strides());
        let [batch, heads, length, dim] = x.shape();
        let axis = |n, a: usize| Axis { n, left: of_low[a], right: of_x[a] };
        let per_head = self.per_head();
        let inner = if per_head {
            vec![axis(batch, 0), axis(dim, 3)]
        } else {
            vec![axis(batch, 0), axis(heads, 1), axis(dim, 3)]
        };
        // Channels are the rows of B, keys its columns.
        let across = x.transposed(2, 3).layout;
        let product = Product {
            a: low,
            b: x,
            c: d_projection,
            rows: vec![Axis { n: low.shape()[2], left: of_low[2], right: of_e[2] }],
            cols: Axis { n: length, left: of_x[2], right: of_e[3] },
            inner,
            inner_is_channels: true,
            b_loads: b_loads(&across, across.in_fours(2)),
            c_width: Width::of(d_projection.view.layout.in_fours(3)),
            count: if per_head { heads } else { 1 },
            step: [of_low[1], of_x[1], of_e[1]],
        };
        product.dispatch(kernel_options, device)
    }
}

impl Run {
    /// The run's batch entries and heads of a tensor.
    fn of<'a>(&self, t: TensorView<'a>) -> TensorView<'a> {
        t.slice(0, self.batch.start, self.batch.len()).slice(1, self.heads.start, self.heads.len())
    }

    /// The run's heads of a projection.
    fn projection<'a>(&self, e: TensorView<'a>) -> TensorView<'a> {
        if self.per_head { e.slice(1, self.heads.start, self.heads.len()) } else { e }
    }

    /// From one product to the next in the projection.
    fn of_projection(&self, strides: [usize; 4]) -> usize {
        if self.per_head && self.axis == 1 { strides[1] } else { 0 }
    }
}

/// Writes or adds the rows of `x` that are `kept`, `[batch or 1, 1, 1, length]`, and zeros for the
/// others, to `y`.
pub(crate) fn keep_rows<'a>(
    x: TensorView<'a>,
    kept: TensorView<'a>,
    y: Gradient<'a>,
    device: &DeviceFacts,
) -> Dispatch<'a> {
    let [batch, heads, length, dim] = x.shape();
    let call = KeepRowsCall {
        x,
        kept,
        y: y.view,
        length: length as u32,
        dim: dim as u32,
        accumulates: y.accumulates,
    };
    call.dispatch([length.div_ceil(ROWS), heads, batch], device)
}
