//! The reference: the keys that indices name, as a mask function.

use crate::mask::At;
use crate::tensor::{Error, HostTensor, Real, count, expect_length};

/// The keys of each query, for the reference of selected attention.
///
/// Selected attention is attention with one more condition on pairs. Pass it to
/// [`HostMask::mask_fn`](crate::mask::HostMask::mask_fn), and call
/// [`attention`](crate::reference::attention) or
/// [`attention_backward`](crate::reference::attention_backward).
///
/// ```
/// use wgpu_attention::reference::{self, Options, SelectedKeys};
/// use wgpu_attention::{HostTensor, Mask, Shape};
/// // One query, which may see the keys 0 and 2 of three.
/// let indices = HostTensor::new(&[2, 0, 2, u32::MAX], [1, 1, 1, 4]);
/// let keys = SelectedKeys { indices, heads: 1, block: 1, window: 0 };
/// let sees = |at: &_| keys.names(at);
/// let shape = Shape { q_len: 1, ..Shape::new(1, 1, 3, 1) };
/// let mask = Mask::none().mask_fn(&sees);
/// let got = reference::attention(&[0.0], &[0.0; 3], &[1.0, 7.0, 3.0], shape, &Options::new().mask(mask))?;
/// assert_eq!(got.out, [2.0]);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SelectedKeys<'a> {
    /// `[batch, list heads, q_len, count]`.
    pub indices: HostTensor<'a, u32>,
    /// Query heads.
    pub heads: usize,
    /// Keys of a block, 1 if indices are keys.
    pub block: usize,
    /// The last keys that each query sees without an index.
    pub window: usize,
}

impl SelectedKeys<'_> {
    /// The indices of a query of a head.
    fn list(&self, batch: usize, head: usize, query: usize) -> &[u32] {
        let [_, list_heads, q_len, count] = self.indices.shape;
        let list = head * list_heads / self.heads.max(1);
        let start = ((batch * list_heads + list) * q_len + query) * count;
        self.indices.data.get(start..start + count).unwrap_or(&[])
    }

    /// True if an index or the window names the key of a pair.
    pub fn names(&self, at: &At) -> bool {
        let behind = i64::from(at.position) - i64::from(at.key);
        let key = at.key as usize / self.block.max(1);
        let list = self.list(at.batch as usize, at.head as usize, at.query as usize);
        (0..self.window as i64).contains(&behind) || list.iter().any(|index| *index as usize == key)
    }

    /// The weights of indices, `[batch, heads, q_len, count]`, from the weights of all keys,
    /// `[batch, heads, q_len, kv_len]`.
    ///
    /// # Errors
    /// [`Error::Length`] if `weights` does not have `kv_len` weights for each query and head.
    pub fn weights<R: Real>(&self, weights: &[R], kv_len: usize) -> Result<Vec<R>, Error> {
        let [batch, _, q_len, _] = self.indices.shape;
        expect_length("weights", weights, count([batch, self.heads, q_len, kv_len]))?;
        let mut all = Vec::new();
        for (row, keys) in weights.chunks(kv_len.max(1)).enumerate() {
            let (b, h, i) = (row / q_len / self.heads, row / q_len % self.heads, row % q_len);
            all.extend(self.list(b, h, i).iter().map(|index| {
                let first = (*index as usize).saturating_mul(self.block);
                let block = keys.iter().skip(first).take(self.block);
                block.fold(R::zero(), |sum, weight| sum + *weight)
            }));
        }
        Ok(all)
    }
}
