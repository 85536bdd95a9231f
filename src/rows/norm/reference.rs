//! The reference of LayerNorm and RMSNorm.

use super::NormGate;
use super::config::NormConfig;
use crate::rows::elementwise::reference::{activate, activation_slope};
use crate::tensor::{Error, Real, check_sizes, eps_in_f32, expect_length};

/// Weight and bias of a norm, each `[features]`.
#[derive(Clone, Copy, Debug)]
pub struct HostNorm<'a, R> {
    /// If absent, the weight is 1.
    pub weight: Option<&'a [R]>,
    /// If absent, the bias is 0.
    pub bias: Option<&'a [R]>,
}

/// The gradients of a [`HostNorm`], also for an absent weight or bias.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HostNormGradients<R> {
    /// `[features]`.
    pub d_weight: Vec<R>,
    /// `[features]`.
    pub d_bias: Vec<R>,
}

/// Normalises rows of `x` `[rows, features]`, with two passes for mean and variance. Then
/// multiplies by `weight` and adds `bias`, both `[features]`, if present. For a residual sum, pass
/// the sum as `x`.
///
/// # Errors
/// A width of 0, a slice of the wrong length, or an `eps` below 0.
pub fn norm<R: Real>(
    x: &[R],
    features: usize,
    weight: Option<&[R]>,
    bias: Option<&[R]>,
    config: &NormConfig,
) -> Result<Vec<R>, Error> {
    check(x, features, weight, config)?;
    bias.map_or(Ok(()), |bias| expect_length("bias", bias, features))?;
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(features) {
        let (mean, scale) = statistics(row, config);
        for (d, x) in row.iter().enumerate() {
            let n = (*x - mean) * scale;
            let scaled = weight.map_or(n, |w| n * w[d]);
            out.push(bias.map_or(scaled, |b| scaled + b[d]));
        }
    }
    Ok(out)
}

fn check<R: Real>(x: &[R], features: usize, weight: Option<&[R]>, config: &NormConfig) -> Result<(), Error> {
    config.check()?;
    check_sizes("x", &[("features", features)])?;
    expect_length("x", x, x.len() / features * features)?;
    weight.map_or(Ok(()), |weight| expect_length("weight", weight, features))
}

/// Mean (0 for RMSNorm) and 1 / √(variance + eps) of a row.
fn statistics<R: Real>(row: &[R], config: &NormConfig) -> (R, R) {
    let count = R::of(row.len() as f64);
    let sum = |f: &dyn Fn(R) -> R| row.iter().fold(R::zero(), |sum, x| sum + f(*x));
    let mean = if config.centred { sum(&|x| x) / count } else { R::zero() };
    let variance = sum(&|x| (x - mean) * (x - mean)) / count;
    // Kernels also round eps to f32.
    let eps = R::of(f64::from(eps_in_f32(config.eps)));
    (mean, R::one() / (variance + eps).sqrt())
}

/// The gradients that [`norm_backward`] returns.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NormGradients<R> {
    /// `[rows, features]`.
    pub d_x: Vec<R>,
    /// `[features]`. Computed even if there is no weight.
    pub d_weight: Vec<R>,
    /// `[features]`. Computed even if there is no bias.
    pub d_bias: Vec<R>,
}

/// Returns the gradients of `Σ out · d_out` with respect to the inputs of [`norm`], for `d_out`
/// `[rows, features]`. With `g = d_out · weight` and `n` the normalised row:
///
/// ```text
/// d_x      = (g − mean(g) − n · mean(g · n)) / √(variance + eps)      without mean(g) for RMSNorm
/// d_weight = Σ d_out · n        d_bias = Σ d_out                       over rows
/// ```
///
/// # Errors
/// See [`norm`].
pub fn norm_backward<R: Real>(
    x: &[R],
    features: usize,
    weight: Option<&[R]>,
    config: &NormConfig,
    d_out: &[R],
) -> Result<NormGradients<R>, Error> {
    check(x, features, weight, config)?;
    expect_length("d_out", d_out, x.len())?;
    let count = R::of(features as f64);
    let mut d_x = Vec::with_capacity(x.len());
    let (mut d_weight, mut d_bias) = (vec![R::zero(); features], vec![R::zero(); features]);
    for (row, d_row) in x.chunks_exact(features).zip(d_out.chunks_exact(features)) {
        let (mean, scale) = statistics(row, config);
        let n: Vec<R> = row.iter().map(|x| (*x - mean) * scale).collect();
        let g: Vec<R> = d_row.iter().enumerate().map(|(d, g)| weight.map_or(*g, |w| *g * w[d])).collect();
        let sum = |x: &mut dyn Iterator<Item = R>| x.fold(R::zero(), |sum, x| sum + x) / count;
        let mean_g = if config.centred { sum(&mut g.iter().copied()) } else { R::zero() };
        let along = sum(&mut g.iter().zip(&n).map(|(g, n)| *g * *n));
        for d in 0..features {
            d_x.push(scale * (g[d] - mean_g - n[d] * along));
            d_weight[d] = d_weight[d] + d_row[d] * n[d];
            d_bias[d] = d_bias[d] + d_row[d];
        }
    }
    Ok(NormGradients { d_x, d_weight, d_bias })
}

/// Returns a [`norm`] with a gate, `[rows, features]`:
///
/// ```text
/// NormGate::after     norm(x) · f(gate)
/// NormGate::before    norm(x · f(gate))
/// ```
///
/// # Errors
/// See [`norm`]. The gate has the length of `x`.
pub fn gated_norm<R: Real>(
    x: &[R],
    features: usize,
    weight: Option<&[R]>,
    bias: Option<&[R]>,
    config: &NormConfig,
    gate: NormGate<&[R]>,
) -> Result<Vec<R>, Error> {
    let factors = factors(x, &gate)?;
    if gate.first {
        return norm(&products(x, &factors), features, weight, bias, config);
    }
    Ok(products(&norm(x, features, weight, bias, config)?, &factors))
}

/// Returns the activated gate.
fn factors<R: Real>(x: &[R], gate: &NormGate<&[R]>) -> Result<Vec<R>, Error> {
    expect_length("gate", gate.gate, x.len())?;
    Ok(gate.gate.iter().map(|gate_x| activate(*gate_x, gate.activation)).collect())
}

fn products<R: Real>(a: &[R], b: &[R]) -> Vec<R> {
    a.iter().zip(b).map(|(a, b)| *a * *b).collect()
}

/// The gradients that [`gated_norm_backward`] returns.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GatedNormGradients<R> {
    /// The gradients of x, weight and bias.
    pub norm: NormGradients<R>,
    /// `[rows, features]`.
    pub d_gate: Vec<R>,
}

/// Returns the gradients of `Σ out · d_out` with respect to the inputs of [`gated_norm`].
///
/// # Errors
/// See [`gated_norm`].
pub fn gated_norm_backward<R: Real>(
    x: &[R],
    features: usize,
    weight: Option<&[R]>,
    bias: Option<&[R]>,
    config: &NormConfig,
    gate: NormGate<&[R]>,
    d_out: &[R],
) -> Result<GatedNormGradients<R>, Error> {
    let factors = factors(x, &gate)?;
    let slopes: Vec<R> = gate.gate.iter().map(|x| activation_slope(*x, gate.activation)).collect();
    if gate.first {
        let mut norm = norm_backward(&products(x, &factors), features, weight, config, d_out)?;
        let d_gate = products(&products(&norm.d_x, x), &slopes);
        norm.d_x = products(&norm.d_x, &factors);
        return Ok(GatedNormGradients { norm, d_gate });
    }
    let out = self::norm(x, features, weight, bias, config)?;
    expect_length("d_out", d_out, x.len())?;
    let norm = norm_backward(x, features, weight, config, &products(d_out, &factors))?;
    Ok(GatedNormGradients { norm, d_gate: products(&products(d_out, &out), &slopes) })
}
