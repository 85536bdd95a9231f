//! `v · tanh(q + k)`, and attention with such scores.

use super::attention::{Attended, attend};
use super::options::Options;
use crate::attention::ScoreStage;
use crate::tensor::{Error, Real, Shape, count, expect_length};

/// Returns the vector of a head. `score_vector` is `[heads, hidden]`, or `[hidden]` for all heads.
pub(super) fn vector_of<R>(score_vector: &[R], h: usize, hidden: usize) -> &[R] {
    if score_vector.len() == hidden { score_vector } else { &score_vector[h * hidden..][..hidden] }
}

/// Refuses a vector whose length is neither `[hidden]` nor `[heads, hidden]`.
pub(super) fn check_vector<R>(score_vector: &[R], shape: Shape) -> Result<(), Error> {
    let Shape { heads, head_dim, .. } = shape;
    if score_vector.len() == head_dim {
        return Ok(());
    }
    expect_length("score_vector", score_vector, heads.saturating_mul(head_dim))
}

/// Returns additive scores (Bahdanau et al. 2014) of every query against every key of its head:
/// `s[b, h, i, j] = Σ_d score_vector[h, d] · tanh(q[b, h, i, d] + k[b, h / group, j, d])`. The
/// shape is `[batch, heads, q_len, kv_len]`. Queries and keys are already projected;
/// `shape.head_dim` is their hidden size. `score_vector` is `[heads, hidden]`, or `[hidden]` for
/// all heads.
///
/// # Errors
/// Returns an error if a dimension is zero or does not divide, or if a slice has another length.
pub fn additive_scores<R: Real>(q: &[R], k: &[R], score_vector: &[R], shape: Shape) -> Result<Vec<R>, Error> {
    shape.check()?;
    expect_length("q", q, count(shape.q()))?;
    expect_length("k", k, count(shape.k()))?;
    check_vector(score_vector, shape)?;
    let Shape { heads, kv_heads, q_len, kv_len, head_dim, .. } = shape;
    let score = |n: usize| {
        let (row, j) = (n / kv_len, n % kv_len);
        let (b, h) = (row / q_len / heads, row / q_len % heads);
        let query = &q[row * head_dim..][..head_dim];
        let key = &k[((b * kv_heads + h / shape.group()) * kv_len + j) * head_dim..][..head_dim];
        let terms = query.iter().zip(key).zip(vector_of(score_vector, h, head_dim));
        terms.fold(R::zero(), |sum, ((q, k), v)| sum + *v * (*q + *k).tanh())
    };
    Ok((0..count(shape.weights())).map(score).collect())
}

/// Attention with additive scores: `softmax(score_vector · tanh(q + k), masked) · v`. The slices
/// are dense and row-major, shaped as [`Shape`] says; `head_dim` is the hidden size. Softcap, masks
/// and dropout work as in [`attention`](crate::reference::attention). The scale is not used.
///
/// ```
/// use wgpu_attention::Shape;
/// use wgpu_attention::reference::{Options, additive_attention};
/// let shape = Shape { head_dim: 1, ..Shape::new(1, 1, 2, 2) }; // two queries, two keys, one hidden unit
/// let (q, k, v) = ([0.0, 9.0], [-1.0, 1.0], [0.0, 0.0, 1.0, 1.0]);
/// let got = additive_attention::<f64>(&q, &k, &v, &[2.0], shape, &Options::new())?;
/// // Scores of the first query: −2 tanh 1 and 2 tanh 1.
/// assert!((got.out[0] - 1.0 / (1.0 + (-4.0 * 1f64.tanh()).exp())).abs() < 1e-15);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
///
/// # Errors
/// The errors of [`attention`](crate::reference::attention).
pub fn additive_attention<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    score_vector: &[R],
    shape: Shape,
    options: &Options,
) -> Result<Attended<R>, Error> {
    let scores = additive_scores(q, k, score_vector, shape)?;
    attend(&scores, v, shape, options)
}

/// Returns the additive scores of a stage, `[batch, heads, q_len, kv_len]`.
///
/// # Errors
/// The errors of [`additive_attention`].
pub fn additive_scores_at<R: Real>(
    q: &[R],
    k: &[R],
    score_vector: &[R],
    shape: Shape,
    options: &Options,
    stage: ScoreStage,
) -> Result<Vec<R>, Error> {
    options.check(shape)?;
    let scores = additive_scores(q, k, score_vector, shape)?;
    Ok(options.at_stage(scores, shape, stage))
}
