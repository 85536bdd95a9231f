//! The values that a cache returns for the values that were put into it.

use super::CacheStorage;
use crate::tensor::Real;

/// Scales and rounding of a scaled storage.
#[derive(Clone, Copy)]
enum Levels {
    /// Levels on either side of 0, to which values are rounded.
    Even(f32),
    Float(SmallFloat),
    /// The levels of [`CacheStorage::Gaussian4`].
    Gaussian,
    /// ggml's Q8_0.
    GgmlBytes,
    /// ggml's Q4_0.
    GgmlNibbles,
}

/// A float of eight bits.
#[derive(Clone, Copy)]
struct SmallFloat {
    /// Bits of the mantissa.
    bits: i32,
    /// The exponent of the smallest normal number.
    least: i32,
    /// The largest finite number.
    most: f32,
}

impl SmallFloat {
    const E4M3: SmallFloat = SmallFloat { bits: 3, least: -6, most: 448.0 };
    const E5M2: SmallFloat = SmallFloat { bits: 2, least: -14, most: 57344.0 };

    /// The nearest number, ties to even, at most the largest.
    fn nearest(self, x: f32) -> f32 {
        if x == 0.0 {
            return x;
        }
        let exponent = (x.abs().log2().floor() as i32).max(self.least);
        let step = 2f32.powi(exponent - self.bits);
        ((x / step).round_ties_even() * step).clamp(-self.most, self.most)
    }
}

/// Returns the level of [`CacheStorage::Gaussian4`] with this number, 0 to 15.
fn gaussian_level(number: usize) -> f32 {
    let t = number as f32 - 7.5;
    t * (0.26071 + t * t * (0.0003008 + t * t * 0.00002658))
}

impl Levels {
    fn of(storage: CacheStorage) -> Option<Self> {
        match storage {
            CacheStorage::F32 | CacheStorage::F16 | CacheStorage::BF16 => None,
            CacheStorage::Q8(_) => Some(Levels::Even(127.0)),
            CacheStorage::E4M3(_) => Some(Levels::Float(SmallFloat::E4M3)),
            CacheStorage::E5M2(_) => Some(Levels::Float(SmallFloat::E5M2)),
            CacheStorage::Q4(_) => Some(Levels::Even(7.0)),
            CacheStorage::Gaussian4(_) => Some(Levels::Gaussian),
            CacheStorage::Q8_0 => Some(Levels::GgmlBytes),
            CacheStorage::Q4_0 => Some(Levels::GgmlNibbles),
        }
    }

    /// The scale by which a group is divided. It is NaN if a value is infinite or NaN.
    fn scale(self, group: &[f32]) -> f32 {
        if group.iter().any(|x| !x.is_finite()) {
            return f32::NAN;
        }
        let peak = group.iter().fold(0.0f32, |peak, x| if x.abs() > peak.abs() { *x } else { peak });
        let (scale, least) = match self {
            Levels::Even(most) => (peak.abs() / most, 1.0),
            Levels::Float(float) => (peak.abs() / float.most, 1.0),
            Levels::Gaussian => {
                let squares: f64 = group.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
                ((squares / group.len().max(1) as f64).sqrt() as f32, 0.0)
            }
            Levels::GgmlBytes => (peak.abs() / 127.0, 0.0),
            Levels::GgmlNibbles => (peak / -8.0, 0.0),
        };
        if scale.abs() < f32::MIN_POSITIVE { least } else { scale }
    }

    /// The scale that is stored.
    fn stored(self, scale: f32) -> f32 {
        match self {
            Levels::Even(_) | Levels::Float(_) | Levels::Gaussian => scale,
            Levels::GgmlBytes | Levels::GgmlNibbles => half(scale),
        }
    }

    fn level(self, x: f32, scale: f32) -> f32 {
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        match self {
            Levels::Even(most) => (x / scale).round_ties_even().clamp(-most, most),
            Levels::Float(float) => float.nearest(x / scale),
            Levels::Gaussian => {
                let near = |number: &usize| {
                    x * inverse > 0.5 * (gaussian_level(*number) + gaussian_level(*number + 1))
                };
                gaussian_level((0..15).filter(near).count())
            }
            Levels::GgmlBytes => (x * inverse).round(),
            Levels::GgmlNibbles => (x * inverse + 8.5).trunc().min(15.0) - 8.0,
        }
    }
}

/// Returns the scale of each group of a row, as [`CacheStorage`] defines it. It is NaN if a value
/// is infinite or NaN. Float storage has no scales.
pub fn scales(storage: CacheStorage, row: &[f32]) -> Vec<f32> {
    let Some(levels) = Levels::of(storage) else { return Vec::new() };
    row.chunks(storage.group(row.len())).map(|group| levels.stored(levels.scale(group))).collect()
}

/// Returns a row of keys or values of one head, as `storage` stores it. Devices may differ from it
/// in two ways:
///
/// - If a value lies halfway between two levels, a device may choose the other level.
/// - F16 rounds to the nearest here, but WebGPU allows a device to choose either neighbour.
///
/// BF16 rounds to the nearest, ties to even, on every device. So do E4M3 and E5M2, except that the
/// division by the scale may be off by 2.5 ULP.
pub fn stored(storage: CacheStorage, row: &[f32]) -> Vec<f32> {
    let Some(levels) = Levels::of(storage) else {
        return match storage {
            CacheStorage::F16 => row.iter().map(|x| half(*x)).collect(),
            CacheStorage::BF16 => row.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect(),
            _ => row.to_vec(),
        };
    };
    let of_group = |group: &[f32]| {
        let scale = levels.scale(group);
        let stored = levels.stored(scale);
        group.iter().map(|x| levels.level(*x, scale) * stored).collect::<Vec<_>>()
    };
    row.chunks(storage.group(row.len())).flat_map(of_group).collect()
}

/// Returns the product of each `block` elements of a row and an orthonormal Walsh–Hadamard matrix,
/// as [`CacheConfig::hadamard`](super::CacheConfig::hadamard) defines it. A short last block stays
/// unchanged. So does every row if `block` is no power of two.
pub fn hadamard<R: Real>(row: &[R], block: usize) -> Vec<R> {
    let mut out = row.to_vec();
    if !block.is_power_of_two() {
        return out;
    }
    let root = R::of(block as f64).sqrt();
    for part in out.chunks_exact_mut(block) {
        let mut half = 1;
        while half < block {
            for n in (0..block).filter(|n| n & half == 0) {
                (part[n], part[n + half]) = (part[n] + part[n + half], part[n] - part[n + half]);
            }
            half *= 2;
        }
        part.iter_mut().for_each(|x| *x = *x / root);
    }
    out
}

/// The nearest f16, which is finite if `x` is.
fn half(x: f32) -> f32 {
    let clamped = if x.is_finite() { x.clamp(-65504.0, 65504.0) } else { x };
    half::f16::from_f32(clamped).to_f32()
}
