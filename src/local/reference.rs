//! Attention to a window around a fractional position, and the prediction of positions.

use crate::matmul::projection::reference::HostLinear;
use crate::tensor::{Error, Real, Shape, count, expect_length};

/// The options of the reference of local attention; [`LocalConfig`](crate::local::LocalConfig) and
/// [`LocalForward`](crate::local::LocalForward) describe them.
#[derive(Clone, Copy, Debug)]
pub struct LocalOptions<'a> {
    /// Keys on each side of the key that is nearest to the position.
    pub half_window: usize,
    /// The standard deviation of the Gaussian. Without it the weights are those of the softmax.
    pub sigma: Option<f64>,
    /// Factor of scores.
    pub scale: f64,
    /// Keys of each batch entry.
    pub lengths: Option<&'a [u32]>,
}

/// The results of [`local_attention`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LocalAttended<R> {
    /// `[batch, heads, q_len, value_dim]`.
    pub out: Vec<R>,
    /// The weights of the softmax times the Gaussian, `[batch, heads, q_len, kv_len]`.
    pub weights: Vec<R>,
}

/// The results of [`local_attention_backward`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LocalGradients<R> {
    /// The gradient of the queries.
    pub d_q: Vec<R>,
    /// The gradient of the keys.
    pub d_k: Vec<R>,
    /// The gradient of the values.
    pub d_v: Vec<R>,
    /// The gradient of the positions.
    pub d_positions: Vec<R>,
}

/// A query, with the indices of its keys, its position and its batch entry.
struct Row {
    query: usize,
    keys: usize,
    position: usize,
    batch: usize,
}

/// Returns the rows of queries in order. `positions` is `[batch, heads, q_len]`, or
/// `[batch, q_len]` for all heads.
fn rows<R: Real>(
    [q, k, v]: [&[R]; 3],
    positions: &[R],
    shape: Shape,
    options: &LocalOptions,
) -> Result<Vec<Row>, Error> {
    shape.check()?;
    expect_length("q", q, count(shape.q()))?;
    expect_length("k", k, count(shape.k()))?;
    expect_length("v", v, count(shape.v()))?;
    let Shape { batch, heads, kv_heads, q_len, .. } = shape;
    let shared = positions.len() == batch.saturating_mul(q_len);
    if !shared {
        expect_length("positions", positions, count(shape.lse()))?;
    }
    options.lengths.map_or(Ok(()), |lengths| expect_length("lengths", lengths, batch))?;
    let row = |query: usize| {
        let (i, h, b) = (query % q_len, query / q_len % heads, query / q_len / heads);
        let position = if shared { b * q_len + i } else { query };
        Row { query, keys: b * kv_heads + h / shape.group(), position, batch: b }
    };
    Ok((0..batch * heads * q_len).map(row).collect())
}

/// Returns the keys that a query at `position` sees: those at most `half_window` from
/// `floor(position + ½)`.
fn window(position: f64, b: usize, kv_len: usize, options: &LocalOptions) -> std::ops::Range<usize> {
    // No key lies beyond this distance. NaN has no window.
    if position.is_nan() || position.abs() >= f64::from(1 << 30) {
        return 0..0;
    }
    let centre = (position + 0.5).floor() as i64;
    let length = options.lengths.map_or(kv_len, |lengths| kv_len.min(lengths[b] as usize));
    let half = i64::try_from(options.half_window).unwrap_or(i64::MAX);
    let first = centre.saturating_sub(half).max(0);
    let end = centre.saturating_add(half).saturating_add(1).clamp(0, length as i64);
    first as usize..end.max(first) as usize
}

/// The softmax, the Gaussian and the distance of each key of a window from the position.
struct Weights<R> {
    keys: std::ops::Range<usize>,
    softmax: Vec<R>,
    gaussian: Vec<R>,
    distance: Vec<R>,
}

fn weights<R: Real>(
    q: &[R],
    k: &[R],
    positions: &[R],
    row: &Row,
    shape: Shape,
    options: &LocalOptions,
) -> Weights<R> {
    let Shape { kv_len, head_dim: dim, .. } = shape;
    let position = positions[row.position];
    let keys = window(position.f64(), row.batch, kv_len, options);
    let query = &q[row.query * dim..][..dim];
    let score = |j: usize| {
        let key = &k[(row.keys * kv_len + j) * dim..][..dim];
        query.iter().zip(key).fold(R::zero(), |sum, (q, k)| sum + *q * *k) * R::of(options.scale)
    };
    let scores: Vec<R> = keys.clone().map(score).collect();
    let most = scores.iter().fold(R::neg_infinity(), |most, s| most.max(*s));
    let exps: Vec<R> = scores.iter().map(|s| (*s - most).exp()).collect();
    let sum = exps.iter().fold(R::zero(), |sum, e| sum + *e);
    let distance: Vec<R> = keys.clone().map(|j| R::of(j as f64) - position).collect();
    let gaussian = distance.iter().map(|x| match options.sigma {
        Some(sigma) => (-(*x * *x) / R::of(2.0 * sigma * sigma)).exp(),
        None => R::one(),
    });
    let gaussian = gaussian.collect();
    Weights { keys, softmax: exps.into_iter().map(|e| e / sum).collect(), gaussian, distance }
}

/// Computes local attention with a Gaussian (Luong et al. 2015, equations 7 and 10). Each query
/// takes the softmax of `scale · q · k` over the window around its position. The weights are
/// multiplied by `exp(−(j − position)² / 2σ²)`, so they sum to less than 1. A query without a key
/// in its window gives 0. `positions` is `[batch, heads, q_len]`, or `[batch, q_len]` for all
/// heads.
///
/// ```
/// use wgpu_attention::Shape;
/// use wgpu_attention::reference::{LocalOptions, local_attention};
/// let shape = Shape { q_len: 1, ..Shape::new(1, 1, 5, 1) };
/// let options = LocalOptions { half_window: 1, sigma: Some(0.5), scale: 1.0, lengths: None };
/// // Equal scores: a third each, and the neighbours' times exp(−2).
/// let got = local_attention::<f64>(&[0.0], &[0.0; 5], &[1.0; 5], &[2.0], shape, &options)?;
/// assert!((got.out[0] - (1.0 + 2.0 * (-2f64).exp()) / 3.0).abs() < 1e-15);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
///
/// # Errors
/// Dimensions that are zero or do not divide, and slices of a wrong length.
pub fn local_attention<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    positions: &[R],
    shape: Shape,
    options: &LocalOptions,
) -> Result<LocalAttended<R>, Error> {
    let rows = rows([q, k, v], positions, shape, options)?;
    let Shape { kv_len, value_dim, .. } = shape;
    let mut got = LocalAttended {
        out: vec![R::zero(); count(shape.out())],
        weights: vec![R::zero(); count(shape.weights())],
    };
    for row in &rows {
        let of = weights(q, k, positions, row, shape, options);
        for (n, j) in of.keys.clone().enumerate() {
            let w = of.softmax[n] * of.gaussian[n];
            got.weights[row.query * kv_len + j] = w;
            for c in 0..value_dim {
                let out = &mut got.out[row.query * value_dim + c];
                *out = *out + w * v[(row.keys * kv_len + j) * value_dim + c];
            }
        }
    }
    Ok(got)
}

/// Computes the gradients of `Σ out · d_out` with respect to the inputs of [`local_attention`]. The
/// set of keys in a window has no slope, so positions get only the gradient of the Gaussian.
///
/// # Errors
/// As [`local_attention`].
pub fn local_attention_backward<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    positions: &[R],
    d_out: &[R],
    shape: Shape,
    options: &LocalOptions,
) -> Result<LocalGradients<R>, Error> {
    backward([q, k, v], positions, d_out, shape, options, |x| x)
}

/// Computes the sums of the absolute values of the terms of [`local_attention_backward`], as a
/// measure for rounding errors.
///
/// # Errors
/// As [`local_attention`].
pub fn local_attention_backward_magnitudes<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    positions: &[R],
    d_out: &[R],
    shape: Shape,
    options: &LocalOptions,
) -> Result<LocalGradients<R>, Error> {
    backward([q, k, v], positions, d_out, shape, options, num_traits::Float::abs)
}

/// Computes the gradients. The function applies `of` to each term.
fn backward<R: Real>(
    [q, k, v]: [&[R]; 3],
    positions: &[R],
    d_out: &[R],
    shape: Shape,
    options: &LocalOptions,
    of: impl Fn(R) -> R,
) -> Result<LocalGradients<R>, Error> {
    let rows = rows([q, k, v], positions, shape, options)?;
    expect_length("d_out", d_out, count(shape.out()))?;
    let Shape { kv_len, head_dim, value_dim, .. } = shape;
    let zeros = |like: &[R]| vec![R::zero(); like.len()];
    let mut got =
        LocalGradients { d_q: zeros(q), d_k: zeros(k), d_v: zeros(v), d_positions: zeros(positions) };
    let magnitude = of(R::of(-1.0)) > R::zero();
    for row in &rows {
        let Weights { keys, softmax, gaussian, distance } = weights(q, k, positions, row, shape, options);
        let d = &d_out[row.query * value_dim..][..value_dim];
        // The gradient of each softmax weight.
        let d_weights = |j: usize| {
            let value = &v[(row.keys * kv_len + j) * value_dim..][..value_dim];
            value.iter().zip(d).fold(R::zero(), |sum, (v, d)| sum + of(*v * *d))
        };
        let d_softmax: Vec<R> = keys.clone().zip(&gaussian).map(|(j, g)| d_weights(j) * *g).collect();
        let mean = softmax.iter().zip(&d_softmax).fold(R::zero(), |sum, (a, d)| sum + *a * *d);
        for (n, j) in keys.enumerate() {
            let apart = if magnitude { d_softmax[n] + mean } else { d_softmax[n] - mean };
            let d_score = softmax[n] * apart * R::of(options.scale);
            if let Some(sigma) = options.sigma {
                let slope = of(softmax[n] * d_softmax[n] * distance[n] / R::of(sigma * sigma));
                let d_position = &mut got.d_positions[row.position];
                *d_position = *d_position + slope;
            }
            for c in 0..head_dim {
                let (x, y) = (row.query * head_dim + c, (row.keys * kv_len + j) * head_dim + c);
                got.d_q[x] = got.d_q[x] + of(d_score * k[y]);
                got.d_k[y] = got.d_k[y] + of(d_score * q[x]);
            }
            for (c, d) in d.iter().enumerate() {
                let y = (row.keys * kv_len + j) * value_dim + c;
                got.d_v[y] = got.d_v[y] + of(softmax[n] * gaussian[n] * *d);
            }
        }
    }
    Ok(got)
}

/// The results of [`predict_positions_backward`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PredictorGradients<R> {
    /// `[rows, features]`.
    pub d_hidden: Vec<R>,
    /// `[units, features]`.
    pub d_weight: Vec<R>,
    /// `[units]`.
    pub d_bias: Vec<R>,
    /// `[units]`.
    pub d_vector: Vec<R>,
}

/// Computes the positions that hidden states predict: `S · sigmoid(vector · tanh(W h + b))` (Luong
/// et al. 2015, equation 9). Hidden states are `[rows, features]`, `W` is `[units, features]`, and
/// `vector` is `[units]`. `sources` has S of each row.
///
/// # Errors
/// Slices that are not whole rows, or have a wrong length.
pub fn predict_positions<R: Real>(
    hidden: &[R],
    linear: HostLinear<R>,
    vector: &[R],
    sources: &[u32],
) -> Result<Vec<R>, Error> {
    let terms = predictor_terms(hidden, linear, vector, sources)?;
    Ok(terms.iter().zip(sources).map(|((_, s), n)| *s * R::of(f64::from(*n))).collect())
}

/// Returns `tanh(W h + b)` and the sigmoid of each row.
fn predictor_terms<R: Real>(
    hidden: &[R],
    linear: HostLinear<R>,
    vector: &[R],
    sources: &[u32],
) -> Result<Vec<(Vec<R>, R)>, Error> {
    let (rows, units) = (sources.len(), vector.len());
    let features = hidden.len() / rows.max(1);
    expect_length("hidden", hidden, rows * features)?;
    expect_length("linear.weight", linear.weight, units.saturating_mul(features))?;
    linear.bias.map_or(Ok(()), |bias| expect_length("linear.bias", bias, units))?;
    let row = |n: usize| {
        let h = &hidden[n * features..][..features];
        let unit = |u: usize| {
            let w = &linear.weight[u * features..][..features];
            let bias = linear.bias.map_or(R::zero(), |bias| bias[u]);
            w.iter().zip(h).fold(bias, |sum, (w, h)| sum + *w * *h).tanh()
        };
        let tanhs: Vec<R> = (0..units).map(unit).collect();
        let x = tanhs.iter().zip(vector).fold(R::zero(), |sum, (t, v)| sum + *t * *v);
        let sigmoid = R::one() / (R::one() + (-x).exp());
        (tanhs, sigmoid)
    };
    Ok((0..rows).map(row).collect())
}

/// Computes the gradients of `Σ positions · d_positions` with respect to the inputs of
/// [`predict_positions`].
///
/// # Errors
/// As [`predict_positions`].
pub fn predict_positions_backward<R: Real>(
    hidden: &[R],
    linear: HostLinear<R>,
    vector: &[R],
    sources: &[u32],
    d_positions: &[R],
) -> Result<PredictorGradients<R>, Error> {
    let terms = predictor_terms(hidden, linear, vector, sources)?;
    expect_length("d_positions", d_positions, sources.len())?;
    let (features, units) = (hidden.len() / sources.len().max(1), vector.len());
    let mut got = PredictorGradients {
        d_hidden: vec![R::zero(); hidden.len()],
        d_weight: vec![R::zero(); linear.weight.len()],
        d_bias: vec![R::zero(); units],
        d_vector: vec![R::zero(); units],
    };
    for (n, (tanhs, sigmoid)) in terms.iter().enumerate() {
        let d = d_positions[n] * R::of(f64::from(sources[n])) * *sigmoid * (R::one() - *sigmoid);
        for (u, t) in tanhs.iter().enumerate() {
            got.d_vector[u] = got.d_vector[u] + d * *t;
            let d = d * vector[u] * (R::one() - *t * *t);
            got.d_bias[u] = got.d_bias[u] + d;
            for c in 0..features {
                let (x, w) = (n * features + c, u * features + c);
                got.d_hidden[x] = got.d_hidden[x] + d * linear.weight[w];
                got.d_weight[w] = got.d_weight[w] + d * hidden[x];
            }
        }
    }
    Ok(got)
}
