//! Feature maps of linear attention, and the matrices of random ones.

use crate::mask::mods::FeatureMod;
use crate::tensor::{Error, check_sizes};

/// The feature map φ of linear attention, which replaces the exponential of a product by
/// `φ(q) · φ(k)`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum FeatureMap {
    /// The identity, `x`.
    Identity,
    /// `elu(x) + 1` (Katharopoulos et al. 2020, "Transformers are RNNs"). Kernels compute it as
    /// `x + 1` above 0 and `exp(x)` below, which avoids cancellation.
    Elu,
    /// `max(x, 0)`.
    Relu,
    /// Features of products with a matrix of random directions, `w` `[features, head_dim]`. Each
    /// call receives this matrix, see [`random_features`].
    Random {
        /// The function that makes features of the products.
        kind: RandomFeatures,
        /// The number of rows of `w`.
        directions: usize,
    },
    /// A function of the caller, applied to each channel.
    Custom(FeatureMod),
}

/// The rule that adds a token's key and value to a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UpdateRule {
    /// `S + φ(k)ᵀ v`.
    #[default]
    Linear,
    /// `exp(decay) S + φ(k)ᵀ v`, with a decay for each head or for each of its features. (Yang et
    /// al. 2024, "Gated linear attention"; ONNX's `gated`.)
    Gated,
    /// `S + beta φ(k)ᵀ (v − φ(k) S)`. (Yang et al. 2024, "Parallelizing linear transformers with
    /// the delta rule"; ONNX's `delta`.)
    Delta,
    /// `exp(decay) S + beta φ(k)ᵀ (v − φ(k) exp(decay) S)`. (Yang et al. 2025, "Gated delta
    /// networks"; ONNX's `gated_delta`.)
    GatedDelta,
    /// `decay S + (1 − decay) φ(k)ᵀ v`, with a decay for each head. This is the gate of random
    /// feature attention (Peng et al. 2021).
    Averaged,
}

impl UpdateRule {
    pub(crate) const ALL: [UpdateRule; 5] = [
        UpdateRule::Linear,
        UpdateRule::Gated,
        UpdateRule::Delta,
        UpdateRule::GatedDelta,
        UpdateRule::Averaged,
    ];

    pub(crate) fn has_decay(self) -> bool {
        matches!(self, UpdateRule::Gated | UpdateRule::GatedDelta | UpdateRule::Averaged)
    }

    pub(crate) fn has_beta(self) -> bool {
        matches!(self, UpdateRule::Delta | UpdateRule::GatedDelta)
    }
}

/// The function that makes features of products with random directions. `x'` is `x / head_dim^¼`,
/// so that `exp(q' · k')` has the usual scale of attention. `m` is the number of directions.
/// Kernels compute exponentials relative to the largest one, as an online softmax does.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum RandomFeatures {
    /// FAVOR+: `exp(w x' − |x'|² / 2) / √m`, m features. (Choromanski et al. 2021, "Rethinking
    /// attention with Performers".)
    Positive,
    /// The positive features of `w` and of `−w`, divided by `√2m`: 2 m features.
    Hyperbolic,
    /// `exp(|x'|² / 2) [sin w x', cos w x'] / √m`: 2 m features. Weights can be negative.
    Trigonometric,
    /// `max(w x', 0) + epsilon`, m features: generalised attention.
    Relu {
        /// The number added to each feature.
        epsilon: f64,
    },
    /// `[sin w x̂, cos w x̂] / √m` of `x̂ = x / |x|`, 2 m features: random feature attention (Peng
    /// et al. 2021). Divide `w` by the σ of the kernel.
    Fourier,
}

impl RandomFeatures {
    /// Returns the number of features for `directions` directions.
    pub fn features(self, directions: usize) -> usize {
        match self {
            RandomFeatures::Positive | RandomFeatures::Relu { .. } => directions,
            _ => directions.saturating_mul(2),
        }
    }

    /// True if the features are divided by a scale whose logarithm is stored with them.
    pub(crate) fn is_scaled(self) -> bool {
        matches!(self, RandomFeatures::Positive | RandomFeatures::Hyperbolic | RandomFeatures::Trigonometric)
    }
}

impl FeatureMap {
    /// Returns the number of features of a row of `head_dim` channels.
    pub fn features(self, head_dim: usize) -> usize {
        match self {
            FeatureMap::Random { kind, directions } => kind.features(directions),
            _ => head_dim,
        }
    }

    /// Returns the default of the number that is added to the norm. It is 10⁻⁶, and 0 if the scale
    /// of the features is arbitrary.
    pub(crate) fn usual_eps(self) -> f64 {
        match self {
            FeatureMap::Random { .. } => 0.0,
            _ => 1e-6,
        }
    }

    pub(crate) fn is_scaled(self) -> bool {
        matches!(self, FeatureMap::Random { kind, .. } if kind.is_scaled())
    }
}

/// Returns directions for random features, `[directions, head_dim]`. Each block of `head_dim`
/// directions is orthogonal. Each direction is as long as a normal vector (Choromanski et al.
/// 2021). Products with them have less variance than products with independent directions. The same
/// seed always gives the same directions.
///
/// # Errors
/// A size of 0.
pub fn random_features(seed: u64, directions: usize, head_dim: usize) -> Result<Vec<f32>, Error> {
    check_sizes("random features", &[("directions", directions), ("head_dim", head_dim)])?;
    let mut state = seed;
    let mut rows: Vec<f32> = Vec::new();
    let mut block: Vec<Vec<f64>> = Vec::new();
    for n in 0..directions {
        if n % head_dim == 0 {
            block.clear();
        }
        // Gram–Schmidt: a normal vector minus its projections on the previous directions.
        let direction = loop {
            let mut x: Vec<f64> = (0..head_dim).map(|_| normal(&mut state)).collect();
            for _ in 0..2 {
                for other in &block {
                    let product: f64 = x.iter().zip(other).map(|(a, b)| a * b).sum();
                    x.iter_mut().zip(other).for_each(|(a, b)| *a -= product * b);
                }
            }
            let length = x.iter().map(|a| a * a).sum::<f64>().sqrt();
            if length > 1e-6 {
                break x.into_iter().map(|a| a / length).collect::<Vec<_>>();
            }
        };
        let length = (0..head_dim).map(|_| normal(&mut state).powi(2)).sum::<f64>().sqrt();
        rows.extend(direction.iter().map(|a| (a * length) as f32));
        block.push(direction);
    }
    Ok(rows)
}

/// Returns the next number of SplitMix64 (Steele, Lea, Flood 2014), in (0, 1).
fn unit(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (((z ^ (z >> 31)) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

/// Returns a normal random number (Box and Muller).
fn normal(state: &mut u64) -> f64 {
    let (a, b) = (unit(state), unit(state));
    (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directions_are_orthogonal_and_as_long_as_normal_vectors() {
        let (m, d) = (40, 16);
        let w = random_features(3, m, d).expect("sizes");
        assert_eq!(w, random_features(3, m, d).expect("sizes"));
        assert_ne!(w, random_features(4, m, d).expect("sizes"));
        let row = |n: usize| &w[n * d..][..d];
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
        for a in 0..m {
            for b in 0..a {
                if a / d == b / d {
                    assert!(dot(row(a), row(b)).abs() < 1e-4, "{a} {b}");
                }
            }
        }
        let mean = (0..m).map(|n| dot(row(n), row(n))).sum::<f64>() / m as f64;
        assert!((mean / d as f64 - 1.0).abs() < 0.3, "{mean}");
        assert!(random_features(0, 0, 4).is_err() && random_features(0, 4, 0).is_err());
    }
}
