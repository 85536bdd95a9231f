//! The dispatches of attention within buckets. Tokens are hashed, sorted by bucket and copied in
//! this order. Attention along the order uses a window of two chunks. A last dispatch combines the
//! rounds. The module also records the gradients.

use super::kernels::lsh_codes::LshCodesCall;
use super::kernels::lsh_gather::{LshGatherCall, ROWS};
use super::kernels::lsh_gradients::LshGradientsCall;
use super::kernels::lsh_hash::{LshHashCall, WORKGROUP};
use super::kernels::lsh_merge::LshMergeCall;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, ScratchSize, Slot, fits, in_scratch};
use crate::matmul::projection::dispatch_backward::Gradient;
use crate::rows::radix_sort::dispatch::SortProblem;
use crate::tensor::{DType, Error, TensorView, count};

/// The sizes of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LshSizes {
    pub batch: usize,
    pub heads: usize,
    pub length: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub rounds: usize,
    pub n_buckets: usize,
    pub chunk: usize,
}

/// A hashed call: buckets `[batch, heads, rounds, length]`, and the lengths of sequences
/// `[batch or 1, 1, 1, 1]`, if there are any.
#[derive(Clone, Copy)]
pub(crate) struct LshRounds<'a> {
    pub sizes: LshSizes,
    pub buckets: TensorView<'a>,
    pub lengths: Option<TensorView<'a>>,
    /// The result of the sort: `order` has the token at each place, and `ranks` the place of each
    /// token.
    pub order: TensorView<'a>,
    pub ranks: TensorView<'a>,
    pub codes: TensorView<'a>,
}

impl LshSizes {
    /// Returns the number of copied rows before the sorted rows: the last chunk, if there are
    /// several chunks.
    pub fn ahead(&self) -> usize {
        if self.length > self.chunk { self.chunk } else { 0 }
    }

    pub fn chunks(&self) -> usize {
        self.length.div_ceil(self.chunk)
    }

    pub fn hashes(&self) -> [usize; 4] {
        [self.batch, self.heads, self.rounds, self.length]
    }

    /// Returns the shape of the sorted rows of all rounds, after `ahead` copied rows.
    pub fn sorted(&self, ahead: usize, dim: usize) -> [usize; 4] {
        [self.batch, self.heads.saturating_mul(self.rounds), self.length.saturating_add(ahead), dim]
    }

    fn codes(&self) -> [usize; 4] {
        self.sorted(self.ahead(), 2 * self.rounds + 1)
    }

    /// Returns the bits of a bucket number. One number more stands for rows that are not tokens.
    fn bits(&self) -> u32 {
        usize::BITS - self.n_buckets.leading_zeros()
    }
}

impl<'a> LshRounds<'a> {
    /// Places the order, ranks and codes in parts of the scratch.
    ///
    /// # Errors
    /// A scratch without these parts.
    pub fn new(
        sizes: LshSizes,
        buckets: TensorView<'a>,
        lengths: Option<TensorView<'a>>,
        part: &impl Fn(Slot) -> Result<&'a wgpu::Buffer, Error>,
    ) -> Result<Self, Error> {
        let hashes = sizes.hashes();
        let order = in_scratch(part(Slot::Order)?, DType::U32, hashes, 0);
        // One dispatch writes both, so each has a separate binding.
        let ranks = in_scratch(order.buffer, DType::U32, hashes, count(hashes).next_multiple_of(64));
        let codes = in_scratch(part(Slot::HashCodes)?, DType::U32, sizes.codes(), 0);
        Ok(LshRounds { sizes, buckets, lengths, order, ranks, codes })
    }

    fn sort(&self) -> SortProblem<'a> {
        let LshRounds { sizes, buckets, order, ranks, .. } = *self;
        SortProblem { keys: buckets, order, ranks: Some(ranks), bits: sizes.bits() }
    }

    /// Returns the temporary memory of the order.
    ///
    /// # Errors
    /// More elements than kernels can count or the device can bind.
    pub fn scratch_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let hashes = count(self.sizes.hashes()) as u64;
        let order = fits(hashes.saturating_add(63).saturating_mul(2), 4, device)?;
        let codes = fits(count(self.sizes.codes()) as u64, 4, device)?;
        let sort = self.sort().scratch_size(device)?;
        Ok(sort.with(Slot::Order, order).with(Slot::HashCodes, codes))
    }

    /// Writes the buckets of `qk`, hashed by `rotations`.
    pub fn hash(&self, qk: TensorView<'a>, rotations: TensorView<'a>, device: &DeviceFacts) -> Dispatch<'a> {
        let LshSizes { batch, heads, length, head_dim, rounds, n_buckets, .. } = self.sizes;
        let call = LshHashCall {
            qk,
            rotations,
            lengths: self.lengths,
            buckets: self.buckets,
            rounds: rounds as u32,
            length: length as u32,
            head_dim: head_dim as u32,
            half: (n_buckets / 2) as u32,
        };
        call.dispatch([length.div_ceil(WORKGROUP), heads * rounds, batch], device)
    }

    /// Sorts the tokens and writes the codes.
    ///
    /// # Errors
    /// A scratch without the parts of the sort.
    pub fn dispatches(
        &self,
        part: impl Fn(Slot) -> Result<&'a wgpu::Buffer, Error>,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let LshRounds { sizes, buckets, lengths, order, ranks, codes } = *self;
        let LshSizes { batch, heads, length, rounds, chunk, .. } = sizes;
        let mut dispatches = self.sort().dispatches(part, device)?;
        let call = LshCodesCall {
            buckets,
            order,
            ranks,
            lengths,
            codes,
            heads: heads as u32,
            rounds: rounds as u32,
            length: length as u32,
            chunk: chunk as u32,
            ahead: sizes.ahead() as u32,
        };
        let grid = [codes.shape()[2].div_ceil(WORKGROUP), heads * rounds, batch];
        dispatches.push(call.dispatch(grid, device));
        Ok(dispatches)
    }

    /// Copies the rows of `x` to `y` in bucket order. The shape of `y` tells if the copied rows
    /// ahead are needed. If `normalises`, each row is divided by its length.
    pub fn gather(
        &self,
        x: TensorView<'a>,
        y: TensorView<'a>,
        normalises: bool,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let LshSizes { batch, heads, length, rounds, chunk, .. } = self.sizes;
        let rows = y.shape()[2];
        let call = LshGatherCall {
            x,
            order: self.order,
            lengths: self.lengths,
            y,
            rounds: rounds as u32,
            length: length as u32,
            chunk: chunk as u32,
            ahead: (rows - length) as u32,
            dim: x.shape()[3] as u32,
            normalises,
        };
        call.dispatch([rows.div_ceil(ROWS), heads * rounds, batch], device)
    }

    /// Combines the rounds, in the order of the tokens.
    pub fn merge(
        &self,
        [part_out, part_lse]: [TensorView<'a>; 2],
        out: TensorView<'a>,
        lse: Option<TensorView<'a>>,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let LshSizes { batch, heads, length, value_dim, rounds, .. } = self.sizes;
        let call = LshMergeCall {
            part_out,
            part_lse,
            ranks: self.ranks,
            out,
            lse,
            rounds: rounds as u32,
            length: length as u32,
            value_dim: value_dim as u32,
            neg_inf: f32::NEG_INFINITY,
        };
        call.dispatch([length.div_ceil(ROWS), heads, batch], device)
    }

    /// Computes the gradient of rows from `d_keys`, the gradient of the sorted keys or values. For
    /// rows that are queries too, `queries` has the queries and their gradients.
    pub fn gradients(
        &self,
        d_keys: TensorView<'a>,
        queries: Option<(TensorView<'a>, TensorView<'a>)>,
        d_x: Gradient<'a>,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let LshSizes { batch, heads, length, rounds, chunk, .. } = self.sizes;
        let (x, d_queries) = queries.unzip();
        let call = LshGradientsCall {
            d_keys,
            d_queries,
            x,
            ranks: self.ranks,
            lengths: self.lengths,
            d_x: d_x.view,
            rounds: rounds as u32,
            length: length as u32,
            chunk: chunk as u32,
            ahead: (d_keys.shape()[2] - length) as u32,
            dim: d_x.view.shape()[3] as u32,
            accumulates: d_x.accumulates,
        };
        call.dispatch([length.div_ceil(ROWS), heads, batch], device)
    }
}
