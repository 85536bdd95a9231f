//! Feature maps of linear attention, and the matrices of random ones.

use crate::mask::mods::FeatureMod;
use crate::tensor::{Error, check_sizes};

/// What linear attention takes instead of the exponential of a product: `φ(q) · φ(k)`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum FeatureMap {
    /// `x` itself.
    Identity,
    /// `elu(x) + 1` (Katharopoulos et al. 2020, "Transformers are RNNs"), computed as `x + 1` above
    /// 0 and `exp(x)` below, which does not cancel.
    Elu,
    /// `max(x, 0)`.
    Relu,
    /// Features made of products with a matrix of random directions, `w` `[features, head_dim]`,
    /// which a call is given:
    /// see [`random_features`].
    Random {
        /// What is made of the products.
        kind: RandomFeatures,
        /// Rows of `w`.
        directions: usize,
    },
    /// One of the caller's own, channel by channel.
    Custom(FeatureMod),
}

/// How a state takes up a token's key and value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UpdateRule {
    /// `S + φ(k)ᵀ v`.
    #[default]
    Linear,
    /// `exp(decay) S + φ(k)ᵀ v`, with a decay for a head or for each of its features (Yang et al.
    /// 2024, "Gated linear attention"; ONNX's `gated`).
    Gated,
    /// `S + beta φ(k)ᵀ (v − φ(k) S)` (Yang et al. 2024, "Parallelizing linear transformers with the
    /// delta rule"; ONNX's `delta`).
    Delta,
    /// `exp(decay) S + beta φ(k)ᵀ (v − φ(k) exp(decay) S)` (Yang et al. 2025, "Gated delta
    /// networks"; ONNX's `gated_delta`).
    GatedDelta,
    /// `decay S + (1 − decay) φ(k)ᵀ v`, with a decay for a head: the gate of random feature
    /// attention (Peng et al. 2021).
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

/// What is made of products with random directions. `x'` is `x / head_dim^¼`, so that `exp(q' ·
/// k')` has attention's usual scale; `m` is the number of directions. Exponentials are computed
/// relative to their largest, exactly as an online softmax does it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum RandomFeatures {
    /// FAVOR+: `exp(w x' − |x'|² / 2) / √m`, m features (Choromanski et al. 2021, "Rethinking
    /// attention with Performers").
    Positive,
    /// Positive features of `w` and of `−w`, over `√2m`: 2 m of them.
    Hyperbolic,
    /// `exp(|x'|² / 2) [sin w x', cos w x'] / √m`: 2 m features, which may make weights negative.
    Trigonometric,
    /// `max(w x', 0) + epsilon`, m features: generalised attention.
    Relu {
        /// What is added to each.
        epsilon: f64,
    },
    /// `[sin w x̂, cos w x̂] / √m` of `x̂ = x / |x|`, 2 m features: random feature attention (Peng
    /// et al. 2021). Divide `w` by the kernel's σ.
    Fourier,
}

impl RandomFeatures {
    /// Features of so many directions.
    pub fn features(self, directions: usize) -> usize {
        match self {
            RandomFeatures::Positive | RandomFeatures::Relu { .. } => directions,
            _ => directions.saturating_mul(2),
        }
    }

    /// Whether its features have a logarithm of their own that they are divided by.
    pub(crate) fn is_scaled(self) -> bool {
        matches!(self, RandomFeatures::Positive | RandomFeatures::Hyperbolic | RandomFeatures::Trigonometric)
    }
}

impl FeatureMap {
    /// Features of a row of `head_dim` channels.
    pub fn features(self, head_dim: usize) -> usize {
        match self {
            FeatureMap::Random { kind, directions } => kind.features(directions),
            _ => head_dim,
        }
    }

    /// What is added to the norm unless a configuration says otherwise: 10⁻⁶, and nothing where the
    /// features' scale is arbitrary.
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

/// Directions for random features, `[directions, head_dim]`: blocks of `head_dim` orthogonal ones,
/// each as long as a normal vector would be (Choromanski et al. 2021), so that products have less
/// variance than those of independent ones. The same for the same seed; draw anew with another.
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
        // Gram and Schmidt's: a normal vector without what it has of those before it.
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

/// SplitMix64 (Steele, Lea, Flood 2014), in (0, 1).
fn unit(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (((z ^ (z >> 31)) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

/// Box and Muller's.
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
