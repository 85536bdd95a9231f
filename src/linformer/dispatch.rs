//! The dispatches of projections of keys and values along the length, and of their gradients.

use std::ops::Range;

use super::kernels::keep_rows::{KeepRowsCall, ROWS};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, KernelOptions, Width};
use crate::matmul::projection::dispatch_backward::{Axis, Gradient, Product, b_loads};
use crate::tensor::{Error, TensorView};

/// The projection `low = projection · x` of each head, with checked tensors.
#[derive(Clone, Copy)]
pub(crate) struct LowRank<'a> {
    /// `[1, heads or 1, rank, length]`.
    pub projection: TensorView<'a>,
    /// `[batch, heads, length, dim]`.
    pub x: TensorView<'a>,
    /// `[batch, heads, rank, dim]`.
    pub low: TensorView<'a>,
}

/// Several products in one dispatch, for batch entries and heads. `axis` is the axis from one
/// product to the next.
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

    /// Returns as few runs of products as the layouts of `x` and of tensors like `x` allow.
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

    /// Records `low = projection · x`.
    ///
    /// # Errors
    /// `kernel_options` that require an unsupported product, or disabled kernels without a
    /// replacement.
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

    /// Records `d_x = projectionᵀ · low`, where `low` holds the gradient of the projected tensor.
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

    /// Records `d_projection = Σ low · xᵀ`, where `low` holds the gradient of the projected tensor.
    /// The sum is over the batch, and over the heads that share the projection.
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
        // The rows of B are channels, and its columns are keys.
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
    /// Returns the run's batch entries and heads of a tensor.
    fn of<'a>(&self, t: TensorView<'a>) -> TensorView<'a> {
        t.slice(0, self.batch.start, self.batch.len()).slice(1, self.heads.start, self.heads.len())
    }

    /// Returns the run's heads of a projection.
    fn projection<'a>(&self, e: TensorView<'a>) -> TensorView<'a> {
        if self.per_head { e.slice(1, self.heads.start, self.heads.len()) } else { e }
    }

    /// Returns the stride from one product to the next in the projection.
    fn of_projection(&self, strides: [usize; 4]) -> usize {
        if self.per_head && self.axis == 1 { strides[1] } else { 0 }
    }
}

/// Writes to `y`, or adds, the rows of `x` for which `kept`, `[batch or 1, 1, 1, length]`, is true.
/// The other rows are zeros.
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
