//! The values that a cache returns for the values that were put into it.

use super::CacheStorage;
use crate::tensor::Real;

/// Scales and rounding of a scaled storage.
#[derive(Clone, Copy)]
enum Levels {
    /// Levels on either side of 0, to which values are rounded.
    Even(f32),
    /// ggml's Q8_0.
    GgmlBytes,
    /// ggml's Q4_0.
    GgmlNibbles,
}

impl Levels {
    fn of(storage: CacheStorage) -> Option<Self> {
        match storage {
            CacheStorage::F32 | CacheStorage::F16 | CacheStorage::BF16 => None,
            CacheStorage::Q8(_) => Some(Levels::Even(127.0)),
            CacheStorage::Q4(_) => Some(Levels::Even(7.0)),
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
            Levels::GgmlBytes => (peak.abs() / 127.0, 0.0),
            Levels::GgmlNibbles => (peak / -8.0, 0.0),
        };
        if scale.abs() < f32::MIN_POSITIVE { least } else { scale }
    }

    /// The scale that is stored.
    fn stored(self, scale: f32) -> f32 {
        match self {
            Levels::Even(_) => scale,
            Levels::GgmlBytes | Levels::GgmlNibbles => half(scale),
        }
    }

    fn level(self, x: f32, scale: f32) -> f32 {
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        match self {
            Levels::Even(most) => (x / scale).round_ties_even().clamp(-most, most),
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
/// BF16 rounds to the nearest, ties to even, on every device.
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
