//! `y = x Wᵀ + b`

use super::Real;

/// Multiplies rows of `x` `[rows, d_in]` by `weight` `[d_out, d_in]` and adds `bias` `[d_out]`:
/// `y[r, o] = Σᵢ x[r, i] · weight[o, i] + bias[o]`, shape `[rows, d_out]`.
pub fn project<R: Real>(x: &[R], weight: &[R], bias: Option<&[R]>, d_in: usize, d_out: usize) -> Vec<R> {
    let mut y = Vec::with_capacity(x.len() / d_in.max(1) * d_out);
    for row in x.chunks_exact(d_in.max(1)) {
        for (o, w) in weight.chunks_exact(d_in.max(1)).enumerate().take(d_out) {
            let sum = row.iter().zip(w).fold(R::zero(), |sum, (x, w)| sum + *x * *w);
            y.push(bias.map_or(sum, |b| sum + b[o]));
        }
    }
    y
}
