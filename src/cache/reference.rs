//! The values that a cache returns for the values that were put into it.

use super::CacheStorage;

/// The number of levels of a scaled storage on either side of 0; `None` for floats.
fn levels(storage: CacheStorage) -> Option<f32> {
    match storage {
        CacheStorage::F32 | CacheStorage::F16 | CacheStorage::BF16 => None,
        CacheStorage::Q8(_) => Some(127.0),
        CacheStorage::Q4(_) => Some(7.0),
    }
}

/// Returns the scale of each group of a row: `max|x| / 127` or `/ 7`. It is NaN if a value is
/// infinite or NaN. Float storage has no scales.
pub fn scales(storage: CacheStorage, row: &[f32]) -> Vec<f32> {
    let Some(most) = levels(storage) else { return Vec::new() };
    let scale = |group: &[f32]| {
        if group.iter().any(|x| !x.is_finite()) {
            return f32::NAN;
        }
        let scale = group.iter().fold(0.0f32, |most, x| most.max(x.abs())) / most;
        if scale < f32::MIN_POSITIVE { 1.0 } else { scale }
    };
    row.chunks(storage.group(row.len())).map(scale).collect()
}

/// Returns a row of keys or values of one head, as `storage` stores it. Devices may differ from it
/// in two ways:
///
/// - If a value lies halfway between two levels, a device may choose the other level.
/// - F16 rounds to the nearest here, but WebGPU allows a device to choose either neighbour.
///
/// BF16 rounds to the nearest, ties to even, on every device.
pub fn stored(storage: CacheStorage, row: &[f32]) -> Vec<f32> {
    let Some(most) = levels(storage) else {
        return match storage {
            CacheStorage::F16 => row.iter().map(|x| half(*x)).collect(),
            CacheStorage::BF16 => row.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect(),
            _ => row.to_vec(),
        };
    };
    let (scales, group) = (scales(storage, row), storage.group(row.len()));
    let value = |(n, x): (usize, &f32)| {
        let scale = scales[n / group];
        (x / scale).round_ties_even().clamp(-most, most) * scale
    };
    row.iter().enumerate().map(value).collect()
}

/// The nearest f16, which is finite if `x` is.
fn half(x: f32) -> f32 {
    let clamped = if x.is_finite() { x.clamp(-65504.0, 65504.0) } else { x };
    half::f16::from_f32(clamped).to_f32()
}
