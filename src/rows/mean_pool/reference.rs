//! The reference of means of rows.

use crate::tensor::{Error, Real, check_sizes, expect_length};

/// Returns the mean of each sequence's rows of `x` `[rows, features]`, or zero for no rows:
/// `[sequences, features]`. `sequences` lists the rows of each sequence. Rows past the last row are
/// ignored. With `l2` each mean is divided by its length, or by 10⁻¹² if the length is smaller.
///
/// # Errors
/// A width of 0, or a slice that is not whole rows.
pub fn mean_pool<R: Real>(
    x: &[R],
    features: usize,
    sequences: &[Vec<usize>],
    l2: bool,
) -> Result<Vec<R>, Error> {
    check_sizes("x", &[("features", features)])?;
    expect_length("x", x, x.len() / features * features)?;
    let each = |rows: &Vec<usize>| {
        let mean = mean(x, features, rows);
        let scale = if l2 { R::one() / length(&mean).max(R::of(EPS)) } else { R::one() };
        mean.into_iter().map(move |x| x * scale)
    };
    Ok(sequences.iter().flat_map(each).collect())
}

const EPS: f64 = 1e-12;

fn mean<R: Real>(x: &[R], features: usize, rows: &[usize]) -> Vec<R> {
    let mut sum = vec![R::zero(); features];
    let mut count = 0;
    for row in rows.iter().filter_map(|row| x.chunks_exact(features).nth(*row)) {
        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum = *sum + *x);
        count += 1;
    }
    sum.into_iter().map(|sum| sum / R::of(f64::from(count.max(1)))).collect()
}

fn length<R: Real>(x: &[R]) -> R {
    x.iter().fold(R::zero(), |sum, x| sum + *x * *x).sqrt()
}

/// Returns the gradient of `Σ out · d_out` with respect to `x` of [`mean_pool`]. `d_out` is
/// `[sequences, features]`. With `m` a mean:
///
/// ```text
/// d_m = d_out      or, with l2, (d_out − m (m · d_out) / |m|²) / |m|      or d_out / 10⁻¹² where |m| is shorter
/// d_x = d_m / count
/// ```
///
/// # Errors
/// See [`mean_pool`].
pub fn mean_pool_backward<R: Real>(
    x: &[R],
    features: usize,
    sequences: &[Vec<usize>],
    l2: bool,
    d_out: &[R],
) -> Result<Vec<R>, Error> {
    check_sizes("x", &[("features", features)])?;
    expect_length("x", x, x.len() / features * features)?;
    expect_length("d_out", d_out, sequences.len().saturating_mul(features))?;
    let mut d_x = vec![R::zero(); x.len()];
    for (rows, d_out) in sequences.iter().zip(d_out.chunks_exact(features)) {
        let rows: Vec<usize> = rows.iter().copied().filter(|row| *row < x.len() / features).collect();
        let count = R::of(rows.len().max(1) as f64);
        let mean = mean(x, features, &rows);
        let (mut scale, mut along) = (R::one(), R::zero());
        if l2 {
            let length = length(&mean);
            scale = R::one() / length.max(R::of(EPS));
            if length > R::of(EPS) {
                let dot = mean.iter().zip(d_out).fold(R::zero(), |sum, (m, d)| sum + *m * *d);
                along = dot * scale * scale;
            }
        }
        for row in rows {
            for d in 0..features {
                let at = row * features + d;
                d_x[at] = d_x[at] + (d_out[d] - mean[d] * along) * scale / count;
            }
        }
    }
    Ok(d_x)
}
