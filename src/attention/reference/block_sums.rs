//! Sums of many terms, added in blocks.

use std::ops::Range;

use crate::tensor::Real;

/// Terms that are added one by one. The sums of blocks are added afterwards, as kernels add the
/// sums of splits. In f32, 2²⁰ equal terms that are added one by one have a relative error of 1e-2.
pub(super) const BLOCK: usize = 1 << 13;

/// Sums in blocks. The caller ends each block.
pub(super) struct BlockSums<R> {
    totals: Vec<R>,
    block: Vec<R>,
}

impl<R: Real> BlockSums<R> {
    /// Returns `len` sums, all zero.
    pub fn new(len: usize) -> Self {
        BlockSums { totals: vec![R::zero(); len], block: vec![R::zero(); len] }
    }

    pub fn len(&self) -> usize {
        self.totals.len()
    }

    /// Adds a term to the sum at `at`.
    pub fn add(&mut self, at: usize, term: R) {
        self.block[at] = self.block[at] + term;
    }

    /// Adds `factor · x` to the sums that start at `first`.
    pub fn add_scaled(&mut self, first: usize, factor: R, x: &[R]) {
        let sums = &mut self.block[first..][..x.len()];
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum = *sum + factor * *x);
    }

    /// Ends the block of the sums in `range`.
    pub fn end_block(&mut self, range: Range<usize>) {
        for (total, block) in self.totals[range.clone()].iter_mut().zip(&mut self.block[range]) {
            *total = *total + *block;
            *block = R::zero();
        }
    }

    /// Ends the last block of each sum and returns the sums.
    pub fn totals(mut self) -> Vec<R> {
        self.end_block(0..self.totals.len());
        self.totals
    }
}
