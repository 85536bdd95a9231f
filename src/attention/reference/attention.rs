//! The reference of attention: scores, softmax, weighted sum.

use super::options::Options;
use super::scores::scores;
use super::softmax::softmax;
use super::weighted_sum::weighted_sum;
use crate::attention::ScoreStage;
use crate::mask::reference::dropout;
use crate::tensor::{Error, Real, Shape, count, expect_length};

/// The results of attention or of a layer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Attended<R> {
    /// `[batch, heads, q_len, value_dim]`, or `[batch, q_len, out_features]` for a layer.
    pub out: Vec<R>,
    /// `[batch, heads, q_len]`, before dropout.
    pub lse: Vec<R>,
    /// `[batch, heads, q_len, kv_len]`, after dropout, if [`Options::weights`] requests them. For a
    /// layer, `kv_len` includes the appended keys.
    /// [`average_heads`](crate::reference::average_heads) reduces them to `[batch, q_len, ..]`.
    pub weights: Option<Vec<R>>,
}

/// Returns the scores of a stage, `[batch, heads, q_len, kv_len]`.
///
/// # Errors
/// The errors of [`attention`].
pub fn scores_at<R: Real>(
    q: &[R],
    k: &[R],
    shape: Shape,
    options: &Options,
    stage: ScoreStage,
) -> Result<Vec<R>, Error> {
    shape.check()?;
    options.check(shape)?;
    let scores = scores(q, k, shape, options.scale_value(shape.head_dim))?;
    Ok(options.at_stage(scores, shape, stage))
}

/// Computes `softmax(scale · q kᵀ, masked) · v`. The slices are dense and row-major, shaped as
/// [`Shape`] says.
///
/// # Errors
/// Returns an error if a dimension is zero or does not divide. A slice of another length or a mask
/// that does not broadcast is an error too.
pub fn attention<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    shape: Shape,
    options: &Options,
) -> Result<Attended<R>, Error> {
    shape.check()?;
    expect_length("q", q, count(shape.q()))?;
    expect_length("k", k, count(shape.k()))?;
    options.check(shape)?;
    let scores = scores(q, k, shape, options.scale_value(shape.head_dim))?;
    attend(&scores, v, shape, options)
}

/// Computes the output from scores.
pub(super) fn attend<R: Real>(
    scores: &[R],
    v: &[R],
    shape: Shape,
    options: &Options,
) -> Result<Attended<R>, Error> {
    expect_length("v", v, count(shape.v()))?;
    let mut normalised = softmax(scores, shape, options)?;
    if let Some(d) = &options.dropout {
        dropout(&mut normalised.weights, shape, d)?;
    }
    let out = weighted_sum(&normalised.weights, v, shape)?;
    Ok(Attended { out, lse: normalised.lse, weights: options.weights.then_some(normalised.weights) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::Dropout;
    use crate::position::reference::add_positions;
    use crate::position::{PositionTable, RowPositions};

    /// The reference rounds options to f32, so a difference from a device comes from the
    /// arithmetic.
    #[test]
    fn options_are_the_numbers_that_a_device_has() {
        let shape = Shape::new(1, 1, 1, 3);
        let (q, k) = ([1.0f64, 0.0, 0.0], [1.0, 0.0, 0.0]);
        let scaled =
            |options| scores_at(&q, &k, shape, &options, ScoreStage::Softcapped).expect("a score")[0];
        assert_eq!(scaled(Options::new().scale(0.1)), f64::from(0.1f32));
        assert_eq!(scaled(Options::new()), f64::from((1.0 / 3f64.sqrt()) as f32));
        assert_eq!(scaled(Options::new().scale(1e6).softcap(0.1)), f64::from(0.1f32));
        let mut weights = [1.0f64];
        let kept = Dropout::Seeded { p: 0.1, seed: 0 };
        dropout(&mut weights, Shape::new(1, 1, 1, 1), &kept).expect("it fits");
        assert!([0.0, f64::from((1.0 / 0.9) as f32)].contains(&weights[0]));
        let table = PositionTable::Learned(&[0.0][..]);
        let sum = add_positions(&[1.0f64], [1; 4], table, RowPositions::Start(0), 0.1).expect("a sum");
        assert_eq!(sum, [f64::from(0.1f32)]);
    }
}
