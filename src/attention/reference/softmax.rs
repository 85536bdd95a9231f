//! The reference softmax: scores → masked, normalised weights and their log-sum-exp.

use super::block_sums::BLOCK;
use super::options::Options;
use crate::tensor::{Error, Real, Shape, count, expect_length};

/// The results of [`softmax`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Normalised<R> {
    /// `[batch, heads, q_len, kv_len]`. Every row sums to 1, or to less with a sink. A row without
    /// a permitted key is zero.
    pub weights: Vec<R>,
    /// `[batch, heads, q_len]`: `ln Σⱼ exp(score)` over permitted keys, −∞ if there is none.
    pub lse: Vec<R>,
}

/// Row softmax over the permitted keys, and over the head's sink if it has one. The order is:
/// softcap `c · tanh(s / c)`, bias, mask.
///
/// The row's maximum is subtracted before `exp`, so scores of any finite size are exact. A row that
/// sees no key, or only scores of −∞, has weights 0 and lse −∞.
///
/// # Errors
/// Returns an error if a dimension is zero or does not divide. A slice of another length or a mask
/// that does not broadcast is an error too.
pub fn softmax<R: Real>(scores: &[R], shape: Shape, options: &Options) -> Result<Normalised<R>, Error> {
    shape.check()?;
    expect_length("scores", scores, count(shape.weights()))?;
    options.check(shape)?;
    let rows = shape.batch * shape.heads * shape.q_len;
    let mut weights = vec![R::zero(); rows * shape.kv_len];
    let mut lse = vec![R::neg_infinity(); rows];
    let mut row = 0;
    for b in 0..shape.batch {
        for h in 0..shape.heads {
            for i in 0..shape.q_len {
                let range = row * shape.kv_len..(row + 1) * shape.kv_len;
                let changed: Vec<Option<R>> = scores[range.clone()]
                    .iter()
                    .enumerate()
                    .map(|(j, s)| options.changed(*s, &shape, [b, h, i, j]))
                    .collect();
                lse[row] = normalise(&changed, options.sink(b, h), &mut weights[range]);
                row += 1;
            }
        }
    }
    Ok(Normalised { weights, lse })
}

/// Normalises one row and returns its log-sum-exp. `None` is a key that the query may not see.
fn normalise<R: Real>(scores: &[Option<R>], sink: Option<R>, weights: &mut [R]) -> R {
    // `max` would drop a NaN, but the row must propagate it.
    let max = scores
        .iter()
        .flatten()
        .chain(&sink)
        .fold(R::neg_infinity(), |m, s| if s.is_nan() || *s > m { *s } else { m });
    if max == R::neg_infinity() {
        return max;
    }
    let mut sum = sink.map_or(R::zero(), |s| (s - max).exp());
    for (weights, scores) in weights.chunks_mut(BLOCK).zip(scores.chunks(BLOCK)) {
        let mut block = R::zero();
        for (weight, score) in weights.iter_mut().zip(scores) {
            *weight = score.map_or(R::zero(), |s| (s - max).exp());
            block = block + *weight;
        }
        sum = sum + block;
    }
    // A NaN among the scores propagates to the weights of seen keys, not to those of hidden keys.
    for (weight, _) in weights.iter_mut().zip(scores).filter(|(_, score)| score.is_some()) {
        *weight = *weight / sum;
    }
    max + sum.ln()
}
