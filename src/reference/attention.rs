//! The three stages in a row.

use super::dropout::check_dropout;
use super::{Real, dropout, expect_length, scores, softmax, weighted_sum};
use crate::dropout::Dropout;
use crate::error::Error;
use crate::mask::{HostMask, HostTensor};
use crate::problem::{ScoreStage, Shape, check_options};
use crate::tensor::count;

/// Everything about one attention call that is not a dimension or a tensor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// Factor of `q·k`; `None` is `1 / √head_dim`.
    pub scale: Option<f64>,
    /// Bound on the scores: `softcap · tanh(score / softcap)`.
    pub softcap: Option<f64>,
    /// Which keys a query may see, and the bias.
    pub mask: HostMask<'a>,
    /// Dropout on the weights.
    pub dropout: Option<Dropout<HostTensor<'a, bool>>>,
    /// How many of the last keys every query sees, whatever the mask says. The mask covers, and is
    /// shaped for, the keys before them.
    pub appended: usize,
}

impl Options<'_> {
    /// The factor of `q·k`.
    pub fn scale(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or(1.0 / (head_dim as f64).sqrt())
    }

    /// Refuses masks and dropout that do not fit `shape`, and numbers out of their range.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Length`], [`Error::Option`].
    pub fn check(&self, shape: &Shape) -> Result<(), Error> {
        check_options(self.scale, self.softcap)?;
        let Some(kv_len) = shape.kv_len.checked_sub(self.appended) else {
            let value = self.appended as f64;
            return Err(Error::Option { option: "appended", value, expected: "at most kv_len" });
        };
        self.mask.check(&Shape { kv_len, ..*shape })?;
        self.dropout.as_ref().map_or(Ok(()), |dropout| check_dropout(dropout, shape))
    }
}

/// What [`attention`] gives.
#[derive(Clone, Debug)]
pub struct Attended<R> {
    /// `[batch, heads, q_len, value_dim]`.
    pub out: Vec<R>,
    /// `[batch, heads, q_len, kv_len]`, after dropout.
    pub weights: Vec<R>,
    /// `[batch, heads, q_len]`, before dropout.
    pub lse: Vec<R>,
}

/// The scores at a stage on their way to the softmax, `[batch, heads, q_len, kv_len]`.
///
/// # Errors
/// As [`attention`].
pub fn scores_at<R: Real>(
    q: &[R],
    k: &[R],
    shape: &Shape,
    options: &Options,
    stage: ScoreStage,
) -> Result<Vec<R>, Error> {
    shape.check()?;
    options.check(shape)?;
    let mut scores = scores(q, k, shape, options.scale(shape.head_dim))?;
    let [_, heads, q_len, kv_len] = shape.weights();
    for (n, score) in scores.iter_mut().enumerate() {
        let (row, j) = (n / kv_len, n % kv_len);
        let index = [row / q_len / heads, row / q_len % heads, row % q_len, j];
        *score = match stage {
            ScoreStage::Scaled => *score,
            ScoreStage::Softcapped => options.capped(*score),
            ScoreStage::Biased => options.changed(*score, shape, index).unwrap_or(R::neg_infinity()),
        };
    }
    Ok(scores)
}

/// `softmax(scale · q kᵀ, masked) · v` over dense row-major slices shaped as [`Shape`] says.
///
/// # Errors
/// Dimensions that are zero or do not divide, slices of another length, masks that do not broadcast.
pub fn attention<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    shape: &Shape,
    options: &Options,
) -> Result<Attended<R>, Error> {
    shape.check()?;
    expect_length("q", q, count(shape.q()))?;
    expect_length("k", k, count(shape.k()))?;
    expect_length("v", v, count(shape.v()))?;
    options.check(shape)?;

    let scores = scores(q, k, shape, options.scale(shape.head_dim))?;
    let mut normalised = softmax(&scores, shape, options)?;
    if let Some(d) = &options.dropout {
        dropout(&mut normalised.weights, shape, d)?;
    }
    let out = weighted_sum(&normalised.weights, v, shape)?;
    Ok(Attended { out, weights: normalised.weights, lse: normalised.lse })
}
