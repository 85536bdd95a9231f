//! Plans of the gradient of a tensor that a score function captures.

use crate::device::DeviceFacts;
use crate::kernel::KernelOptions;
use crate::kernel::pieces::{Piece, pieces, steps};
use crate::matmul::plan::ENOUGH_WORKGROUPS;
use crate::tensor::{Error, Shape, count};

/// The number of workgroups that keep a large GPU busy.
const ENOUGH: usize = 2 * ENOUGH_WORKGROUPS;

/// The least pairs of a workgroup.
const LEAST_PAIRS: usize = 1024;

/// The most pairs of a workgroup, which counts them in u32.
const MOST_PAIRS: usize = 1 << 31;

/// The most parts of all elements in scratch: 1 MiB, or more if there are too many pairs.
const MOST_SUMS: usize = 1 << 18;

/// The plan of one kernel of captured gradients. It is cut into dispatches later.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CapturedGradientsPlan {
    /// The index of the captured tensor.
    pub captured: usize,
    /// Parts of an element. If there are several, scratch holds them.
    pub parts: usize,
    /// Queries of each part.
    pub part_rows: usize,
    elements: usize,
    grid: [usize; 3],
    steps: [usize; 3],
}

impl CapturedGradientsPlan {
    pub const WORKGROUP: u32 = 64;
    /// Elements of a workgroup: 8 KiB.
    pub const TILE: u32 = 2048;

    /// Plans the kernel. `shape` is the problem's shape, with only the keys that the score function
    /// covers.
    ///
    /// # Errors
    /// Returns an error if there would be too many dispatches.
    pub fn new(
        captured: usize,
        elements: usize,
        shape: &Shape,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<Self, Error> {
        let rows = count(shape.lse());
        let keys = shape.kv_len.max(1);
        let tiles = elements.div_ceil(Self::TILE as usize);
        let worth = rows.saturating_mul(keys) / LEAST_PAIRS;
        let most = (ENOUGH / tiles).min(MOST_SUMS / elements);
        let parts = worth.min(most).max(rows.div_ceil((MOST_PAIRS / keys).max(1))).clamp(1, rows);
        let part_rows = rows.div_ceil(parts);
        let parts = rows.div_ceil(part_rows);
        let work = 2.0 * part_rows as f64 * keys as f64 * (shape.head_dim + shape.value_dim) as f64;
        let grid = [tiles.saturating_mul(parts), 1, 1];
        let steps = steps(grid, work, kernel_options.most_work(), device)?;
        Ok(CapturedGradientsPlan { captured, parts, part_rows, elements, grid, steps })
    }

    /// The bytes of the parts in scratch.
    pub fn part_bytes(&self) -> u64 {
        if self.parts == 1 { 0 } else { 4 * self.parts as u64 * self.elements as u64 }
    }

    /// Returns the dispatches that the grid is cut into.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + use<> {
        pieces(self.grid, self.steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_every_query_once_and_pairs_are_counted_in_u32() {
        for (batch, heads, q_len, kv_len) in
            [(1, 1, 1, 1), (1, 32, 4096, 4096), (7, 3, 1001, 5), (64, 64, 4096, 1 << 20)]
        {
            let shape = Shape { batch, heads, q_len, kv_len, ..Shape::new(1, 1, 1, 64) };
            for elements in [1, 72, 5000, 1 << 20] {
                let plan = CapturedGradientsPlan::new(
                    0,
                    elements,
                    &shape,
                    &KernelOptions::new(),
                    &DeviceFacts::LEAST,
                );
                let Ok(CapturedGradientsPlan { parts, part_rows, .. }) = plan else {
                    // Too much work for the number of dispatches.
                    assert!(
                        (elements * batch * heads) as f64 * (q_len * kv_len) as f64 > 1e15,
                        "{shape:?} {elements}"
                    );
                    continue;
                };
                let rows = batch * heads * q_len;
                assert!(parts * part_rows >= rows && (parts - 1) * part_rows < rows, "{shape:?} {elements}");
                assert!(part_rows * kv_len <= MOST_PAIRS, "{shape:?} {elements}");
                let few = rows * kv_len <= MOST_PAIRS;
                assert!(parts == 1 || !few || parts * elements <= MOST_SUMS, "{shape:?} {elements}");
            }
        }
    }
}
