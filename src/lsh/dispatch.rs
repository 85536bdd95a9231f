//! Attention within buckets: tokens hashed, sorted and copied in the order of their buckets, then
//! attention along that order with a window of two chunks, then rounds together; and the gradients
//! of that.

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

/// What a call is made of.
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

/// A hashed call: buckets `[batch, heads, rounds, length]`, and lengths of sequences `[batch or 1,
/// 1, 1, 1]`, if they have some.
#[derive(Clone, Copy)]
pub(crate) struct LshRounds<'a> {
    pub sizes: LshSizes,
    pub buckets: TensorView<'a>,
    pub lengths: Option<TensorView<'a>>,
    /// Where the sort leaves which token stands where, and where each stands.
    pub order: TensorView<'a>,
    pub ranks: TensorView<'a>,
    pub codes: TensorView<'a>,
}

impl LshSizes {
    /// Rows that stand before those in order: the last chunk's, where there are several.
    pub fn ahead(&self) -> usize {
        if self.length > self.chunk { self.chunk } else { 0 }
    }

    pub fn chunks(&self) -> usize {
        self.length.div_ceil(self.chunk)
    }

    pub fn hashes(&self) -> [usize; 4] {
        [self.batch, self.heads, self.rounds, self.length]
    }

    /// Of rows in order, of all rounds, `ahead` of them before.
    pub fn sorted(&self, ahead: usize, dim: usize) -> [usize; 4] {
        [self.batch, self.heads.saturating_mul(self.rounds), self.length.saturating_add(ahead), dim]
    }

    fn codes(&self) -> [usize; 4] {
        self.sorted(self.ahead(), 2 * self.rounds + 1)
    }

    /// Bits of a bucket, of which there is one more for what is no token.
    fn bits(&self) -> u32 {
        usize::BITS - self.n_buckets.leading_zeros()
    }
}

impl<'a> LshRounds<'a> {
    /// Order, places and codes in these parts of the scratch.
    ///
    /// # Errors
    /// A scratch without them.
    pub fn new(
        sizes: LshSizes,
        buckets: TensorView<'a>,
        lengths: Option<TensorView<'a>>,
        part: &impl Fn(Slot) -> Result<&'a wgpu::Buffer, Error>,
    ) -> Result<Self, Error> {
        let hashes = sizes.hashes();
        let order = in_scratch(part(Slot::Order)?, DType::U32, hashes, 0);
        // Apart, as one dispatch writes both.
        let ranks = in_scratch(order.buffer, DType::U32, hashes, count(hashes).next_multiple_of(64));
        let codes = in_scratch(part(Slot::HashCodes)?, DType::U32, sizes.codes(), 0);
        Ok(LshRounds { sizes, buckets, lengths, order, ranks, codes })
    }

    fn sort(&self) -> SortProblem<'a> {
        let LshRounds { sizes, buckets, order, ranks, .. } = *self;
        SortProblem { keys: buckets, order, ranks: Some(ranks), bits: sizes.bits() }
    }

    /// The temporary memory of the order.
    ///
    /// # Errors
    /// More than kernels count, or the device binds.
    pub fn scratch_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let hashes = count(self.sizes.hashes()) as u64;
        let order = fits(hashes.saturating_add(63).saturating_mul(2), 4, device)?;
        let codes = fits(count(self.sizes.codes()) as u64, 4, device)?;
        let sort = self.sort().scratch_size(device)?;
        Ok(sort.with(Slot::Order, order).with(Slot::HashCodes, codes))
    }

    /// Writes the buckets of `qk` by `rotations`.
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

    /// Sorts, and writes the codes.
    ///
    /// # Errors
    /// A scratch without its parts.
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

    /// Rows of `x` in order, to `y`, which says whether those ahead are wanted; divided by their
    /// length if `normalises`.
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

    /// The rounds together, in the tokens' own order.
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

    /// The gradient of the rows that were keys or values in order, of which `d_keys` is the
    /// gradient; and queries, with their gradients, of rows that were both.
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
