//! Dispatches of a stable sort of rows of numbers, with four bits per pass.

use super::kernels::radix_sort_count::{BITS, BLOCK, DIGITS, RadixSortCountCall};
use super::kernels::radix_sort_scan::RadixSortScanCall;
use super::kernels::radix_sort_scatter::RadixSortScatterCall;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, ScratchSize, Slot, fits, in_scratch};
use crate::tensor::{DType, Error, TensorView, count};

/// Checked tensors `[batch, heads, rows, length]` of U32. Each row is sorted separately.
#[derive(Clone, Copy)]
pub(crate) struct SortProblem<'a> {
    pub keys: TensorView<'a>,
    pub order: TensorView<'a>,
    pub ranks: Option<TensorView<'a>>,
    /// The number of low bits of the sort key, 1 to 32.
    pub bits: u32,
}

impl<'a> SortProblem<'a> {
    fn passes(&self) -> u32 {
        self.bits.div_ceil(BITS)
    }

    fn blocks(&self) -> usize {
        self.keys.shape()[3].div_ceil(BLOCK)
    }

    /// The temporary memory that the sort needs.
    ///
    /// # Errors
    /// The device cannot bind this much memory.
    pub fn scratch_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let [batch, heads, rows, _] = self.keys.shape();
        let counts = fits(count([batch, heads, rows, DIGITS * self.blocks()]) as u64, 4, device)?;
        let before = if self.passes() > 1 { count(self.keys.shape()) as u64 } else { 0 };
        let before = fits(before, 4, device)?;
        Ok(ScratchSize::default().with(Slot::DigitCounts, counts).with(Slot::OrderBefore, before))
    }

    /// The dispatches of the sort. `part` returns the parts of the scratch.
    ///
    /// # Errors
    /// A part of the scratch is missing.
    pub fn dispatches(
        &self,
        part: impl Fn(Slot) -> Result<&'a wgpu::Buffer, Error>,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let SortProblem { keys, order, .. } = *self;
        let shape = keys.shape();
        let [batch, heads, rows, length] = shape;
        let blocks = self.blocks();
        let counts =
            in_scratch(part(Slot::DigitCounts)?, DType::U32, [batch, heads, rows, DIGITS * blocks], 0);
        let passes = self.passes();
        let other = match passes {
            1 => None,
            _ => Some(in_scratch(part(Slot::OrderBefore)?, DType::U32, shape, 0)),
        };
        // The last pass writes `order`. The passes before it alternate between the two buffers.
        let after =
            |pass: u32| if (passes - 1 - pass).is_multiple_of(2) { order } else { other.unwrap_or(order) };
        let grid = [blocks, heads * rows, batch];
        let mut dispatches = Dispatches::new();
        for pass in 0..passes {
            let before = (pass > 0).then(|| after(pass - 1));
            let count = RadixSortCountCall {
                keys,
                before,
                counts,
                heads: heads as u32,
                rows: rows as u32,
                length: length as u32,
                blocks: blocks as u32,
                shift: pass * BITS,
                digit_mask: (1 << BITS.min(self.bits - pass * BITS)) - 1,
            };
            let scan =
                RadixSortScanCall { counts, length: (DIGITS * blocks) as u32, heads: (heads * rows) as u32 };
            let scatter = RadixSortScatterCall {
                keys,
                before,
                counts,
                order: after(pass),
                ranks: self.ranks.filter(|_| pass == passes - 1),
                heads: count.heads,
                rows: count.rows,
                length: count.length,
                blocks: count.blocks,
                shift: count.shift,
                digit_mask: count.digit_mask,
            };
            dispatches.extend([
                count.dispatch(grid, device),
                scan.dispatch([heads * rows, batch, 1], device),
                scatter.dispatch(grid, device),
            ]);
        }
        Ok(dispatches)
    }
}
