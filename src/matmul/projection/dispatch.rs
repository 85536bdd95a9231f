//! Dispatches of projections: up to three products in one dispatch, if the device's bindings allow
//! it.

use super::kernels::project::{PARTS, ProjectCall, ProjectPart};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, KernelOptions, Placed, Several, Width};
use crate::matmul::Activation;
use crate::matmul::plan::{self, ProductOutline};
use crate::tensor::{DType, Error, Layout, TensorView, Window};

/// `y = x Wᵀ + b` over checked tensors.
#[derive(Clone, Copy)]
pub(crate) struct LinearOp<'a> {
    /// `[batch, 1, length, features]`.
    pub x: TensorView<'a>,
    /// `[1, 1, heads · dim, features]`, or `[1, heads or 1, dim, features / heads]` if narrow.
    pub w: TensorView<'a>,
    /// `[1, 1, 1, heads · dim]`.
    pub bias: Option<TensorView<'a>>,
    /// `[batch, heads, length, dim]`.
    pub y: TensorView<'a>,
    pub narrow: bool,
    /// The activation that is applied to `x Wᵀ + b`. All products of a dispatch have the same one.
    pub activation: Option<Activation>,
}

impl LinearOp<'_> {
    /// The view of x for each product: `[batch, heads or 1, length, features of one product]`.
    fn x_layout(&self) -> Layout {
        let mut layout = self.x.layout;
        if self.narrow {
            layout.shape[1] = self.y.shape()[1];
            layout.shape[3] = self.w.shape()[3];
            layout.strides[1] = layout.shape[3] * layout.strides[3];
        }
        layout
    }

    /// True if the rows of all sequences have one common stride, so that they form one matrix.
    fn is_one_matrix(&self) -> bool {
        let Layout { shape, strides, .. } = self.x.layout;
        shape[0] == 1 || strides[0] == shape[2] * strides[2]
    }
}

/// The buffers that are bound for one kind of tensor, and the place of each part in them.
struct SharedWindows<'a> {
    windows: Vec<Window<'a>>,
    dtype: DType,
    /// Slot and element offset of each part.
    places: Vec<(usize, usize)>,
}

impl<'a> SharedWindows<'a> {
    fn bound(&self) -> Several<'a> {
        Several::of(self.windows.iter().copied(), self.dtype)
    }
}

/// Binds views. Views of one buffer share a binding if the device allows a binding of that size. A
/// binding has no byte of `others`.
fn bind<'a>(views: &[TensorView<'a>], others: &[Window<'a>], device: &DeviceFacts) -> SharedWindows<'a> {
    let mut windows: Vec<Window<'a>> = Vec::new();
    let mut slots = Vec::new();
    for view in views {
        let window = view.window(device);
        let joined = windows.iter_mut().enumerate().find_map(|(slot, shared)| {
            let start = shared.start.min(window.start);
            let size = (shared.start + shared.size).max(window.start + window.size) - start;
            let joined = Window { start, size, ..window };
            let is_apart = others.iter().all(|other| !other.meets(&joined));
            (shared.buffer == window.buffer && size <= device.max_binding_bytes && is_apart).then(|| {
                shared.start = start;
                shared.size = size;
                slot
            })
        });
        slots.push(joined.unwrap_or_else(|| {
            windows.push(window);
            windows.len() - 1
        }));
    }
    let places = slots.iter().zip(views).map(|(slot, view)| {
        let skipped = windows[*slot].start / view.dtype.bytes() as u64;
        (*slot, view.layout.offset - skipped as usize)
    });
    let dtype = views.first().map_or(DType::F32, |view| view.dtype);
    SharedWindows { places: places.collect(), dtype, windows }
}

/// The dispatches of `products`. It is one dispatch if their outputs share a buffer and the device
/// has enough bindings.
///
/// # Errors
/// `kernel_options` demands kernels that these products do not support.
pub(crate) fn dispatches<'a>(
    products: &[LinearOp<'a>],
    kernel_options: &KernelOptions,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    let mut dispatches = Vec::new();
    for part in products.chunks(PARTS) {
        dispatches.extend(together(part, kernel_options, device)?);
    }
    Ok(dispatches)
}

/// Puts up to [`PARTS`] products into one dispatch if possible. Otherwise the first product gets a
/// separate dispatch.
fn together<'a>(
    products: &[LinearOp<'a>],
    kernel_options: &KernelOptions,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    let Some((first, rest)) = products.split_first() else { return Ok(Vec::new()) };
    let bound = Bound::new(products, device);
    // All products of a dispatch have the same batch size.
    let one_batch = rest.iter().all(|p| p.x.shape()[0] == first.x.shape()[0]);
    let one_dispatch = rest.is_empty() || one_batch && bound.fits(device);
    if !one_dispatch {
        let mut split = together(&[*first], kernel_options, device)?;
        split.extend(together(rest, kernel_options, device)?);
        return Ok(split);
    }
    Ok(vec![dispatch(products, bound, kernel_options, device)?])
}

/// The buffers of all parts of a dispatch.
struct Bound<'a> {
    xs: SharedWindows<'a>,
    ws: SharedWindows<'a>,
    biases: Option<SharedWindows<'a>>,
    ys: SharedWindows<'a>,
}

impl<'a> Bound<'a> {
    fn new(products: &[LinearOp<'a>], device: &DeviceFacts) -> Self {
        let of =
            |view: &dyn Fn(&LinearOp<'a>) -> TensorView<'a>| products.iter().map(view).collect::<Vec<_>>();
        // Parts without a bias refer to the bias of another part, but do not read it.
        let biases = products.iter().find_map(|p| p.bias);
        let biases = biases.map_or(Vec::new(), |some| of(&|p| p.bias.unwrap_or(some)));
        let (xs, ws, ys) = (of(&|p| p.x), of(&|p| p.w), of(&|p| p.y));
        // Bindings of a buffer that the dispatch reads and writes must be apart.
        let is_read =
            |y: &TensorView| [&xs, &ws, &biases].into_iter().flatten().any(|t| t.buffer == y.buffer);
        let is_shared = ys.iter().any(is_read);
        let bind = |views: &[TensorView<'a>], others: [&[TensorView<'a>]; 3]| {
            let others = others.into_iter().flatten().filter(|_| is_shared);
            bind(views, &others.map(|view| view.window(device)).collect::<Vec<_>>(), device)
        };
        Bound {
            xs: bind(&xs, [&ws, &biases, &ys]),
            ws: bind(&ws, [&xs, &biases, &ys]),
            biases: (!biases.is_empty()).then(|| bind(&biases, [&xs, &ws, &ys])),
            ys: bind(&ys, [&xs, &ws, &biases]),
        }
    }

    /// True if one kernel can bind the buffers. Its output is one buffer.
    fn fits(&self, device: &DeviceFacts) -> bool {
        let count = |b: &SharedWindows| b.windows.len();
        let biases = self.biases.as_ref().map_or(0, count);
        let bindings = count(&self.xs) + count(&self.ws) + biases + count(&self.ys);
        bindings <= device.max_storage_buffers as usize && count(&self.ys) == 1
    }

    /// The kernel's parameters for the `n`-th product.
    fn part(&self, n: usize, product: &LinearOp, rows: usize) -> ProjectPart {
        let [_, heads, length, dim] = product.y.shape();
        let (x, w, y) = (product.x_layout(), product.w.layout, product.y.layout);
        // All heads share a narrow weight of one head.
        let w_head = if w.shape[1] == 1 { 0 } else { w.strides[1] };
        let (x_slot, x_offset) = self.xs.places[n];
        let (w_slot, w_offset) = self.ws.places[n];
        let (bias_slot, bias_offset) = self.biases.as_ref().map_or((0, 0), |b| b.places[n]);
        ProjectPart {
            x: x.strides.map(|s| s as u32),
            w: [w_head, w.strides[2], w.strides[3], w_offset].map(|s| s as u32),
            y: y.strides.map(|s| s as u32),
            x_offset: x_offset as u32,
            y_offset: self.ys.places[n].1 as u32,
            bias_offset: bias_offset as u32,
            bias_stride: product.bias.map_or(0, |b| b.strides()[3]) as u32,
            features: x.shape[3] as u32,
            dim: dim as u32,
            heads: heads as u32,
            has_bias: u32::from(product.bias.is_some()),
            x_slot: x_slot as u32,
            w_slot: w_slot as u32,
            bias_slot: bias_slot as u32,
            rows: rows as u32,
            length: length as u32,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        }
    }
}

/// The common shape of the products of a dispatch.
struct Together {
    /// True if the rows of all sequences form one matrix.
    one_matrix: bool,
    batches: usize,
    z_heads: usize,
}

impl Together {
    fn of(products: &[LinearOp]) -> Self {
        let one_matrix = products.iter().all(LinearOp::is_one_matrix);
        let batch = products.first().map_or(1, |p| p.x.shape()[0]);
        let heads = products.iter().filter(|p| p.narrow).map(|p| p.y.shape()[1]).max();
        Together { one_matrix, batches: if one_matrix { 1 } else { batch }, z_heads: heads.unwrap_or(1) }
    }

    fn rows(&self, product: &LinearOp) -> usize {
        let [batch, _, length, _] = product.y.shape();
        if self.one_matrix { batch * length } else { length }
    }

    fn shape(&self, products: &[LinearOp]) -> plan::MatmulShape {
        let cols = |p: &LinearOp| if p.narrow { p.y.shape()[3] } else { p.y.shape()[1] * p.y.shape()[3] };
        plan::MatmulShape {
            batch: products.len() * self.batches * self.z_heads,
            rows: products.iter().map(|p| self.rows(p)).max().unwrap_or(0),
            cols: products.iter().map(cols).max().unwrap_or(0),
        }
    }
}

/// Puts `products` into one dispatch.
fn dispatch<'a>(
    products: &[LinearOp<'a>],
    bound: Bound<'a>,
    kernel_options: &KernelOptions,
    device: &DeviceFacts,
) -> Result<Dispatch<'a>, Error> {
    let first = products[0];
    let together = Together::of(products);
    let mut parts = [bytemuck::Zeroable::zeroed(); PARTS];
    for (n, product) in products.iter().enumerate() {
        parts[n] = bound.part(n, product, together.rows(product));
    }
    let Together { batches, z_heads, .. } = together;
    let product = together.shape(products);
    let outline = outline(products, product, kernel_options);
    let tiles = plan::choose_product(&outline, device)?;
    let call = ProjectCall {
        x: bound.xs.bound(),
        w: bound.ws.bound(),
        bias: bound.biases.map_or(Several::of([], DType::F32), |biases| biases.bound()),
        y: Placed { window: bound.ys.windows[0], dtype: bound.ys.dtype },
        parts,
        batches: batches as u32,
        narrow: first.narrow.into(),
        z_heads: z_heads as u32,
        tiles,
        width: Width::of(outline.in_fours),
        w_along_columns: outline.w_along_columns,
        // Four output columns that are stored as a vec4 belong to one head.
        store: Width::of(products.iter().all(|p| p.y.layout.in_fours(3))),
        activation: first.activation,
    };
    Ok(call.dispatch(plan::grid(tiles, product), device))
}

/// The properties of `products` in one dispatch, for the plan.
pub(crate) fn outline_of(products: &[LinearOp], kernel_options: &KernelOptions) -> ProductOutline {
    outline(products, Together::of(products).shape(products), kernel_options)
}

/// The properties of `products`, for the plan. `product` is their common shape.
fn outline(
    products: &[LinearOp],
    product: plan::MatmulShape,
    kernel_options: &KernelOptions,
) -> ProductOutline {
    let x_fours = products.iter().all(|p| p.x_layout().in_fours(3));
    let w_fours = |axis| products.iter().all(|p| p.w.layout.in_fours(axis));
    let w_along_columns = !w_fours(3) && w_fours(2);
    let stored = products.first().map_or([DType::F32; 3], |p| [p.x.dtype, p.w.dtype, p.y.dtype]);
    ProductOutline {
        shape: product,
        inner: products.iter().map(|p| p.x_layout().shape[3]).max().unwrap_or(1),
        stored,
        in_fours: x_fours && (w_fours(3) || w_along_columns),
        w_along_columns,
        kernel_options: *kernel_options,
    }
}
