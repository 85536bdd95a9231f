//! `y = x Wᵀ + b`

use super::{Real, expect_length};
use crate::error::Error;
use crate::tensor::check_sizes;

/// Multiplies rows of `x` `[rows, d_in]` by `weight` `[d_out, d_in]` and adds `bias` `[d_out]`:
/// `y[r, o] = Σᵢ x[r, i] · weight[o, i] + bias[o]`, shape `[rows, d_out]`.
///
/// # Errors
/// A width of 0, slices of another length.
pub fn project<R: Real>(
    x: &[R],
    weight: &[R],
    bias: Option<&[R]>,
    d_in: usize,
    d_out: usize,
) -> Result<Vec<R>, Error> {
    check_sizes("weight", &[("d_in", d_in), ("d_out", d_out)])?;
    let rows = x.len() / d_in;
    expect_length("x", x, rows * d_in)?;
    expect_length("weight", weight, d_out.saturating_mul(d_in))?;
    bias.map_or(Ok(()), |bias| expect_length("bias", bias, d_out))?;
    let mut y = Vec::with_capacity(rows * d_out);
    for row in x.chunks_exact(d_in) {
        for (o, w) in weight.chunks_exact(d_in).enumerate() {
            let sum = row.iter().zip(w).fold(R::zero(), |sum, (x, w)| sum + *x * *w);
            y.push(bias.map_or(sum, |b| sum + b[o]));
        }
    }
    Ok(y)
}
