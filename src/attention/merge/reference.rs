//! The reference of the merge: attention over disjoint sets of keys → attention over their union.

use crate::tensor::{Error, Real, expect_length};

/// Combines outputs `[rows, value_dim]` and log-sum-exps `[rows]` of disjoint sets of keys. `lse =
/// ln Σ exp(lseₙ)`, `out = Σ exp(lseₙ − lse) · outₙ`. A part with lse −∞ contributes nothing to its
/// row.
///
/// # Errors
/// [`Error::Length`] if the parts have different numbers of rows.
pub fn merge<R: Real>(parts: &[(&[R], &[R])], value_dim: usize) -> Result<(Vec<R>, Vec<R>), Error> {
    let rows = check(parts, value_dim)?;
    let mut out = vec![R::zero(); rows * value_dim];
    let mut lse = vec![R::neg_infinity(); rows];
    for row in 0..rows {
        let max = parts
            .iter()
            .fold(R::neg_infinity(), |m, (_, l)| if l[row].is_nan() || l[row] > m { l[row] } else { m });
        if max == R::neg_infinity() {
            continue;
        }
        lse[row] = max + parts.iter().fold(R::zero(), |sum, (_, l)| sum + (l[row] - max).exp()).ln();
        for (o, l) in parts.iter().filter(|(_, l)| l[row] != R::neg_infinity()) {
            let share = (l[row] - lse[row]).exp();
            for d in row * value_dim..(row + 1) * value_dim {
                out[d] = out[d] + share * o[d];
            }
        }
    }
    Ok((out, lse))
}

/// Checks the lengths of the parts and returns their number of rows.
fn check<R>(parts: &[(&[R], &[R])], value_dim: usize) -> Result<usize, Error> {
    let rows = parts.first().map_or(0, |(_, lse)| lse.len());
    for (out, lse) in parts {
        expect_length("parts.lse", lse, rows)?;
        expect_length("parts.out", out, rows.saturating_mul(value_dim))?;
    }
    Ok(rows)
}

/// The gradients of a part, from [`merge_backward`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PartGradients<R> {
    /// `[rows, value_dim]`.
    pub d_out: Vec<R>,
    /// `[rows]`.
    pub d_lse: Vec<R>,
}

/// The gradients of `Σ out · d_out + Σ lse · d_lse` with respect to the parts of [`merge`]. `d_out`
/// is `[rows, value_dim]`. `d_lse` is `[rows]`; `None` stands for zeros. With `share = exp(lseₙ −
/// lse)`:
///
/// ```text
/// d_outₙ = share · d_out                d_lseₙ = share · (d_out · (outₙ − out) + d_lse)
/// ```
///
/// In a row where a part has lse −∞, the part contributes nothing and has zero gradients.
///
/// # Errors
/// The errors of [`merge`].
pub fn merge_backward<R: Real>(
    parts: &[(&[R], &[R])],
    value_dim: usize,
    d_out: &[R],
    d_lse: Option<&[R]>,
) -> Result<Vec<PartGradients<R>>, Error> {
    let rows = check(parts, value_dim)?;
    expect_length("d_out", d_out, rows.saturating_mul(value_dim))?;
    d_lse.map_or(Ok(()), |d_lse| expect_length("d_lse", d_lse, rows))?;
    let (out, lse) = merge(parts, value_dim)?;
    let gradient = |(part, part_lse): &(&[R], &[R])| {
        let (mut d_part, mut d_part_lse) = (vec![R::zero(); part.len()], vec![R::zero(); rows]);
        for row in (0..rows).filter(|row| part_lse[*row] != R::neg_infinity()) {
            let share = (part_lse[row] - lse[row]).exp();
            let mut sum = d_lse.map_or(R::zero(), |d_lse| d_lse[row]);
            for d in row * value_dim..(row + 1) * value_dim {
                d_part[d] = share * d_out[d];
                sum = sum + d_out[d] * (part[d] - out[d]);
            }
            d_part_lse[row] = share * sum;
        }
        PartGradients { d_out: d_part, d_lse: d_part_lse }
    };
    Ok(parts.iter().map(gradient).collect())
}
