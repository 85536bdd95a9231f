//! Masks by blocks: which rectangles of pairs are hidden, full, or to be asked pair by pair.

use crate::tensor::Error;

/// What a block map says of a block.
pub mod state {
    /// No query of the block sees any of its keys.
    pub const HIDDEN: u32 = 0;
    /// Every pair is asked by the other rules of the mask.
    pub const MIXED: u32 = 1;
    /// Every pair that `lengths`, `packed`, the causal rule or `prefix` permit is seen: no other
    /// rule is asked, and `bias` counts as 0. Softcap, ALiBi and the relative bias apply as
    /// everywhere.
    pub const FULL: u32 = 2;
}

/// A map of blocks of `size[0]` queries and `size[1]` keys.
///
/// `map` is `[batch, heads, ⌈q_len / size[0]⌉, ⌈kv_len / size[1]⌉]`, any may be 1, and holds a
/// [`state`] per block. On the fused path key tiles that lie in hidden blocks are never
/// loaded, and full blocks cost no mask arithmetic: use it for any block-sparse attention, or let
/// [`Attention::classify`](crate::Attention::classify) make one of any other mask and reuse it.
///
/// Blocks of at least 64 × 64 fit the kernels' tiles. On a device the dtype is U32.
#[doc(alias = "create_block_mask")]
#[doc(alias = "BlockMask")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Blocks<L> {
    /// The states.
    pub(crate) map: L,
    /// Queries and keys of a block.
    pub(crate) size: [usize; 2],
}

impl<L> Blocks<L> {
    /// A map of blocks of `size[0]` queries by `size[1]` keys.
    pub fn new(map: L, size: [usize; 2]) -> Self {
        Blocks { map, size }
    }
}

/// BigBird's map (Zaheer et al. 2020, "Big Bird: transformers for longer sequences") of `n × n`
/// blocks: each sees its neighbours up to `window` blocks away, the blocks listed in `globals` and,
/// in row `i`, those listed in `random[i]`; blocks in `globals` see all. Dense `[n, n]`, for
/// [`Blocks::new`] with shape `[1, 1, n, n]`.
///
/// # Errors
/// More blocks than a tensor can have.
pub fn big_bird(
    n: usize,
    window: usize,
    globals: &[usize],
    random: &[Vec<usize>],
) -> Result<Vec<u32>, Error> {
    if n > usize::from(u16::MAX) {
        return Err(Error::Option { option: "n", value: n as f64, expected: "below 2^16" });
    }
    let seen = |i: usize, j: usize| {
        i.abs_diff(j) <= window
            || globals.contains(&i)
            || globals.contains(&j)
            || random.get(i).is_some_and(|row| row.contains(&j))
    };
    let of = |i: usize, j: usize| if seen(i, j) { state::FULL } else { state::HIDDEN };
    Ok((0..n * n).map(|k| of(k / n, k % n)).collect())
}
