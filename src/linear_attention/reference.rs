//! Linear attention, computed pair by pair.

use super::feature_map::{FeatureMap, RandomFeatures, UpdateRule};
use crate::tensor::{Error, Real, Shape, expect_length};

/// True for the pairs of query and key that are seen, by batch entry, key/value head, query and
/// key.
pub type Seen<'a> = &'a dyn Fn([usize; 4]) -> bool;

/// The options of the reference of linear attention.
#[derive(Clone, Copy)]
pub struct LinearOptions<'a> {
    /// The feature map φ.
    pub map: FeatureMap,
    /// Directions of random features: `[1 or kv_heads, directions, head_dim]`.
    pub directions: &'a [f32],
    /// True if query i sees only the keys j ≤ i.
    pub causal: bool,
    /// The number added to the norm.
    pub eps: f64,
    /// True if results are divided by the norm; otherwise they are multiplied by `scale`.
    pub normalised: bool,
    /// The factor of results that are not normalised.
    pub scale: f64,
    /// An additional condition for the pairs that are seen.
    pub seen: Option<Seen<'a>>,
    /// The function of [`FeatureMap::Custom`] and its slope.
    pub own: Option<[&'a dyn Fn(f64) -> f64; 2]>,
}

impl LinearOptions<'_> {
    /// Returns options for normalised attention, with the default eps of φ.
    pub fn new(map: FeatureMap) -> Self {
        LinearOptions {
            map,
            directions: &[],
            causal: false,
            eps: map.usual_eps(),
            normalised: true,
            scale: 1.0,
            seen: None,
            own: None,
        }
    }

    fn sees(&self, [b, kv, i, j]: [usize; 4]) -> bool {
        (!self.causal || j <= i) && self.seen.is_none_or(|seen| seen([b, kv, i, j]))
    }
}

impl std::fmt::Debug for LinearOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("LinearOptions")
            .field("map", &self.map)
            .field("causal", &self.causal)
            .finish_non_exhaustive()
    }
}

/// The features of a row, to be multiplied by the exponential of `log`.
#[derive(Clone, Debug)]
pub struct FeatureRow<R> {
    /// The features; [`FeatureMap::features`] gives their number.
    pub values: Vec<R>,
    /// The logarithm of the scale of `values`.
    pub log: R,
}

/// Returns the features of a row `x`, with the directions of its head.
pub fn features<R: Real>(options: &LinearOptions, x: &[R], directions: &[f32]) -> FeatureRow<R> {
    let zero = R::zero();
    let plain = |values: Vec<R>| FeatureRow { values, log: R::zero() };
    match options.map {
        // Without a function the feature is NaN, which no comparison accepts.
        FeatureMap::Custom(_) => {
            let own = |x: &R| options.own.map_or(R::nan(), |[value, _]| R::of(value(x.f64())));
            plain(x.iter().map(own).collect())
        }
        FeatureMap::Identity => plain(x.to_vec()),
        FeatureMap::Elu => plain(x.iter().map(|x| if *x > zero { *x + R::one() } else { x.exp() }).collect()),
        FeatureMap::Relu => plain(x.iter().map(|x| x.max(zero)).collect()),
        FeatureMap::Random { kind, directions: m } => {
            let (products, half_square) = projected(kind, x, directions);
            let root = |n: usize| R::of(1.0 / (n as f64).sqrt());
            let both = |f: &dyn Fn(R) -> R, g: &dyn Fn(R) -> R, scale: R| -> Vec<R> {
                let of = |f: &dyn Fn(R) -> R| products.iter().map(|t| f(*t) * scale).collect::<Vec<_>>();
                [of(f), of(g)].concat()
            };
            match kind {
                RandomFeatures::Positive => {
                    let most = products.iter().copied().fold(R::neg_infinity(), R::max);
                    let values = products.iter().map(|t| (*t - most).exp() * root(m)).collect();
                    FeatureRow { values, log: most - half_square }
                }
                RandomFeatures::Hyperbolic => {
                    let most = products.iter().fold(zero, |most, t| most.max(t.abs()));
                    let values = both(&|t| (t - most).exp(), &|t| (-t - most).exp(), root(2 * m));
                    FeatureRow { values, log: most - half_square }
                }
                RandomFeatures::Trigonometric => {
                    FeatureRow { values: both(&R::sin, &R::cos, root(m)), log: half_square }
                }
                RandomFeatures::Relu { epsilon } => {
                    plain(products.iter().map(|t| t.max(zero) + R::of(epsilon)).collect())
                }
                RandomFeatures::Fourier => plain(both(&R::sin, &R::cos, root(m))),
            }
        }
    }
}

/// Returns the products of a row with the directions, and half the square of its length. The row is
/// first scaled, or divided by its length.
fn projected<R: Real>(kind: RandomFeatures, x: &[R], directions: &[f32]) -> (Vec<R>, R) {
    let factor = factor_of(kind, x);
    let square = x.iter().fold(R::zero(), |sum, x| sum + *x * *x) * factor * factor;
    let product =
        |w: &[f32]| w.iter().zip(x).fold(R::zero(), |sum, (w, x)| sum + R::of(f64::from(*w)) * *x) * factor;
    (directions.chunks_exact(x.len()).map(product).collect(), square * R::of(0.5))
}

fn factor_of<R: Real>(kind: RandomFeatures, x: &[R]) -> R {
    match kind {
        RandomFeatures::Fourier => {
            let length = x.iter().fold(R::zero(), |sum, x| sum + *x * *x).sqrt();
            if length > R::zero() { R::one() / length } else { R::zero() }
        }
        _ => R::of((x.len() as f64).powf(-0.25)),
    }
}

/// Returns the gradient of a row from the gradient of its features. `gradient` is the gradient of
/// `values`, with their scale as a constant that the result does not depend on.
fn features_backward<R: Real>(
    options: &LinearOptions,
    x: &[R],
    directions: &[f32],
    row: &FeatureRow<R>,
    gradient: &[R],
) -> Vec<R> {
    let zero = R::zero();
    let FeatureMap::Random { kind, directions: m } = options.map else {
        let slope = |x: R| match options.map {
            FeatureMap::Custom(_) => options.own.map_or(R::nan(), |[_, slope]| R::of(slope(x.f64()))),
            FeatureMap::Elu if x <= zero => x.exp(),
            FeatureMap::Relu if x <= zero => zero,
            _ => R::one(),
        };
        return x.iter().zip(gradient).map(|(x, g)| slope(*x) * *g).collect();
    };
    let (products, _) = projected(kind, x, directions);
    // The gradients of the products and of half the square.
    let (d_products, d_half): (Vec<R>, R) = {
        let total = row.values.iter().zip(gradient).fold(zero, |sum, (v, g)| sum + *v * *g);
        let at = |n: usize| row.values[n] * gradient[n];
        match kind {
            RandomFeatures::Positive => ((0..m).map(at).collect(), -total),
            RandomFeatures::Hyperbolic => ((0..m).map(|n| at(n) - at(m + n)).collect(), -total),
            RandomFeatures::Trigonometric | RandomFeatures::Fourier => {
                let by = |n: usize| row.values[m + n] * gradient[n] - row.values[n] * gradient[m + n];
                let half = if kind == RandomFeatures::Trigonometric { total } else { zero };
                ((0..m).map(by).collect(), half)
            }
            RandomFeatures::Relu { .. } => {
                let by = |n: usize| if products[n] > zero { gradient[n] } else { zero };
                ((0..m).map(by).collect(), zero)
            }
        }
    };
    let factor = factor_of(kind, x);
    let mut d_x: Vec<R> = (0..x.len())
        .map(|d| {
            let of = directions.chunks_exact(x.len()).zip(&d_products);
            let sum = of.fold(zero, |sum, (w, g)| sum + R::of(f64::from(w[d])) * *g);
            sum * factor + d_half * x[d] * factor * factor
        })
        .collect();
    if kind == RandomFeatures::Fourier {
        // For a row of length 1 only the gradient orthogonal to the row counts.
        let along = x.iter().zip(&d_x).fold(zero, |sum, (x, g)| sum + *x * *g) * factor * factor;
        d_x.iter_mut().zip(x).for_each(|(g, x)| *g = *g - along * *x);
    }
    d_x
}

/// The results of linear attention.
#[derive(Clone, Debug)]
pub struct LinearAttended<R> {
    /// `[batch, heads, q_len, value_dim]`.
    pub out: Vec<R>,
    /// `Σ φ(k)ᵀ v` over the keys that the last query sees, `[batch, kv_heads, features,
    /// value_dim]`, relative to `log`.
    pub state: Vec<R>,
    /// `Σ φ(k)`, `[batch, kv_heads, features]`, relative to `log`.
    pub norm: Vec<R>,
    /// The logarithm of their scale, `[batch, kv_heads]`. With random features it is the largest
    /// logarithm of a key, or −∞ without keys. Otherwise it is 0.
    pub log: Vec<R>,
}

struct Rows<R> {
    queries: Vec<FeatureRow<R>>,
    keys: Vec<FeatureRow<R>>,
}

fn rows<R: Real>(q: &[R], k: &[R], v: &[R], shape: Shape, options: &LinearOptions) -> Result<Rows<R>, Error> {
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
    shape.check()?;
    expect_length("q", q, batch * heads * q_len * head_dim)?;
    expect_length("k", k, batch * kv_heads * kv_len * head_dim)?;
    expect_length("v", v, batch * kv_heads * kv_len * value_dim)?;
    let size = match options.map {
        FeatureMap::Random { directions, .. } => directions * head_dim,
        _ => 0,
    };
    let per_head = options.directions.len() == kv_heads * size;
    if !per_head {
        expect_length("directions", options.directions, size)?;
    }
    let of = |kv: usize| if per_head { &options.directions[kv * size..][..size] } else { options.directions };
    let all = |x: &[R], heads: usize, len: usize| -> Vec<FeatureRow<R>> {
        let group = heads / kv_heads;
        let row = |(n, x): (usize, &[R])| features(options, x, of(n / len % heads / group));
        x.chunks_exact(head_dim).enumerate().map(row).collect()
    };
    Ok(Rows { queries: all(q, heads, q_len), keys: all(k, kv_heads, kv_len) })
}

impl<R: Real> Rows<R> {
    /// Returns the weights of the keys of a query and their sum, the divisor of results. Weights
    /// are relative to the largest scale among the keys that the query sees.
    fn weights(&self, shape: Shape, options: &LinearOptions, [b, h, i]: [usize; 3]) -> (Vec<Option<R>>, R) {
        let Shape { heads, kv_heads, q_len, kv_len, .. } = shape;
        let kv = h / (heads / kv_heads);
        let query = &self.queries[(b * heads + h) * q_len + i];
        let key = |j: usize| &self.keys[(b * kv_heads + kv) * kv_len + j];
        let seen = |j: usize| options.sees([b, kv, i, j]);
        let most = (0..kv_len).filter(|j| seen(*j)).fold(R::neg_infinity(), |most, j| most.max(key(j).log));
        // Without normalisation the scale does not cancel.
        let most = if options.normalised { most } else { -query.log };
        let weight = |j: usize| {
            let product =
                query.values.iter().zip(&key(j).values).fold(R::zero(), |sum, (a, b)| sum + *a * *b);
            product * (key(j).log - most).exp()
        };
        let weights: Vec<Option<R>> = (0..kv_len).map(|j| seen(j).then(|| weight(j))).collect();
        let norm = weights.iter().flatten().fold(R::zero(), |sum, w| sum + *w);
        (weights, norm)
    }

    /// Returns the factor of the sum of a query.
    fn factor(options: &LinearOptions, norm: R) -> R {
        match (options.normalised, norm == R::zero()) {
            (false, _) => R::of(options.scale),
            (true, true) => R::zero(),
            (true, false) => R::one() / (norm + R::of(options.eps)),
        }
    }
}

/// Computes `Σⱼ φ(qᵢ)·φ(kⱼ) vⱼ / (Σⱼ φ(qᵢ)·φ(kⱼ) + eps)` over the keys that query i sees
/// (Katharopoulos et al. 2020). A query whose norm is 0 gives 0.
///
/// # Errors
/// Slices whose lengths do not match `shape`.
pub fn linear_attention<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    shape: Shape,
    options: &LinearOptions,
) -> Result<LinearAttended<R>, Error> {
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
    let rows = rows(q, k, v, shape, options)?;
    let mut out = vec![R::zero(); batch * heads * q_len * value_dim];
    for (n, out) in out.chunks_exact_mut(value_dim).enumerate() {
        let [b, h, i] = [n / q_len / heads, n / q_len % heads, n % q_len];
        let kv = h / (heads / kv_heads);
        let (weights, norm) = rows.weights(shape, options, [b, h, i]);
        let factor = Rows::factor(options, norm);
        for (j, weight) in weights.iter().enumerate() {
            let Some(weight) = weight else { continue };
            let value = &v[((b * kv_heads + kv) * kv_len + j) * value_dim..][..value_dim];
            out.iter_mut().zip(value).for_each(|(out, v)| *out = *out + *weight * *v);
        }
        out.iter_mut().for_each(|out| *out = *out * factor);
    }
    let features = options.map.features(head_dim);
    let mut state = vec![R::zero(); batch * kv_heads * features * value_dim];
    let mut norm = vec![R::zero(); batch * kv_heads * features];
    let mut logs = Vec::new();
    for z in 0..batch * kv_heads {
        let seen: Vec<usize> =
            (0..kv_len).filter(|j| options.sees([z / kv_heads, z % kv_heads, q_len - 1, *j])).collect();
        let key = |j: usize| &rows.keys[z * kv_len + j];
        let log = seen.iter().fold(R::neg_infinity(), |most, j| most.max(key(*j).log));
        for j in seen {
            let scale = (key(j).log - log).exp();
            for f in 0..features {
                let feature = key(j).values[f] * scale;
                norm[z * features + f] = norm[z * features + f] + feature;
                for c in 0..value_dim {
                    let at = (z * features + f) * value_dim + c;
                    state[at] = state[at] + feature * v[(z * kv_len + j) * value_dim + c];
                }
            }
        }
        logs.push(log);
    }
    Ok(LinearAttended { out, state, norm, log: logs })
}

/// Computes linear attention token by token with an update `rule`. `decay` is
/// `[batch, kv_heads, length, 1 or features]` and `beta` is `[batch, kv_heads, length, 1]`. Each is
/// empty if the rule does not use it. Every query sees the keys up to its position.
///
/// # Errors
/// Slices whose lengths do not match `shape`.
pub fn linear_recurrence<R: Real>(
    [q, k, v]: [&[R]; 3],
    shape: Shape,
    options: &LinearOptions,
    rule: UpdateRule,
    decay: &[R],
    beta: &[R],
) -> Result<LinearAttended<R>, Error> {
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
    let rows = rows(q, k, v, shape, options)?;
    expect_length("k", k, batch * kv_heads * q_len * head_dim)?;
    let tokens = batch * kv_heads * kv_len;
    let features = options.map.features(head_dim);
    let per_feature = decay.len() == tokens * features;
    if rule.has_decay() && !per_feature {
        expect_length("decay", decay, tokens)?;
    }
    if rule.has_beta() {
        expect_length("beta", beta, tokens)?;
    }
    let group = heads / kv_heads;
    let mut out = vec![R::zero(); batch * heads * q_len * value_dim];
    let (mut states, mut norms) = (Vec::new(), Vec::new());
    for z in 0..batch * kv_heads {
        let mut state = vec![R::zero(); features * value_dim];
        let mut norm = vec![R::zero(); features];
        for t in 0..kv_len {
            let token = z * kv_len + t;
            let of_decay = |f: usize| decay[if per_feature { token * features + f } else { token }];
            let kept = |f: usize| match rule {
                UpdateRule::Gated | UpdateRule::GatedDelta => of_decay(f).exp(),
                UpdateRule::Averaged => of_decay(f),
                UpdateRule::Linear | UpdateRule::Delta => R::one(),
            };
            let rate = match rule {
                UpdateRule::Delta | UpdateRule::GatedDelta => beta[token],
                UpdateRule::Averaged => R::one() - of_decay(0),
                UpdateRule::Linear | UpdateRule::Gated => R::one(),
            };
            let row = &rows.keys[token];
            let key: Vec<R> = row.values.iter().map(|x| *x * row.log.exp()).collect();
            for (f, (norm, key)) in norm.iter_mut().zip(&key).enumerate() {
                *norm = *norm * kept(f) + *key * rate;
            }
            for c in 0..value_dim {
                let known = (0..features)
                    .filter(|_| rule.has_beta())
                    .fold(R::zero(), |sum, f| sum + state[f * value_dim + c] * kept(f) * key[f]);
                let update = (v[token * value_dim + c] - known) * rate;
                for (f, key) in key.iter().enumerate() {
                    let at = f * value_dim + c;
                    state[at] = state[at] * kept(f) + *key * update;
                }
            }
            for n in 0..group {
                let h = z % kv_heads * group + n;
                let at = (z / kv_heads * heads + h) * q_len + t;
                let query: Vec<R> =
                    rows.queries[at].values.iter().map(|x| *x * rows.queries[at].log.exp()).collect();
                let sum = query.iter().zip(&norm).fold(R::zero(), |sum, (q, n)| sum + *q * *n);
                let factor = Rows::factor(options, sum);
                for c in 0..value_dim {
                    let of = |f: usize| query[f] * state[f * value_dim + c];
                    out[at * value_dim + c] = (0..features).fold(R::zero(), |sum, f| sum + of(f)) * factor;
                }
            }
        }
        states.extend(state);
        norms.extend(norm);
    }
    Ok(LinearAttended { out, state: states, norm: norms, log: vec![R::zero(); batch * kv_heads] })
}

/// The gradients of linear attention.
#[derive(Clone, Debug)]
pub struct LinearAttentionGradients<R> {
    /// Shaped as q.
    pub d_q: Vec<R>,
    /// Shaped as k.
    pub d_k: Vec<R>,
    /// Shaped as v.
    pub d_v: Vec<R>,
}

/// Computes the gradients of `Σ out · d_out`. If `out` is absent, the function computes it.
///
/// # Errors
/// Slices whose lengths do not match `shape`.
pub fn linear_attention_backward<R: Real>(
    [q, k, v]: [&[R]; 3],
    out: Option<&[R]>,
    d_out: &[R],
    shape: Shape,
    options: &LinearOptions,
) -> Result<LinearAttentionGradients<R>, Error> {
    backward([q, k, v], out, d_out, shape, options, false)
}

/// Computes [`linear_attention_backward`] with the absolute value of every term, as a measure for
/// tolerances.
///
/// # Errors
/// As [`linear_attention_backward`].
pub fn linear_attention_backward_magnitudes<R: Real>(
    [q, k, v]: [&[R]; 3],
    d_out: &[R],
    shape: Shape,
    options: &LinearOptions,
) -> Result<LinearAttentionGradients<R>, Error> {
    backward([q, k, v], None, d_out, shape, options, true)
}

/// Returns the largest sum of absolute values of the terms of an element of the result.
///
/// # Errors
/// As [`linear_attention`].
#[cfg(feature = "inspect")]
pub fn linear_attention_magnitude<R: Real>(
    [q, k, v]: [&[R]; 3],
    shape: Shape,
    options: &LinearOptions,
) -> Result<f64, Error> {
    let Shape { batch, heads, kv_heads, q_len, kv_len, value_dim, .. } = shape;
    let rows = rows(q, k, v, shape, options)?;
    let mut most = 0f64;
    for n in 0..batch * heads * q_len {
        let [b, h, i] = [n / q_len / heads, n / q_len % heads, n % q_len];
        let (weights, norm) = rows.weights(shape, options, [b, h, i]);
        let values = &v[(b * kv_heads + h / (heads / kv_heads)) * kv_len * value_dim..];
        let largest =
            |j: usize| values[j * value_dim..][..value_dim].iter().fold(0f64, |m, v| m.max(v.f64().abs()));
        let all = weights.iter().enumerate();
        let sum: f64 = all.map(|(j, w)| w.map_or(0.0, |w| w.f64().abs() * largest(j))).sum();
        most = most.max(sum * Rows::factor(options, norm).f64().abs());
    }
    Ok(most)
}

fn backward<R: Real>(
    [q, k, v]: [&[R]; 3],
    out: Option<&[R]>,
    d_out: &[R],
    shape: Shape,
    options: &LinearOptions,
    magnitudes: bool,
) -> Result<LinearAttentionGradients<R>, Error> {
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
    let rows = rows(q, k, v, shape, options)?;
    expect_length("d_out", d_out, batch * heads * q_len * value_dim)?;
    let computed;
    let out = match out {
        Some(out) => out,
        None => {
            computed = linear_attention(q, k, v, shape, options)?.out;
            &computed
        }
    };
    expect_length("out", out, d_out.len())?;
    let features = options.map.features(head_dim);
    let zeros = |n: usize| vec![R::zero(); n];
    let mut d_features_q = zeros(rows.queries.len() * features);
    let mut d_features_k = zeros(rows.keys.len() * features);
    let mut d_v = zeros(v.len());
    let size = |x: R| if magnitudes { x.abs() } else { x };
    let dot = |a: &[R], b: &[R]| a.iter().zip(b).fold(R::zero(), |sum, (a, b)| sum + size(*a * *b));
    for n in 0..batch * heads * q_len {
        let [b, h, i] = [n / q_len / heads, n / q_len % heads, n % q_len];
        let kv = h / (heads / kv_heads);
        let (weights, norm) = rows.weights(shape, options, [b, h, i]);
        let factor = Rows::factor(options, norm);
        let d_row = &d_out[n * value_dim..][..value_dim];
        let along =
            if options.normalised { dot(d_row, &out[n * value_dim..][..value_dim]) } else { R::zero() };
        let query = &rows.queries[n];
        let most = (0..kv_len)
            .filter(|j| weights[*j].is_some())
            .fold(R::neg_infinity(), |most, j| most.max(rows.keys[(b * kv_heads + kv) * kv_len + j].log));
        let most = if options.normalised { most } else { -query.log };
        for (j, weight) in weights.iter().enumerate() {
            let Some(weight) = weight else { continue };
            let row = (b * kv_heads + kv) * kv_len + j;
            let value = &v[row * value_dim..][..value_dim];
            // The gradient of the product of features.
            let product = dot(d_row, value);
            let d_weight = if magnitudes { product + along } else { product - along };
            let d_weight = d_weight * factor * (rows.keys[row].log - most).exp();
            for f in 0..features {
                let (a, b) = (n * features + f, row * features + f);
                d_features_q[a] = d_features_q[a] + size(d_weight * rows.keys[row].values[f]);
                d_features_k[b] = d_features_k[b] + size(d_weight * query.values[f]);
            }
            for (d_v, d) in d_v[row * value_dim..].iter_mut().zip(d_row) {
                *d_v = *d_v + size(*weight * factor * *d);
            }
        }
    }
    let per_head = match options.map {
        FeatureMap::Random { directions, .. } if options.directions.len() > directions * head_dim => {
            directions * head_dim
        }
        _ => 0,
    };
    let through = |x: &[R], rows: &[FeatureRow<R>], gradients: &[R], heads: usize, len: usize| -> Vec<R> {
        let group = heads / kv_heads;
        let all = x.chunks_exact(head_dim).zip(gradients.chunks_exact(features)).enumerate();
        all.flat_map(|(n, (x, gradient))| {
            let directions = &options.directions[per_head * (n / len % heads / group)..];
            let count = match options.map {
                FeatureMap::Random { directions, .. } => directions * head_dim,
                _ => 0,
            };
            if magnitudes {
                return magnitude_through(options, x, &directions[..count], &rows[n], gradient);
            }
            features_backward(options, x, &directions[..count], &rows[n], gradient)
        })
        .collect()
    };
    Ok(LinearAttentionGradients {
        d_q: through(q, &rows.queries, &d_features_q, heads, q_len),
        d_k: through(k, &rows.keys, &d_features_k, kv_heads, kv_len),
        d_v,
    })
}

/// Computes the terms of [`features_backward`] with their absolute values.
fn magnitude_through<R: Real>(
    options: &LinearOptions,
    x: &[R],
    directions: &[f32],
    row: &FeatureRow<R>,
    gradient: &[R],
) -> Vec<R> {
    let FeatureMap::Random { kind, directions: m } = options.map else {
        return features_backward(options, x, directions, row, gradient).into_iter().map(R::abs).collect();
    };
    let total = row.values.iter().zip(gradient).fold(R::zero(), |sum, (v, g)| sum + (*v * *g).abs());
    let at = |n: usize| match kind {
        RandomFeatures::Relu { .. } => gradient[n],
        RandomFeatures::Positive => (row.values[n] * gradient[n]).abs(),
        RandomFeatures::Hyperbolic => {
            (row.values[n] * gradient[n]).abs() + (row.values[m + n] * gradient[m + n]).abs()
        }
        _ => (row.values[m + n] * gradient[n]).abs() + (row.values[n] * gradient[m + n]).abs(),
    };
    let factor = factor_of(kind, x);
    let mut d_x: Vec<R> = (0..x.len())
        .map(|d| {
            let of = directions.chunks_exact(x.len()).enumerate();
            let sum = of.fold(R::zero(), |sum, (n, w)| sum + (R::of(f64::from(w[d])) * at(n)).abs());
            sum * factor + total * x[d].abs() * factor * factor
        })
        .collect();
    if kind == RandomFeatures::Fourier {
        let along = x.iter().zip(&d_x).fold(R::zero(), |sum, (x, g)| sum + (*x * *g).abs()) * factor * factor;
        d_x.iter_mut().zip(x).for_each(|(g, x)| *g = *g + along * x.abs());
    }
    d_x
}
