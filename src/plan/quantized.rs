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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::KernelForm;

    #[test]
    fn a_few_rows_take_whole_parts_of_a_row() {
        let tuning = Tuning::new().form(KernelForm::Cpu);
        for rows in 1..=FEW_ROWS {
            for blocks in 1..=200 {
                let product = MatmulShape { batch: 1, rows, cols: 100 };
                let tiles = quantized_tiles(product, blocks, &tuning, &DeviceFacts::LEAST);
                let QuantizedTiles::FewCpu { rows: taken, blocks: part, columns } = tiles else {
                    panic!("{tiles:?}");
                };
                assert!(blocks.is_multiple_of(part as usize) && taken as usize >= rows);
                assert!((part * taken) as usize <= MOST_BLOCKS, "{tiles:?}");
                assert!(4 * FEW_LANES * columns * taken <= DeviceFacts::LEAST.workgroup_memory);
            }
        }
        let many = MatmulShape { batch: 1, rows: FEW_ROWS + 1, cols: 4096 };
        assert!(matches!(
            quantized_tiles(many, 18, &tuning, &DeviceFacts::LEAST),
            QuantizedTiles::Many(Tiles::Cpu { .. })
        ));
        let tuning = Tuning::new().form(KernelForm::Gpu);
        let one = MatmulShape { batch: 1, rows: 1, cols: 4096 };
        let tiles = quantized_tiles(one, 18, &tuning, &DeviceFacts::LEAST);
        assert_eq!(tiles, QuantizedTiles::FewGpu { rows: 1, columns: 4, lanes: 16 });
    }
}
