//! Tiles of products with quantised weights.

use super::matmul::{MatmulShape, Tiles, tiles};
use super::tuning::Tuning;
use crate::device::DeviceFacts;

/// How a product with quantised weights is shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum QuantizedTiles {
    /// `rows` × `columns` per workgroup of a GPU, each column by `lanes` invocations.
    FewGpu {
        rows: u32,
        columns: u32,
        lanes: u32,
    },
    /// The same of a software driver, `blocks` of a row at a time.
    FewCpu {
        rows: u32,
        columns: u32,
        blocks: u32,
    },
    Many(Tiles),
}

/// Invocations of a workgroup of `FewCpu`: as many as there are weights in a word of four bits each.
pub(crate) const FEW_LANES: u32 = 8;

/// As many rows as are computed together with one unpacking of the weights.
pub(crate) const FEW_ROWS: usize = 8;

/// Blocks whose part of x an invocation of a software driver holds, of all rows together: more is much text to compile.
const MOST_BLOCKS: usize = 48;

/// The tiles of a product with `blocks` in each row of the weight.
pub(crate) fn quantized_tiles(
    product: MatmulShape,
    blocks: usize,
    tuning: &Tuning,
    device: &DeviceFacts,
) -> QuantizedTiles {
    let cpu = tuning.form.is_cpu(device);
    if product.rows > FEW_ROWS {
        return QuantizedTiles::Many(tiles(product, cpu, device));
    }
    let rows = product.rows.next_power_of_two();
    if cpu {
        let most = (MOST_BLOCKS / rows).min(blocks).max(1);
        let blocks = (1..=most).rev().find(|n| blocks.is_multiple_of(*n)).unwrap_or(1) as u32;
        let columns = if product.cols < 1024 || rows > 4 { 32 } else { 64 };
        return QuantizedTiles::FewCpu { rows: rows as u32, columns, blocks };
    }
    // Sixteen lanes take 128 weights at a time: rows of 576 or 1536 leave few idle.
    QuantizedTiles::FewGpu { rows: rows as u32, columns: 4, lanes: 16 }
}
