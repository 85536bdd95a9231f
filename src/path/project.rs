//! Up to three products in one dispatch, or in as few as the device's bindings allow.

use super::dispatches::{Dispatches, grid};
use crate::device::DeviceFacts;
use crate::error::Error;
use crate::kernel::{Dispatch, Width};
use crate::kernels::KernelVariant;
use crate::kernels::project::{PARTS, Params, Project, ProjectPart};
use crate::kernels::slots::Slots;
use crate::plan::{self, Tiles, Tuning};
use crate::tensor::{DType, Layout, TensorView, Window};

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
}

impl LinearOp<'_> {
    /// x as each product sees it: `[batch, heads or 1, length, features of one product]`.
    fn x_layout(&self) -> Layout {
        let mut layout = self.x.layout;
        if self.narrow {
            layout.shape[1] = self.y.shape()[1];
            layout.shape[3] = self.w.shape()[3];
            layout.strides[1] = layout.shape[3] * layout.strides[3];
        }
        layout
    }

    /// Whether the rows of all sequences lie at one stride, so that they are one matrix.
    fn is_one_matrix(&self) -> bool {
        let Layout { shape, strides, .. } = self.x.layout;
        shape[0] == 1 || strides[0] == shape[2] * strides[2]
    }
}

/// Buffers bound for one kind of tensor, and where each part finds its own.
struct SharedWindows<'a> {
    windows: Vec<Window<'a>>,
    /// Slot and element offset of each part.
    places: Vec<(usize, usize)>,
}

/// Views of one buffer share a binding where that is not larger than the device allows.
fn bind<'a>(views: &[TensorView<'a>], device: &DeviceFacts) -> SharedWindows<'a> {
    let mut windows: Vec<Window<'a>> = Vec::new();
    let mut slots = Vec::new();
    for view in views {
        let window = view.window(device);
        let joined = windows.iter_mut().enumerate().find_map(|(slot, shared)| {
            let start = shared.start.min(window.start);
            let size = (shared.start + shared.size).max(window.start + window.size) - start;
            (shared.buffer == window.buffer && size <= device.max_binding_bytes).then(|| {
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
    SharedWindows { places: places.collect(), windows }
}

/// The dispatches of `products`: one where their outputs share a buffer and the bindings suffice.
///
/// # Errors
/// A `tuning` that insists on what these products cannot have.
pub(crate) fn dispatches<'a>(
    products: &[LinearOp<'a>],
    tuning: &Tuning,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    let mut dispatches = Vec::new();
    for part in products.chunks(PARTS) {
        dispatches.extend(together(part, tuning, device)?);
    }
    Ok(dispatches)
}

/// Up to [`PARTS`] products in one dispatch if it can be had, else the first apart.
fn together<'a>(
    products: &[LinearOp<'a>],
    tuning: &Tuning,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    let Some((first, rest)) = products.split_first() else { return Ok(Vec::new()) };
    let xs = bind(&products.iter().map(|p| p.x).collect::<Vec<_>>(), device);
    let ws = bind(&products.iter().map(|p| p.w).collect::<Vec<_>>(), device);
    // Parts without a bias point at another's and do not read it.
    let some_bias = products.iter().find_map(|p| p.bias);
    let biases =
        some_bias.map(|b| bind(&products.iter().map(|p| p.bias.unwrap_or(b)).collect::<Vec<_>>(), device));
    let ys = bind(&products.iter().map(|p| p.y).collect::<Vec<_>>(), device);
    let count = |b: &SharedWindows| b.windows.len();
    let bindings = count(&xs) + count(&ws) + biases.as_ref().map_or(0, count) + count(&ys);
    // One dispatch has one batch count.
    let one_batch = rest.iter().all(|p| p.x.shape()[0] == first.x.shape()[0]);
    let fits = one_batch && bindings <= device.max_storage_buffers as usize && count(&ys) == 1;
    if !fits && !rest.is_empty() {
        let mut split = together(&[*first], tuning, device)?;
        split.extend(together(rest, tuning, device)?);
        return Ok(split);
    }

    let one_matrix = products.iter().all(LinearOp::is_one_matrix);
    let [batch, ..] = first.x.shape();
    let batches = if one_matrix { 1 } else { batch };
    let z_heads = if first.narrow { products.iter().map(|p| p.y.shape()[1]).max().unwrap_or(1) } else { 1 };
    let mut parts = [bytemuck::Zeroable::zeroed(); PARTS];
    let (mut rows, mut cols) = (0, 0);
    for (n, given) in products.iter().enumerate() {
        let [_, heads, length, dim] = given.y.shape();
        let x = given.x_layout();
        let w = given.w.layout;
        let y = given.y.layout;
        // A narrow weight of one head serves all.
        let w_head = if w.shape[1] == 1 { 0 } else { w.strides[1] };
        let bias = given.bias.map_or(0, |b| b.strides()[3]);
        let (bias_slot, bias_offset) = biases.as_ref().map_or((0, 0), |b| b.places[n]);
        let part_rows = if one_matrix { batch * length } else { length };
        rows = rows.max(part_rows);
        cols = cols.max(if given.narrow { dim } else { heads * dim });
        parts[n] = ProjectPart {
            x: x.strides.map(|s| s as u32),
            w: [w_head, w.strides[2], w.strides[3], ws.places[n].1].map(|s| s as u32),
            y: y.strides.map(|s| s as u32),
            x_offset: xs.places[n].1 as u32,
            y_offset: ys.places[n].1 as u32,
            bias_offset: bias_offset as u32,
            bias_stride: bias as u32,
            features: x.shape[3] as u32,
            dim: dim as u32,
            heads: heads as u32,
            has_bias: u32::from(given.bias.is_some()),
            x_slot: xs.places[n].0 as u32,
            w_slot: ws.places[n].0 as u32,
            bias_slot: bias_slot as u32,
            rows: part_rows as u32,
            length: length as u32,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
    }

    let x_fours = products.iter().all(|p| p.x_layout().in_fours(3));
    let w_fours = |axis| products.iter().all(|p| p.w.layout.in_fours(axis));
    let w_along_columns = !w_fours(3) && w_fours(2);
    let product = plan::MatmulShape { batch: products.len() * batches * z_heads, rows, cols };
    let in_fours = x_fours && (w_fours(3) || w_along_columns);
    let halves = [first.x.dtype, first.w.dtype] == [DType::F16; 2];
    let dtype = if halves { DType::F16 } else { DType::F32 };
    let found = tuning.settle(plan::matrix_tiles(product, dtype, in_fours, tuning, device))?;
    let tiles = found.map_or_else(|| plan::tiles(product, tuning.form, device), Tiles::Matrix);
    let slots = |b: &SharedWindows, dtype: DType| Slots { count: b.windows.len(), dtype };
    let variant = Project {
        tiles,
        x: slots(&xs, first.x.dtype),
        w: slots(&ws, first.w.dtype),
        bias: biases.as_ref().zip(some_bias).map(|(b, bias)| slots(b, bias.dtype)),
        y: first.y.dtype,
        width: Width::of(in_fours),
        w_along_columns,
        // Four output columns at once lie in one head.
        store: Width::of(products.iter().all(|p| p.y.layout.in_fours(3))),
    };
    let params = Params {
        parts,
        batches: batches as u32,
        narrow: first.narrow.into(),
        z_heads: z_heads as u32,
        pad: 0,
    };
    let mut tensors = xs.windows;
    tensors.extend(ws.windows);
    tensors.extend(biases.map(|b| b.windows).unwrap_or_default());
    tensors.extend(ys.windows);
    Ok(vec![Dispatch {
        variant: KernelVariant::Project(variant),
        params: bytemuck::bytes_of(&params).to_vec(),
        tensors,
        grid: grid(plan::grid(tiles, product)),
    }])
}
