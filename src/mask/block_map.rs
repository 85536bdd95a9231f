//! Block maps of masks: each block of pairs is hidden, full, or checked pair by pair.

use crate::tensor::Error;

/// The states of a block in a map.
pub mod state {
    /// No query of the block sees any of its keys.
    pub const HIDDEN: u32 = 0;
    /// The other rules of the mask decide each pair.
    pub const MIXED: u32 = 1;
    /// `lengths`, `packed`, the causal rule and `prefix` alone decide each pair, and `bias` counts
    /// as 0. Softcap, ALiBi and the relative bias apply as everywhere.
    pub const FULL: u32 = 2;
}

/// A map of blocks of `size[0]` queries and `size[1]` keys. Use it for any block-sparse attention.
///
/// `map` is `[batch, heads, ⌈q_len / size[0]⌉, ⌈kv_len / size[1]⌉]`, any may be 1, and holds a
/// [`state`] per block. The fused path never loads key tiles in hidden blocks. Full blocks cost no
/// mask arithmetic. [`Attention::classify`](crate::Attention::classify) computes the map of any
/// other mask, so that later calls can reuse it.
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
    /// Makes a map of blocks of `size[0]` queries by `size[1]` keys.
    pub fn new(map: L, size: [usize; 2]) -> Self {
        Blocks { map, size }
    }
}

/// Returns BigBird's map of `n × n` blocks. Each block of queries sees:
///
/// - its neighbours up to `window` blocks away
/// - the blocks listed in `globals`
/// - in row `i`, the blocks listed in `random[i]`
///
/// Blocks of queries in `globals` see all. The map is dense `[n, n]`, for [`Blocks::new`] with
/// shape `[1, 1, n, n]`.
///
/// Source: Zaheer et al. 2020, "Big Bird: transformers for longer sequences".
///
/// # Errors
/// An `n` that is not below 2^16.
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
