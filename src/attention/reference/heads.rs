//! Splitting, joining and averaging heads.

use crate::tensor::{Error, Real, check_sizes, expect_length};

/// `[batch, length, heads · dim]` → `[batch, heads, length, dim]`.
///
/// # Errors
/// Returns an error if a size is 0, or if the slice does not hold whole sequences.
pub fn split_heads<R: Real>(x: &[R], length: usize, heads: usize, dim: usize) -> Result<Vec<R>, Error> {
    let sequence = check_heads(x, length, heads, dim)?;
    let mut split = Vec::with_capacity(x.len());
    for sequence in x.chunks_exact(sequence) {
        for h in 0..heads {
            split.extend(sequence.chunks_exact(heads * dim).flat_map(|row| &row[h * dim..][..dim]));
        }
    }
    Ok(split)
}

/// `[batch, heads, length, dim]` → `[batch, length, heads · dim]`.
///
/// # Errors
/// The errors of [`split_heads`].
pub fn join_heads<R: Real>(x: &[R], length: usize, heads: usize, dim: usize) -> Result<Vec<R>, Error> {
    let sequence = check_heads(x, length, heads, dim)?;
    let mut joined = Vec::with_capacity(x.len());
    for sequence in x.chunks_exact(sequence) {
        for i in 0..length {
            joined.extend((0..heads).flat_map(|h| &sequence[(h * length + i) * dim..][..dim]));
        }
    }
    Ok(joined)
}

/// Returns the number of elements of a sequence. Checks that `x` holds whole sequences.
fn check_heads<R: Real>(x: &[R], length: usize, heads: usize, dim: usize) -> Result<usize, Error> {
    check_sizes("x", &[("length", length), ("heads", heads), ("dim", dim)])?;
    let sequence = length.saturating_mul(heads).saturating_mul(dim);
    expect_length("x", x, (x.len() / sequence).max(1).saturating_mul(sequence))?;
    Ok(sequence)
}

/// The mean over heads: `[batch, heads, rows]` → `[batch, rows]`.
///
/// # Errors
/// Returns an error if a size is 0, or if the sizes do not divide the slice's length.
pub fn average_heads<R: Real>(weights: &[R], batch: usize, heads: usize) -> Result<Vec<R>, Error> {
    check_sizes("weights", &[("batch", batch), ("heads", heads)])?;
    let all = batch.saturating_mul(heads);
    let rows = weights.len() / all;
    expect_length("weights", weights, rows.max(1).saturating_mul(all))?;
    let sum = |b: usize, r: usize| {
        (0..heads).fold(R::zero(), |sum, h| sum + weights[(b * heads + h) * rows + r]) / R::of(heads as f64)
    };
    Ok((0..batch).flat_map(|b| (0..rows).map(move |r| (b, r))).map(|(b, r)| sum(b, r)).collect())
}
