//! `gain · x / |x|`

use crate::tensor::{Error, Real, expect_length};

/// Scales vectors to a length (Salimans and Kingma 2016, "Weight normalization"): `gain[h] · x[h] /
/// |x[h]|`, for `[heads, dim]`. There is one gain for each vector, or one for all. Vectors of zeros
/// stay zero.
///
/// # Errors
/// Slices that are not whole vectors, or a wrong number of gains.
pub fn weight_norm<R: Real>(x: &[R], gain: &[R], dim: usize) -> Result<Vec<R>, Error> {
    let heads = x.len() / dim.max(1);
    expect_length("vector", x, heads * dim)?;
    if gain.len() != 1 {
        expect_length("gain", gain, heads)?;
    }
    let of = |(h, x): (usize, &[R])| {
        let length = length(x);
        let gain = gain[if gain.len() == 1 { 0 } else { h }];
        x.iter().map(|x| if length == R::zero() { R::zero() } else { gain * *x / length }).collect::<Vec<_>>()
    };
    Ok(x.chunks_exact(dim.max(1)).enumerate().flat_map(of).collect())
}

fn length<R: Real>(x: &[R]) -> R {
    x.iter().fold(R::zero(), |sum, x| sum + *x * *x).sqrt()
}

/// Returns the gradients of `Σ out · d_out` with respect to the inputs of [`weight_norm`]: of x,
/// then of the gains.
///
/// # Errors
/// See [`weight_norm`].
pub fn weight_norm_backward<R: Real>(
    x: &[R],
    gain: &[R],
    d_out: &[R],
    dim: usize,
) -> Result<[Vec<R>; 2], Error> {
    weight_norm(x, gain, dim)?;
    expect_length("d_out", d_out, x.len())?;
    let (mut d_x, mut d_gain) = (vec![R::zero(); x.len()], vec![R::zero(); gain.len()]);
    for (h, row) in x.chunks_exact(dim.max(1)).enumerate() {
        let length = length(row);
        if length == R::zero() {
            continue;
        }
        let own = if gain.len() == 1 { 0 } else { h };
        let d = &d_out[h * dim..][..dim];
        let along = row.iter().zip(d).fold(R::zero(), |sum, (x, d)| sum + *x / length * *d);
        d_gain[own] = d_gain[own] + along;
        for n in 0..dim {
            d_x[h * dim + n] = gain[own] / length * (d[n] - row[n] / length * along);
        }
    }
    Ok([d_x, d_gain])
}
