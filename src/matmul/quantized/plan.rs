//! Tiles of products with quantised weights.

use super::format::QuantizedFormat;
use crate::device::DeviceFacts;
use crate::kernel::KernelOptions;
use crate::matmul::plan::{FEW_ROWS, MatmulShape, Tiles, tiles};

/// The tiles of a product with quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum QuantizedTiles {
    /// `rows` × `columns` per workgroup of a GPU. `lanes` invocations share a column.
    FewGpu {
        rows: u32,
        columns: u32,
        lanes: u32,
    },
    /// For software drivers: each invocation computes `rows` rows and `columns` columns, `lanes`
    /// apart.
    FewCpu {
        rows: u32,
        columns: u32,
        lanes: u32,
        /// True if rows of the weight are whole words.
        whole_words: bool,
    },
    Many(Tiles),
}

/// The tiles of a product with a weight in rows of `row_bytes`.
pub(crate) fn quantized_tiles(
    product: MatmulShape,
    format: QuantizedFormat,
    row_bytes: usize,
    kernel_options: &KernelOptions,
    device: &DeviceFacts,
) -> QuantizedTiles {
    let cpu = kernel_options.target.is_cpu(device);
    if product.rows > FEW_ROWS && !kernel_options.batch_invariant {
        return QuantizedTiles::Many(tiles(product, cpu, device));
    }
    let rows = product.rows.min(FEW_ROWS).next_power_of_two();
    if cpu {
        // An invocation loads elements of x once for all its columns. More columns are slower if
        // they do not fit in registers. Q8_0 rows also exceed the first-level cache (lavapipe 26, 8
        // lanes).
        let columns = match format {
            QuantizedFormat::Q8_0 => 2,
            QuantizedFormat::Q4_1 => 8,
        };
        let whole_words = row_bytes.is_multiple_of(4);
        return QuantizedTiles::FewCpu {
            rows: rows as u32,
            columns,
            lanes: device.lanes.max(8),
            whole_words,
        };
    }
    // Sixteen lanes process 128 weights at a time, so rows of 576 or 1536 leave few lanes idle.
    QuantizedTiles::FewGpu { rows: rows as u32, columns: 4, lanes: 16 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Target;

    #[test]
    fn few_rows_have_tiles_of_their_own() {
        let kernel_options = KernelOptions::new().target(Target::Software);
        for rows in 1..=FEW_ROWS {
            for (format, row_bytes, whole) in [
                (QuantizedFormat::Q4_1, 360, true),
                (QuantizedFormat::Q8_0, 34, false),
                (QuantizedFormat::Q8_0, 612, true),
            ] {
                let product = MatmulShape { batch: 1, rows, cols: 100 };
                let tiles = quantized_tiles(product, format, row_bytes, &kernel_options, &DeviceFacts::LEAST);
                let QuantizedTiles::FewCpu { rows: taken, whole_words, .. } = tiles else {
                    panic!("{tiles:?}")
                };
                assert!(taken as usize >= rows && whole_words == whole, "{tiles:?}");
            }
        }
        let many = MatmulShape { batch: 1, rows: FEW_ROWS + 1, cols: 4096 };
        assert!(matches!(
            quantized_tiles(many, QuantizedFormat::Q4_1, 360, &kernel_options, &DeviceFacts::LEAST),
            QuantizedTiles::Many(Tiles::Cpu { .. })
        ));
        let kernel_options = KernelOptions::new().target(Target::Gpu);
        let one = MatmulShape { batch: 1, rows: 1, cols: 4096 };
        let tiles = quantized_tiles(one, QuantizedFormat::Q4_1, 360, &kernel_options, &DeviceFacts::LEAST);
        assert_eq!(tiles, QuantizedTiles::FewGpu { rows: 1, columns: 4, lanes: 16 });
    }
}
