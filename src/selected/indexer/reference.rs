//! The reference of the indexer.

use crate::mask::HostMask;
use crate::rows::logits::reference::top_k;
use crate::tensor::{Error, Real, Shape, check_sizes, expect_length};

/// The inputs of an indexer, on the host.
#[derive(Clone, Copy, Debug)]
pub struct IndexerInputs<'a, R> {
    /// `[batch, heads, q_len, head_dim]`.
    pub q: &'a [R],
    /// `[batch, kv_len, head_dim]`.
    pub k: &'a [R],
    /// `[batch, q_len, heads]`.
    pub w: &'a [R],
    /// The factor of `q · k`.
    pub scale: f64,
    /// The mask, of one head.
    pub mask: HostMask<'a>,
}

/// The gradients that [`indexer_backward`] returns.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct IndexerGradients<R> {
    /// `[batch, heads, q_len, head_dim]`.
    pub d_q: Vec<R>,
    /// `[batch, kv_len, head_dim]`.
    pub d_k: Vec<R>,
    /// `[batch, q_len, heads]`.
    pub d_w: Vec<R>,
}

impl<'a, R: Real> IndexerInputs<'a, R> {
    fn check(&self, shape: Shape) -> Result<(), Error> {
        let Shape { batch, heads, q_len, kv_len, head_dim, .. } = shape;
        shape.check()?;
        expect_length("q", self.q, batch * heads * q_len * head_dim)?;
        expect_length("k", self.k, batch * kv_len * head_dim)?;
        expect_length("w", self.w, batch * q_len * heads)?;
        self.mask.check(Shape { heads: 1, kv_heads: 1, ..shape })
    }

    fn q_row(&self, shape: &Shape, [b, h, i]: [usize; 3]) -> &'a [R] {
        &self.q[((b * shape.heads + h) * shape.q_len + i) * shape.head_dim..][..shape.head_dim]
    }

    fn k_row(&self, shape: &Shape, b: usize, j: usize) -> &'a [R] {
        &self.k[(b * shape.kv_len + j) * shape.head_dim..][..shape.head_dim]
    }

    /// Returns `scale · q · k` of a head of a query and a key.
    fn product(&self, shape: &Shape, at: [usize; 3], j: usize) -> R {
        let (q, k) = (self.q_row(shape, at), self.k_row(shape, at[0], j));
        let sum = q.iter().zip(k).fold(R::zero(), |sum, (q, k)| sum + *q * *k);
        sum * R::of(self.scale)
    }
}

/// Returns `Σ w · relu(scale · q · k)` over heads, `[batch, q_len, kv_len]`, and −∞ for keys that
/// the mask forbids. A NaN stays NaN. The heads of `shape` are those of the queries.
///
/// # Errors
/// Dimensions that are zero, slices of another length, and masks that do not broadcast.
pub fn indexer_scores<R: Real>(inputs: &IndexerInputs<R>, shape: Shape) -> Result<Vec<R>, Error> {
    inputs.check(shape)?;
    let Shape { batch, heads, q_len, kv_len, .. } = shape;
    let masked = Shape { heads: 1, kv_heads: 1, ..shape };
    let mut scores = Vec::with_capacity(batch * q_len * kv_len);
    for b in 0..batch {
        for i in 0..q_len {
            let w = &inputs.w[(b * q_len + i) * heads..][..heads];
            for j in 0..kv_len {
                if !inputs.mask.permits(&masked, [b, 0, i, j]) {
                    scores.push(R::neg_infinity());
                    continue;
                }
                let term = |sum, (h, w): (usize, &R)| {
                    let x = inputs.product(&shape, [b, h, i], j);
                    sum + *w * if x < R::zero() { R::zero() } else { x }
                };
                scores.push(w.iter().enumerate().fold(R::zero(), term));
            }
        }
    }
    Ok(scores)
}

/// Returns the indices of the `k` best keys of each query, `[rows, k]`, from the scores `[rows,
/// kv_len]`. Among equal scores, the lower index comes first. Keys with a score of −∞ are left out.
/// If there are fewer keys, the rest is `u32::MAX`.
///
/// # Errors
/// `kv_len` is 0, or the slice is not whole rows.
pub fn indexer_indices<R: Real>(scores: &[R], kv_len: usize, k: usize) -> Result<Vec<u32>, Error> {
    check_sizes("scores", &[("kv_len", kv_len)])?;
    let found = k.min(kv_len);
    let best = top_k(scores, kv_len, found)?;
    let mut indices = vec![u32::MAX; scores.len() / kv_len * k];
    for (n, row) in scores.chunks_exact(kv_len).enumerate() {
        for (to, j) in indices[n * k..].iter_mut().zip(&best[n * found..][..found]) {
            if row[*j as usize] != R::neg_infinity() {
                *to = *j;
            }
        }
    }
    Ok(indices)
}

/// Returns the gradients of `Σ scores · d_scores`, for `d_scores` `[batch, q_len, kv_len]`. The
/// gradient of relu at 0 is 0. Keys that the mask forbids have no gradient.
///
/// # Errors
/// See [`indexer_scores`].
pub fn indexer_backward<R: Real>(
    inputs: &IndexerInputs<R>,
    shape: Shape,
    d_scores: &[R],
) -> Result<IndexerGradients<R>, Error> {
    inputs.check(shape)?;
    let Shape { batch, heads, q_len, kv_len, head_dim, .. } = shape;
    expect_length("d_scores", d_scores, batch * q_len * kv_len)?;
    let masked = Shape { heads: 1, kv_heads: 1, ..shape };
    let zeros = |x: &[R]| vec![R::zero(); x.len()];
    let (mut d_q, mut d_k, mut d_w) = (zeros(inputs.q), zeros(inputs.k), zeros(inputs.w));
    for (n, d_score) in d_scores.iter().enumerate() {
        let (b, i, j) = (n / (q_len * kv_len), n / kv_len % q_len, n % kv_len);
        if *d_score == R::zero() || !inputs.mask.permits(&masked, [b, 0, i, j]) {
            continue;
        }
        for h in 0..heads {
            let x = inputs.product(&shape, [b, h, i], j);
            if x > R::zero() {
                let weight = (b * q_len + i) * heads + h;
                d_w[weight] = d_w[weight] + *d_score * x;
                let factor = *d_score * inputs.w[weight] * R::of(inputs.scale);
                let (q, k) = (inputs.q_row(&shape, [b, h, i]), inputs.k_row(&shape, b, j));
                let q_at = ((b * heads + h) * q_len + i) * head_dim;
                let k_at = (b * kv_len + j) * head_dim;
                for d in 0..head_dim {
                    d_q[q_at + d] = d_q[q_at + d] + factor * k[d];
                    d_k[k_at + d] = d_k[k_at + d] + factor * q[d];
                }
            }
        }
    }
    Ok(IndexerGradients { d_q, d_k, d_w })
}

/// Returns the matrix `[rows, kv_len]` of gradients at listed keys. `indices` and `d_scores` are
/// `[rows, k]`. Gradients of equal indices add up, and indices past the last key are ignored.
///
/// # Errors
/// A dimension is 0, or the slices are not whole rows of the same number.
pub fn indexer_scatter<R: Real>(
    indices: &[u32],
    d_scores: &[R],
    k: usize,
    kv_len: usize,
) -> Result<Vec<R>, Error> {
    check_sizes("indices", &[("k", k), ("kv_len", kv_len)])?;
    expect_length("indices", indices, indices.len() / k * k)?;
    expect_length("d_scores", d_scores, indices.len())?;
    let mut dense = vec![R::zero(); indices.len() / k * kv_len];
    for (n, (j, d_score)) in indices.iter().zip(d_scores).enumerate() {
        if (*j as usize) < kv_len {
            let at = n / k * kv_len + *j as usize;
            dense[at] = dense[at] + *d_score;
        }
    }
    Ok(dense)
}
