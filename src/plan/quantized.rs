//! Tiles of products with quantised weights.

use super::matmul::{MatmulShape, Tiles, tiles};
use super::tuning::Tuning;
use crate::device::DeviceFacts;

/// How a product with quantised weights is shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum QuantizedTiles {
    /// `rows` × `columns` per workgroup, each column by `lanes` invocations: every weight is unpacked once.
    Few {
        rows: u32,
        columns: u32,
        lanes: u32,
    },
    Many(Tiles),
}

/// As many rows as are computed together with one unpacking of the weights.
pub(crate) const FEW_ROWS: usize = 8;

/// The tiles of a product.
pub(crate) fn quantized_tiles(product: MatmulShape, tuning: &Tuning, device: &DeviceFacts) -> QuantizedTiles {
    let cpu = tuning.form.is_cpu(device);
    if product.rows > FEW_ROWS {
        return QuantizedTiles::Many(tiles(product, cpu, device));
    }
    let rows = product.rows.next_power_of_two() as u32;
    if cpu {
        let columns = (product.cols.next_power_of_two() as u32).clamp(device.lanes, 32);
        return QuantizedTiles::Few { rows, columns, lanes: 1 };
    }
    // Sixteen lanes take 128 weights at a time: rows of 576 or 1536 leave few idle.
    QuantizedTiles::Few { rows, columns: 4, lanes: 16 }
}
