//! Attention over disjoint sets of keys → attention over their union.

use super::{Real, expect_length};
use crate::error::Error;

/// Combines outputs `[rows, value_dim]` and log-sum-exps `[rows]` of disjoint sets of keys: `lse = ln Σ exp(lseₙ)`,
/// `out = Σ exp(lseₙ − lse) · outₙ`. A part with lse −∞ contributes nothing to its row.
///
/// # Errors
/// [`Error::Length`] if the parts have different numbers of rows.
pub fn merge<R: Real>(parts: &[(&[R], &[R])], value_dim: usize) -> Result<(Vec<R>, Vec<R>), Error> {
    let rows = parts.first().map_or(0, |(_, lse)| lse.len());
    for (out, lse) in parts {
        expect_length("parts.lse", lse, rows)?;
        expect_length("parts.out", out, rows.saturating_mul(value_dim))?;
    }
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
