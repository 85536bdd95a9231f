//! Dispatches for products with quantised weights and for rows of quantised tables, from checked
//! tensors.

use super::format::QuantizedFormat;
use super::kernels::{quantized_project, quantized_rows};
use super::plan::QuantizedTiles;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, KernelOptions, Width};
use crate::matmul::plan::MatmulShape;
use crate::matmul::{self, quantized};
use crate::tensor::{Layout, TensorView};

/// A checked quantised matrix.
#[derive(Clone, Copy)]
pub(crate) struct QuantizedOp<'a> {
    pub format: QuantizedFormat,
    pub rows: usize,
    pub columns: usize,
    pub row_bytes: usize,
    /// The whole matrix, as words.
    pub words: TensorView<'a>,
}

/// The largest number of workgroups along an axis. If there is more work, each workgroup repeats.
const MOST_GROUPS: usize = 65535;

impl<'a> QuantizedOp<'a> {
    fn first_byte(&self, device: &DeviceFacts) -> u32 {
        4 * self.words.window(device).layout.offset as u32
    }

    /// The product `y = x Wᵀ`. `x` is `[batch, 1, length, columns]`, and `y` is `[batch, heads,
    /// length, dim]` with `heads · dim` rows of the matrix.
    pub fn product(
        &self,
        x: TensorView<'a>,
        y: TensorView<'a>,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let [batch, _, length, dim] = y.shape();
        let Layout { shape, strides, .. } = x.layout;
        // The rows of all sequences form one matrix if they have one common stride.
        let one_matrix = batch == 1 || strides[0] == shape[2] * strides[2];
        let (batches, rows) = if one_matrix { (1, batch * length) } else { (batch, length) };
        let product = MatmulShape { batch: batches, rows, cols: self.rows };
        let tiles =
            quantized::plan::quantized_tiles(product, self.format, self.row_bytes, kernel_options, device);
        let few = |rows: u32, columns: u32| {
            let most = MOST_GROUPS.min(device.max_workgroups as usize);
            let groups = self.rows.div_ceil(columns as usize).min(most);
            let down = product.rows.div_ceil(rows as usize);
            // Neighbouring invocations store neighbouring elements, one element each.
            ([down, groups, batches], groups * columns as usize, Width::One)
        };
        let (counts, step, store) = match tiles {
            QuantizedTiles::FewGpu { rows, columns, .. } => few(rows, columns),
            QuantizedTiles::FewCpu { rows, columns, lanes, .. } => few(rows, columns * lanes),
            QuantizedTiles::Many(tiles) => {
                (matmul::plan::grid(tiles, product), 0, Width::of(y.layout.in_fours(3)))
            }
        };
        let call = quantized_project::QuantizedProjectCall {
            x,
            w: self.words,
            y,
            first_byte: self.first_byte(device),
            row_bytes: self.row_bytes as u32,
            features: self.columns as u32,
            cols: self.rows as u32,
            dim: dim as u32,
            rows: rows as u32,
            length: length as u32,
            step: step as u32,
            last_word: (self.first_byte(device) / 4) + (self.words.shape()[3] - 1) as u32,
            none: 0,
            format: self.format,
            tiles,
            width: Width::of(x.layout.in_fours(3)),
            store,
        };
        call.dispatch(counts, device)
    }

    /// Looks up the rows of `ids`, `[batch, 1, length, 1]`, and writes them to `out`, `[batch, 1,
    /// length, columns]`.
    pub fn rows(&self, ids: TensorView<'a>, out: TensorView<'a>, device: &DeviceFacts) -> Dispatch<'a> {
        let [batch, _, length, _] = out.shape();
        let fours = self.columns / 4;
        let work = length.saturating_mul(fours);
        let most = MOST_GROUPS.min(device.max_workgroups as usize);
        let groups = work.div_ceil(quantized_rows::WORKGROUP).min(most);
        let call = quantized_rows::QuantizedRowsCall {
            ids,
            w: self.words,
            out,
            first_byte: self.first_byte(device),
            row_bytes: self.row_bytes as u32,
            rows: self.rows as u32,
            fours: fours as u32,
            work: work as u32,
            step: (groups * quantized_rows::WORKGROUP) as u32,
            missing: f32::NAN.to_bits(),
            format: self.format,
            width: Width::of(out.layout.in_fours(3)),
        };
        call.dispatch([groups, 1, batch], device)
    }
}
