//! The reference gradients of attention, stage by stage from the output back to the inputs.

use super::additive::{additive_scores, vector_of};
use super::block_sums::{BLOCK, BlockSums};
use super::options::Options;
use super::scores::scores;
use super::softmax::softmax;
use crate::mask::Id;
use crate::mask::reference::dropout;
use crate::tensor::{Error, HostTensor, Real, Shape, count, expect_length};

/// The results of [`attention_backward`]: the gradient of every input, shaped as the input.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Gradients<R> {
    /// `[batch, heads, q_len, head_dim]`.
    pub d_q: Vec<R>,
    /// `[batch, kv_heads, kv_len, head_dim]`, summed over the query heads of a key head.
    pub d_k: Vec<R>,
    /// `[batch, kv_heads, kv_len, value_dim]`, summed over the query heads of a value head.
    pub d_v: Vec<R>,
    /// The gradient of [`Mask::bias`](crate::Mask::bias), if there is one. Where an axis of 1
    /// repeats, its gradients are summed. The same is true for the next three fields.
    pub d_bias: Option<Vec<R>>,
    /// The gradient of the slopes of [`Mask::alibi`](crate::Mask::alibi), or of the symmetric
    /// slopes.
    pub d_slopes: Option<Vec<R>>,
    /// The gradient of the table of [`Mask::relative`](crate::Mask::relative).
    pub d_relative: Option<Vec<R>>,
    /// The gradient of [`Mask::sink_logits`](crate::Mask::sink_logits).
    pub d_sinks: Option<Vec<R>>,
    /// The gradient of the result of [`Mask::score_fn`](crate::Mask::score_fn), if there is one:
    /// `[batch, heads, q_len, kv_len]`. The gradient of a tensor that the function reads is `Σ
    /// d_score_fn · ∂score_fn`, with the caller's derivative.
    pub d_score_fn: Option<Vec<R>>,
    /// The gradient of the vector of additive scores, in its shape: `[heads, hidden]` or
    /// `[hidden]`.
    pub d_score_vector: Option<Vec<R>>,
}

/// Returns the gradients of `Σ out · d_out + Σ lse · d_lse` with respect to the inputs of
/// [`attention`](crate::reference::attention). `d_out` is `[batch, heads, q_len, value_dim]`.
/// `d_lse` is `[batch, heads, q_len]`; `None` stands for zeros.
///
/// `P` are the weights before dropout, `W` the weights after dropout:
///
/// ```text
/// d_v[j] = Σᵢ W[i, j] · d_out[i]                     dP[i, j] = dropout(d_out[i] · v[j])
/// D[i]   = Σⱼ P[i, j] · dP[i, j] − d_lse[i]          dA[i, j] = P[i, j] · (dP[i, j] − D[i])
/// dS     = dA · (1 − tanh²(score / softcap))         d_sink   = −Σᵢ exp(sink − lse[i]) · D[i]
/// d_q[i] = scale · Σⱼ dS[i, j] · k[j]                d_k[j]   = scale · Σᵢ dS[i, j] · q[i]
/// ```
///
/// `dA` is the gradient of a score after bias, ALiBi and relative bias are added. It is therefore
/// the gradient of these terms too.
///
/// A weight of zero gives and receives nothing, whatever its query, key, value, `d_out` and `d_lse`
/// hold. A query that sees no key therefore has zero gradients. If its head has a sink, its `d_lse`
/// goes to the sink.
///
/// ```
/// use wgpu_attention::Shape;
/// use wgpu_attention::reference::{Options, attention_backward};
/// let shape = Shape::new(1, 1, 1, 2); // batch, heads, length, head_dim
/// let (q, k, v) = ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]);
/// let got = attention_backward::<f64>(&q, &k, &v, &[0.5, 0.25], None, shape, &Options::new())?;
/// assert_eq!(got.d_v, [0.5, 0.25]); // one key has all of the weight …
/// assert_eq!(got.d_q, [0.0, 0.0]); // … whatever the score
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
///
/// # Errors
/// The errors of [`attention`](crate::reference::attention).
pub fn attention_backward<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    d_out: &[R],
    d_lse: Option<&[R]>,
    shape: Shape,
    options: &Options,
) -> Result<Gradients<R>, Error> {
    gradients(&Results { q, k, v, d_out, d_lse, score_vector: None }, shape, options, false)
}

/// Returns the sums of the absolute values of the terms that [`attention_backward`] sums, in the
/// same shapes. The largest value for a gradient is its `magnitude` for
/// [`Tolerance::gradient`](crate::reference::compare::Tolerance::gradient).
///
/// # Errors
/// The errors of [`attention`](crate::reference::attention).
pub fn attention_backward_magnitudes<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    d_out: &[R],
    d_lse: Option<&[R]>,
    shape: Shape,
    options: &Options,
) -> Result<Gradients<R>, Error> {
    gradients(&Results { q, k, v, d_out, d_lse, score_vector: None }, shape, options, true)
}

/// Returns the gradients of `Σ out · d_out + Σ lse · d_lse` with respect to the inputs of
/// [`additive_attention`](crate::reference::additive_attention). They are the same as in
/// [`attention_backward`], except:
///
/// ```text
/// d_q[i]         = v ∘ Σⱼ dS[i, j] · (1 − tanh²(q[i] + k[j]))      d_k[j]: likewise over i
/// d_score_vector = Σᵢⱼ dS[i, j] · tanh(q[i] + k[j])
/// ```
///
/// # Errors
/// The errors of [`attention`](crate::reference::attention).
#[allow(clippy::too_many_arguments)]
pub fn additive_attention_backward<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    score_vector: &[R],
    d_out: &[R],
    d_lse: Option<&[R]>,
    shape: Shape,
    options: &Options,
) -> Result<Gradients<R>, Error> {
    let score_vector = Some(score_vector);
    gradients(&Results { q, k, v, d_out, d_lse, score_vector }, shape, options, false)
}

/// Returns the sums of the absolute values of the terms that [`additive_attention_backward`] sums,
/// in the same shapes.
///
/// # Errors
/// The errors of [`attention`](crate::reference::attention).
#[cfg(feature = "inspect")]
#[allow(clippy::too_many_arguments)]
pub fn additive_attention_backward_magnitudes<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    score_vector: &[R],
    d_out: &[R],
    d_lse: Option<&[R]>,
    shape: Shape,
    options: &Options,
) -> Result<Gradients<R>, Error> {
    let score_vector = Some(score_vector);
    gradients(&Results { q, k, v, d_out, d_lse, score_vector }, shape, options, true)
}

/// Inputs of attention and the gradients of its results.
struct Results<'a, R> {
    q: &'a [R],
    k: &'a [R],
    v: &'a [R],
    d_out: &'a [R],
    d_lse: Option<&'a [R]>,
    /// The vector of additive scores.
    score_vector: Option<&'a [R]>,
}

/// Returns the gradients, or the `magnitudes` of their terms. With `magnitudes`, differences become
/// sums.
fn gradients<R: Real>(
    given: &Results<R>,
    shape: Shape,
    options: &Options,
    magnitudes: bool,
) -> Result<Gradients<R>, Error> {
    let Results { q, k, v, d_out, d_lse, score_vector } = *given;
    shape.check()?;
    expect_length("q", q, count(shape.q()))?;
    expect_length("k", k, count(shape.k()))?;
    expect_length("v", v, count(shape.v()))?;
    expect_length("d_out", d_out, count(shape.out()))?;
    d_lse.map_or(Ok(()), |d_lse| expect_length("d_lse", d_lse, count(shape.lse())))?;
    options.check(shape)?;

    let term = |x: R| if magnitudes { x.abs() } else { x };
    let terms = |x: &[R]| x.iter().map(|x| term(*x)).collect::<Vec<R>>();
    let minus = if magnitudes { R::one() } else { -R::one() };
    let scale = options.scale_value(shape.head_dim);
    let scores = match score_vector {
        Some(vector) => additive_scores(q, k, vector, shape)?,
        None => scores(q, k, shape, scale)?,
    };
    let normalised = softmax(&scores, shape, options)?;
    let (v, d_out) = (terms(v), terms(d_out));
    let mut dropped = normalised.weights.clone();
    let mut d_weights = weights_gradient(&v, &d_out, shape);
    if let Some(d) = &options.dropout {
        dropout(&mut dropped, shape, d)?;
        dropout(&mut d_weights, shape, d)?;
    }
    let d_v = values_gradient(&dropped, &d_out, shape);

    let tensor = |id| options.mask.floats(id);
    let zeros = |id| tensor(id).map(|t| BlockSums::new(t.data.len()));
    let mut d_bias = zeros(Id::Bias);
    let mut d_slopes = zeros(Id::Alibi);
    let mut d_relative = zeros(Id::Relative);
    let mut d_sinks = zeros(Id::SinkLogits);
    let mut d_score_fn = options.mask.mods().score.map(|_| vec![R::zero(); scores.len()]);
    let mut d_scores = vec![R::zero(); scores.len()];
    let masked = options.masked(&shape);
    let Shape { heads, q_len, kv_len, .. } = shape;
    for (row, lse) in normalised.lse.iter().enumerate() {
        let [b, h, i] = [row / q_len / heads, row / q_len % heads, row % q_len];
        let pairs = row * kv_len..(row + 1) * kv_len;
        let of_block = |first: usize| {
            let seen = (first..pairs.end.min(first + BLOCK)).filter(|n| normalised.weights[*n] != R::zero());
            seen.fold(R::zero(), |sum, n| sum + normalised.weights[n] * d_weights[n])
        };
        let sum = pairs.clone().step_by(BLOCK).fold(R::zero(), |sum, first| sum + of_block(first));
        let mean = d_lse.map_or(sum, |d_lse| sum + minus * term(d_lse[row]));
        for n in pairs.clone() {
            if n % BLOCK == 0 {
                for sums in [&mut d_bias, &mut d_slopes, &mut d_relative, &mut d_sinks].into_iter().flatten()
                {
                    sums.end_block(0..sums.len());
                }
            }
            if normalised.weights[n] == R::zero() {
                continue;
            }
            let index = [b, h, i, n - pairs.start];
            let d_added = normalised.weights[n] * (d_weights[n] + minus * mean);
            for added in options.terms(&shape, index) {
                let sums = match added.id {
                    Id::Bias => &mut d_bias,
                    Id::Alibi => &mut d_slopes,
                    _ => &mut d_relative,
                };
                add(sums, tensor(added.id), added.at, term(R::of(added.factor as f64)) * d_added);
            }
            d_scores[n] = d_added * options.capped_slope(scores[n], &shape, index);
            if let Some(d_score_fn) = d_score_fn.as_mut().filter(|_| index[3] < masked.kv_len) {
                d_score_fn[n] = d_added * options.cap_slope(scores[n], &shape, index);
            }
        }
        // A row without permitted keys gives nothing, not even to the sink.
        let share = options.sink::<R>(b, h).filter(|_| *lse != R::neg_infinity()).map(|s| (s - *lse).exp());
        if let Some(share) = share.filter(|share| *share != R::zero()) {
            add(&mut d_sinks, tensor(Id::SinkLogits), [b, h, 0, 0], minus * share * mean);
        }
    }
    let (d_q, d_k, d_score_vector) = match score_vector {
        Some(vector) => {
            let [d_q, d_k, d_vector] =
                additive_gradient(&d_scores, &normalised.weights, [q, k, vector], shape, term);
            (d_q, d_k, Some(d_vector))
        }
        None => {
            let (q, k) = (terms(q), terms(k));
            let [d_q, d_k] =
                scores_gradient(&d_scores, &normalised.weights, &q, &k, shape, term(R::of(scale)));
            (d_q, d_k, None)
        }
    };
    let [d_bias, d_slopes, d_relative, d_sinks] =
        [d_bias, d_slopes, d_relative, d_sinks].map(|sums| sums.map(BlockSums::totals));
    Ok(Gradients { d_score_vector, d_q, d_k, d_v, d_bias, d_slopes, d_relative, d_sinks, d_score_fn })
}

/// Adds `x` to the gradient of the element at `index`. Axes of 1 repeat.
fn add<R: Real>(sums: &mut Option<BlockSums<R>>, of: Option<&HostTensor<f32>>, index: [usize; 4], x: R) {
    if let (Some(sums), Some(of)) = (sums, of) {
        let place = |a: usize| if of.shape[a] == 1 { 0 } else { index[a] };
        let flat = (0..4).fold(0, |flat, a| flat * of.shape[a] + place(a));
        sums.add(flat, x);
    }
}

/// Returns the first key row of a query head. `row` is a row of `[batch, heads, q_len]`.
fn keys_of(row: usize, shape: &Shape) -> usize {
    let [b, h] = [row / shape.q_len / shape.heads, row / shape.q_len % shape.heads];
    (b * shape.kv_heads + h / shape.group()) * shape.kv_len
}

/// Returns `d_out[i] · v[j]` for all pairs. For hidden pairs the value is arbitrary.
fn weights_gradient<R: Real>(v: &[R], d_out: &[R], shape: Shape) -> Vec<R> {
    let Shape { kv_len, value_dim, .. } = shape;
    let dot = |n: usize| {
        let (row, j) = (n / kv_len, n % kv_len);
        let value = &v[(keys_of(row, &shape) + j) * value_dim..][..value_dim];
        let d_out = &d_out[row * value_dim..][..value_dim];
        value.iter().zip(d_out).fold(R::zero(), |sum, (v, d)| sum + *v * *d)
    };
    (0..count(shape.weights())).map(dot).collect()
}

/// Returns `Σᵢ weights[i, j] · d_out[i]`.
fn values_gradient<R: Real>(weights: &[R], d_out: &[R], shape: Shape) -> Vec<R> {
    let Shape { kv_len, value_dim, .. } = shape;
    let mut d_v = BlockSums::new(count(shape.v()));
    for row in 0..weights.len() / kv_len {
        let keys = keys_of(row, &shape);
        if row % BLOCK == 0 {
            d_v.end_block(keys * value_dim..(keys + kv_len) * value_dim);
        }
        for j in (0..kv_len).filter(|j| weights[row * kv_len + j] != R::zero()) {
            let d_out = &d_out[row * value_dim..][..value_dim];
            d_v.add_scaled((keys + j) * value_dim, weights[row * kv_len + j], d_out);
        }
    }
    d_v.totals()
}

/// Returns `scale · Σⱼ d_scores[i, j] · k[j]` and `scale · Σᵢ d_scores[i, j] · q[i]` over the pairs
/// whose weight is not zero.
fn scores_gradient<R: Real>(
    d_scores: &[R],
    weights: &[R],
    q: &[R],
    k: &[R],
    shape: Shape,
    scale: R,
) -> [Vec<R>; 2] {
    let Shape { kv_len, head_dim, .. } = shape;
    let [mut d_q, mut d_k] = [q, k].map(|x| BlockSums::new(x.len()));
    for row in 0..weights.len() / kv_len {
        let keys = keys_of(row, &shape);
        if row % BLOCK == 0 {
            d_k.end_block(keys * head_dim..(keys + kv_len) * head_dim);
        }
        let query = row * head_dim..(row + 1) * head_dim;
        for j in 0..kv_len {
            if j % BLOCK == 0 {
                d_q.end_block(query.clone());
            }
            if weights[row * kv_len + j] == R::zero() {
                continue;
            }
            let d_score = scale * d_scores[row * kv_len + j];
            let key = (keys + j) * head_dim;
            d_q.add_scaled(query.start, d_score, &k[key..][..head_dim]);
            d_k.add_scaled(key, d_score, &q[query.clone()]);
        }
    }
    [d_q, d_k].map(BlockSums::totals)
}

/// Returns the gradients of queries, keys and the vector of additive scores, over the pairs whose
/// weight is not zero.
fn additive_gradient<R: Real>(
    d_scores: &[R],
    weights: &[R],
    [q, k, vector]: [&[R]; 3],
    shape: Shape,
    term: impl Fn(R) -> R,
) -> [Vec<R>; 3] {
    let Shape { heads, q_len, kv_len, head_dim, .. } = shape;
    let [mut d_q, mut d_k, mut d_vector] = [q, k, vector].map(|x| BlockSums::new(x.len()));
    for row in 0..weights.len() / kv_len {
        let (h, keys) = (row / q_len % heads, keys_of(row, &shape));
        if row % BLOCK == 0 {
            d_k.end_block(keys * head_dim..(keys + kv_len) * head_dim);
        }
        let of_head = if vector.len() == head_dim { 0 } else { h * head_dim };
        for j in 0..kv_len {
            let n = row * kv_len + j;
            if j % BLOCK == 0 {
                d_q.end_block(row * head_dim..(row + 1) * head_dim);
            }
            if n % BLOCK == 0 {
                d_vector.end_block(0..vector.len());
            }
            if weights[n] == R::zero() {
                continue;
            }
            for (d, v) in vector_of(vector, h, head_dim).iter().enumerate() {
                let (query, key) = (row * head_dim + d, (keys + j) * head_dim + d);
                let t = (q[query] + k[key]).tanh();
                let through = d_scores[n] * term(*v) * (R::one() - t * t);
                d_q.add(query, through);
                d_k.add(key, through);
                d_vector.add(of_head + d, d_scores[n] * term(t));
            }
        }
    }
    [d_q, d_k, d_vector].map(BlockSums::totals)
}
