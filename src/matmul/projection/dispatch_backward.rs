//! Gradients of projections: products for the gradients of input and weight, column sums for the
//! gradient of the bias.

use super::kernels::column_sums::{COLUMNS, ColumnSumsCall};
use super::kernels::project_backward::{LEVELS, ProductAxis, ProjectBackwardCall};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, KernelOptions, Width};
use crate::matmul::plan::{self, MatmulShape, Tiles};
use crate::tensor::{Error, Layout, TensorView};

/// A gradient: its output, and whether the kernel adds to the output.
#[derive(Clone, Copy)]
pub(crate) struct Gradient<'a> {
    pub view: TensorView<'a>,
    pub accumulates: bool,
}

/// The requested gradients of one projection, of checked tensors.
#[derive(Clone, Copy)]
pub(crate) struct LinearBackward<'a> {
    /// `[1, 1, heads · dim, features]`, or `[1, heads or 1, dim, features / heads]` if narrow.
    pub w: TensorView<'a>,
    /// `[batch, heads, length, dim]`.
    pub d_y: TensorView<'a>,
    /// `[batch, 1, length, features]`.
    pub d_x: Option<Gradient<'a>>,
    /// x, with the shape of `d_x`, and the gradient of the weight, with the shape of `w`.
    pub d_w: Option<(TensorView<'a>, Gradient<'a>)>,
    /// `[1, 1, 1, heads · dim]`.
    pub d_b: Option<Gradient<'a>>,
    pub narrow: bool,
}

/// An axis that two tensors have: its elements, and its stride in each tensor.
#[derive(Clone, Copy)]
pub(crate) struct Axis {
    pub n: usize,
    pub left: usize,
    pub right: usize,
}

/// Merges `axes`, the outermost first, into one axis of a product. Also returns the number of
/// levels that are left.
fn nested(axes: &[Axis]) -> (ProductAxis, u32) {
    let mut levels: Vec<Axis> = Vec::new();
    for axis in axes.iter().rev().filter(|axis| axis.n > 1) {
        let follows = |top: &&mut Axis| {
            let next = |stride: usize| stride as u64 * top.n as u64;
            next(top.left) == axis.left as u64 && next(top.right) == axis.right as u64
        };
        match levels.last_mut().filter(follows) {
            Some(top) => top.n *= axis.n,
            None => levels.push(*axis),
        }
    }
    let total: usize = levels.iter().map(|axis| axis.n).product();
    let mut product = ProductAxis::default();
    product.lengths[0] = total as u32;
    for (level, axis) in levels.iter().enumerate().take(LEVELS) {
        product.lengths[level + 1] = axis.n as u32;
        (product.left[level], product.right[level]) = (axis.left as u32, axis.right as u32);
    }
    (product, levels.len().max(1) as u32)
}

/// The loads of B: their width, and whether they go along B's columns.
pub(crate) fn b_loads(layout: &Layout, inner_fours: bool) -> (Width, bool) {
    let along_n = layout.in_fours(3);
    if along_n || inner_fours {
        return (Width::Four, along_n);
    }
    (Width::One, layout.strides[2] != 1 || layout.strides[3] == 1)
}

/// The product C = A · B, `count` times.
pub(crate) struct Product<'a> {
    pub a: TensorView<'a>,
    pub b: TensorView<'a>,
    pub c: Gradient<'a>,
    pub rows: Vec<Axis>,
    pub cols: Axis,
    pub inner: Vec<Axis>,
    /// True if the inner axis is A's channels. A is then loaded along it.
    pub inner_is_channels: bool,
    pub b_loads: (Width, bool),
    pub c_width: Width,
    pub count: usize,
    /// The steps from one product to the next in A, B and C.
    pub step: [usize; 3],
}

impl<'a> LinearBackward<'a> {
    /// The view of x or its gradient for each product: `[batch, heads or 1, length, features of one
    /// product]`.
    fn split(&self, mut layout: Layout) -> Layout {
        if self.narrow {
            layout.shape[1] = self.d_y.shape()[1];
            layout.shape[3] = self.w.shape()[3];
            layout.strides[1] = layout.shape[3] * layout.strides[3];
        }
        layout
    }

    /// The axes of batch entries and rows, in d_y and in x or its gradient.
    fn row_axes(&self, x: &Layout) -> [Axis; 2] {
        let d_y = &self.d_y.layout;
        [0, 2].map(|axis| Axis { n: d_y.shape[axis], left: d_y.strides[axis], right: x.strides[axis] })
    }

    /// The axes of heads and channels, in d_y and in the weight or its gradient. Narrow products
    /// have no axis of heads.
    fn channel_axes(&self, w: &Layout) -> Vec<Axis> {
        let Layout { shape: [_, heads, _, dim], strides, .. } = self.d_y.layout;
        let channels = Axis { n: dim, left: strides[3], right: w.strides[2] };
        let heads = Axis { n: heads, left: strides[1], right: dim.saturating_mul(w.strides[2]) };
        if self.narrow { vec![channels] } else { vec![heads, channels] }
    }

    /// `d_x = d_y W`
    fn d_x(&self, c: Gradient<'a>) -> Product<'a> {
        let (w, d_x) = (self.w.layout, self.split(c.view.layout));
        let count = if self.narrow { self.d_y.shape()[1] } else { 1 };
        Product {
            a: self.d_y,
            b: self.w,
            c,
            rows: self.row_axes(&d_x).to_vec(),
            cols: Axis { n: w.shape[3], left: w.strides[3], right: d_x.strides[3] },
            inner: self.channel_axes(&w),
            inner_is_channels: true,
            b_loads: b_loads(&w, w.in_fours(2)),
            c_width: Width::of(d_x.in_fours(3)),
            count,
            // All heads share a narrow weight of one head.
            step: [self.d_y.strides()[1], if w.shape[1] == 1 { 0 } else { w.strides[1] }, d_x.strides[1]],
        }
    }

    /// `d_W = d_yᵀ x`
    fn d_w(&self, b: TensorView<'a>, c: Gradient<'a>) -> Product<'a> {
        let (x, d_w) = (self.split(b.layout), c.view.layout);
        let mut inner = self.row_axes(&x).to_vec();
        let mut count = 1;
        if self.narrow && d_w.shape[1] > 1 {
            count = d_w.shape[1];
        } else if self.narrow {
            // The gradient of a weight that all heads share is a sum over the heads.
            inner.push(Axis { n: self.d_y.shape()[1], left: self.d_y.strides()[1], right: x.strides[1] });
        }
        Product {
            a: self.d_y,
            b,
            c,
            rows: self.channel_axes(&d_w),
            cols: Axis { n: d_w.shape[3], left: x.strides[3], right: d_w.strides[3] },
            inner,
            inner_is_channels: false,
            b_loads: b_loads(&x, false),
            c_width: Width::of(d_w.in_fours(3)),
            count,
            step: [self.d_y.strides()[1], x.strides[1], d_w.strides[1]],
        }
    }
}

/// Sums `d_y`, `[batch, heads, length, dim]`, over all rows of all sequences into `c`, `[1, 1, 1,
/// heads · dim]`.
pub(crate) fn column_sums<'a>(d_y: TensorView<'a>, c: Gradient<'a>, device: &DeviceFacts) -> Dispatch<'a> {
    let [batch, heads, length, dim] = d_y.shape();
    let sums = c.view.window(device).layout;
    let columns = heads.saturating_mul(dim);
    let call = ColumnSumsCall {
        d_y,
        sums: c.view,
        first: sums.offset as u32,
        stride: sums.strides[3] as u32,
        columns: columns as u32,
        dim: dim as u32,
        rows: (batch * length) as u32,
        length: length as u32,
        accumulates: c.accumulates,
    };
    call.dispatch([columns.div_ceil(COLUMNS), 1, 1], device)
}

impl<'a> Product<'a> {
    pub(crate) fn dispatch(
        self,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<Dispatch<'a>, Error> {
        let (rows, row_levels) = nested(&self.rows);
        let (inner, inner_levels) = nested(&self.inner);
        let (cols, _) = nested(&[self.cols]);
        let shape =
            MatmulShape { batch: self.count, rows: rows.lengths[0] as usize, cols: cols.lengths[0] as usize };
        let tiles = plan::choose_gradient(shape, kernel_options, device)?;
        let d_y = &self.a.layout;
        // The variant for software drivers broadcasts A. It loads single elements if A is not
        // contiguous along the inner axis.
        let gpu = matches!(tiles, Tiles::Gpu { .. });
        let along_rows = d_y.strides[2] == 1 && d_y.strides[3] != 1;
        let a_along_m = gpu && !self.inner_is_channels && !along_rows;
        let [step_a, step_b, step_c] = self.step.map(|n| if self.count > 1 { n as u32 } else { 0 });
        let first = |t: TensorView| t.window(device).layout.offset as u32;
        let call = ProjectBackwardCall {
            d_y: self.a,
            other: self.b,
            result: self.c.view,
            rows,
            cols,
            inner,
            first: [first(self.a), first(self.b), first(self.c.view), 0],
            step: [step_a, step_b, step_c, 0],
            tiles,
            a_along_m,
            b_along_n: self.b_loads.1,
            a_width: Width::of((a_along_m || self.inner_is_channels) && d_y.in_fours(3)),
            b_width: self.b_loads.0,
            c_width: self.c_width,
            row_levels,
            inner_levels,
            accumulates: self.c.accumulates,
        };
        Ok(call.dispatch(plan::grid(tiles, shape), device))
    }
}

/// The dispatches of all requested gradients, in order. A dispatch that adds to a gradient follows
/// the dispatch that writes it.
///
/// # Errors
/// `kernel_options` demands kernels that these products do not support, or the kernels are disabled
/// and no other kernel replaces them.
pub(crate) fn dispatches<'a>(
    calls: &[LinearBackward<'a>],
    kernel_options: &KernelOptions,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    let mut dispatches = Vec::new();
    for call in calls {
        if let Some(d_x) = call.d_x {
            dispatches.push(call.d_x(d_x).dispatch(kernel_options, device)?);
        }
        if let Some((x, d_w)) = call.d_w {
            dispatches.push(call.d_w(x, d_w).dispatch(kernel_options, device)?);
        }
        if let Some(d_b) = call.d_b {
            dispatches.push(column_sums(call.d_y, d_b, device));
        }
    }
    Ok(dispatches)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn levels(axes: &[[usize; 3]]) -> (ProductAxis, u32) {
        let axes: Vec<_> =
            axes.iter().map(|[n, left, right]| Axis { n: *n, left: *left, right: *right }).collect();
        nested(&axes)
    }

    #[test]
    fn axes_that_continue_each_other_are_one() {
        let (axis, count) = levels(&[[2, 12, 40], [3, 4, 8]]);
        assert_eq!((axis.lengths, count), ([6, 3, 2, 0], 2));
        assert_eq!((axis.left, axis.right), ([4, 12, 0, 0], [8, 40, 0, 0]));
        let (axis, count) = levels(&[[2, 12, 24], [3, 4, 8]]);
        assert_eq!(
            (axis.lengths, axis.left, axis.right, count),
            ([6, 6, 0, 0], [4, 0, 0, 0], [8, 0, 0, 0], 1)
        );
        // The stride of an axis of one element does not matter.
        let (axis, count) = levels(&[[5, 7, 1], [1, usize::MAX, usize::MAX]]);
        assert_eq!(
            (axis.lengths, axis.left, axis.right, count),
            ([5, 5, 0, 0], [7, 0, 0, 0], [1, 0, 0, 0], 1)
        );
        let (axis, count) = levels(&[[1, 9, 9]]);
        assert_eq!((axis.lengths, count), ([1, 0, 0, 0], 1));
        let (axis, count) = levels(&[[2, 100, 7], [3, 10, 5], [4, 1, 1]]);
        assert_eq!((axis.lengths, count), ([24, 4, 3, 2], 3));
        assert_eq!((axis.left, axis.right), ([1, 10, 100, 0], [1, 5, 7, 0]));
    }
}
