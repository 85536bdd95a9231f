//! Attention within buckets: tokens hashed, sorted and copied in the order of their buckets, then attention along that order with a
//! window of two chunks, then rounds together; and the gradients of that.

use super::dispatches::{Dispatches, fits, grid, in_scratch};
use super::project_backward::Gradient;
use super::radix_sort::SortProblem;
use crate::device::DeviceFacts;
use crate::error::Error;
use crate::kernel::{Dispatch, View};
use crate::kernels::KernelVariant;
use crate::kernels::lsh_codes::{self, LshCodes};
use crate::kernels::lsh_gather::{self, LshGather, ROWS};
use crate::kernels::lsh_gradients::{self, LshGradients};
use crate::kernels::lsh_hash::{self, LshHash, WORKGROUP};
use crate::kernels::lsh_merge::{self, LshMerge};
use crate::scratch::{ScratchSize, Slot};
use crate::tensor::{DType, TensorView, count};

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

/// A hashed call: buckets `[batch, heads, rounds, length]`, and lengths of sequences `[batch or 1, 1, 1, 1]`, if they have some.
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

fn view_of_lengths(lengths: Option<TensorView>, device: &DeviceFacts) -> View {
    lengths.map_or(View::default(), |t| View::repeating(t, device))
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
    pub fn hash(
        &self,
        qk: TensorView<'a>,
        rotations: TensorView<'a>,
        device: &DeviceFacts,
    ) -> Dispatch<'a, KernelVariant> {
        let LshSizes { batch, heads, length, head_dim, rounds, n_buckets, .. } = self.sizes;
        let params = lsh_hash::Params {
            qk: View::of(qk, device),
            rotations: View::of(rotations, device),
            lengths: view_of_lengths(self.lengths, device),
            buckets: View::of(self.buckets, device),
            rounds: rounds as u32,
            length: length as u32,
            head_dim: head_dim as u32,
            half: (n_buckets / 2) as u32,
        };
        let variant = LshHash { qk: qk.dtype, rotations: rotations.dtype, lengths: self.lengths.is_some() };
        Dispatch {
            variant: KernelVariant::LshHash(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: windows([Some(qk), Some(rotations), self.lengths, Some(self.buckets)], device),
            grid: grid([length.div_ceil(WORKGROUP), heads * rounds, batch]),
        }
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
        let params = lsh_codes::Params {
            buckets: View::of(buckets, device),
            order: View::of(order, device),
            ranks: View::of(ranks, device),
            lengths: view_of_lengths(lengths, device),
            heads: heads as u32,
            rounds: rounds as u32,
            length: length as u32,
            chunk: chunk as u32,
            ahead: sizes.ahead() as u32,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        dispatches.push(Dispatch {
            variant: KernelVariant::LshCodes(LshCodes { lengths: lengths.is_some() }),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: windows([Some(buckets), Some(order), Some(ranks), lengths, Some(codes)], device),
            grid: grid([codes.shape()[2].div_ceil(WORKGROUP), heads * rounds, batch]),
        });
        Ok(dispatches)
    }

    /// Rows of `x` in order, to `y`, which says whether those ahead are wanted; divided by their length if `normalises`.
    pub fn gather(
        &self,
        x: TensorView<'a>,
        y: TensorView<'a>,
        normalises: bool,
        device: &DeviceFacts,
    ) -> Dispatch<'a, KernelVariant> {
        let LshSizes { batch, heads, length, rounds, chunk, .. } = self.sizes;
        let rows = y.shape()[2];
        let params = lsh_gather::Params {
            x: View::of(x, device),
            y: View::of(y, device),
            order: View::of(self.order, device),
            lengths: view_of_lengths(self.lengths, device),
            rounds: rounds as u32,
            length: length as u32,
            chunk: chunk as u32,
            ahead: (rows - length) as u32,
            dim: x.shape()[3] as u32,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let variant = LshGather { dtype: x.dtype, normalises, lengths: self.lengths.is_some() };
        Dispatch {
            variant: KernelVariant::LshGather(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: windows([Some(x), Some(self.order), self.lengths, Some(y)], device),
            grid: grid([rows.div_ceil(ROWS), heads * rounds, batch]),
        }
    }

    /// The rounds together, in the tokens' own order.
    pub fn merge(
        &self,
        [part_out, part_lse]: [TensorView<'a>; 2],
        out: TensorView<'a>,
        lse: Option<TensorView<'a>>,
        device: &DeviceFacts,
    ) -> Dispatch<'a, KernelVariant> {
        let LshSizes { batch, heads, length, value_dim, rounds, .. } = self.sizes;
        let params = lsh_merge::Params {
            part_out: View::of(part_out, device),
            part_lse: View::of(part_lse, device),
            ranks: View::of(self.ranks, device),
            out: View::of(out, device),
            lse: View::optional(lse, device),
            rounds: rounds as u32,
            length: length as u32,
            value_dim: value_dim as u32,
            neg_inf: f32::NEG_INFINITY,
        };
        Dispatch {
            variant: KernelVariant::LshMerge(LshMerge { dtype: out.dtype, lse: lse.is_some() }),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: windows([Some(part_out), Some(part_lse), Some(self.ranks), Some(out), lse], device),
            grid: grid([length.div_ceil(ROWS), heads, batch]),
        }
    }

    /// The gradient of the rows that were keys or values in order, of which `d_keys` is the gradient; and queries, with their gradients, of
    /// rows that were both.
    pub fn gradients(
        &self,
        d_keys: TensorView<'a>,
        queries: Option<(TensorView<'a>, TensorView<'a>)>,
        d_x: Gradient<'a>,
        device: &DeviceFacts,
    ) -> Dispatch<'a, KernelVariant> {
        let LshSizes { batch, heads, length, rounds, chunk, .. } = self.sizes;
        let (x, d_queries) = queries.unzip();
        let or_none = |t: Option<TensorView>| View::optional(t, device);
        let params = lsh_gradients::Params {
            d_keys: View::of(d_keys, device),
            d_queries: or_none(d_queries),
            x: or_none(x),
            d_x: View::of(d_x.view, device),
            ranks: View::of(self.ranks, device),
            lengths: view_of_lengths(self.lengths, device),
            rounds: rounds as u32,
            length: length as u32,
            chunk: chunk as u32,
            ahead: (d_keys.shape()[2] - length) as u32,
            dim: d_x.view.shape()[3] as u32,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let variant = LshGradients {
            x: x.map(|x| x.dtype),
            d_x: d_x.view.dtype,
            lengths: self.lengths.is_some(),
            accumulates: d_x.accumulates,
        };
        let tensors = [Some(d_keys), d_queries, x, Some(self.ranks), self.lengths, Some(d_x.view)];
        Dispatch {
            variant: KernelVariant::LshGradients(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors: windows(tensors, device),
            grid: grid([length.div_ceil(ROWS), heads, batch]),
        }
    }
}

fn windows<'a, const N: usize>(
    tensors: [Option<TensorView<'a>>; N],
    device: &DeviceFacts,
) -> Vec<crate::tensor::Window<'a>> {
    tensors.into_iter().flatten().map(|t| t.window(device)).collect()
}
