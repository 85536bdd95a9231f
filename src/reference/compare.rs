//! Compares a device's result with the reference. The tolerance is derived, not chosen.
//!
//! A kernel may have twice the error of a naive CPU computation of the same precision (three times
//! for gradients). A floor is added, because the naive computation is sometimes almost exact. NaN
//! and wrong lengths never pass. Infinities must match exactly.

/// The permitted error of a result.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// The largest permitted absolute error.
    pub absolute: f64,
}

/// Units in the last place of the largest term that every result may be off by. WGSL permits `exp`
/// to be off by 3 ULP near 0, where the largest weights lie. The sum and the division by it add as
/// much.
const FLOOR_ULP: f64 = 8.0;

impl Tolerance {
    /// Returns the tolerance `2 × |naive − want| + floor`. `naive` is the same computation in the
    /// kernel's precision on the CPU. `epsilon` is the spacing of the output's type at 1
    /// ([`EPSILON_F32`], [`EPSILON_F16`], [`EPSILON_BF16`]).
    ///
    /// `magnitude` is the largest absolute value among the summed terms. For an attention output,
    /// take the values; for weights, 1; for lse, the scores; for a layer, its output.
    pub fn from_naive(naive: &[f64], want: &[f64], magnitude: f64, epsilon: f64) -> Self {
        Self::times(2.0, naive, want, magnitude, epsilon)
    }

    /// Returns the tolerance `3 × |naive − want| + floor` for a gradient. Large terms may cancel in
    /// a gradient: `magnitude` is the largest sum of their absolute values. Take it from
    /// [`attention_backward_magnitudes`](crate::reference::attention_backward_magnitudes). The
    /// other arguments are as for [`from_naive`](Self::from_naive).
    pub fn gradient(naive: &[f64], want: &[f64], magnitude: f64, epsilon: f64) -> Self {
        Self::times(3.0, naive, want, magnitude, epsilon)
    }

    fn times(factor: f64, naive: &[f64], want: &[f64], magnitude: f64, epsilon: f64) -> Self {
        let error = max_error(naive, want);
        Tolerance { absolute: factor * error + FLOOR_ULP * epsilon / 2.0 * magnitude }
    }
}

/// Spacing of f32 at 1.
pub const EPSILON_F32: f64 = f32::EPSILON as f64;
/// Spacing of f16 at 1.
pub const EPSILON_F16: f64 = 1.0 / 1024.0;
/// Spacing of bf16 at 1.
pub const EPSILON_BF16: f64 = 1.0 / 128.0;

/// The place where a result is wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// The number of elements is wrong.
    #[error("{got} elements, expected {expected}")]
    Length {
        /// Elements of the reference.
        expected: usize,
        /// Elements of the result.
        got: usize,
    },
    /// An element is off by more than the tolerance, or only one of the two values is NaN.
    #[error("element {index}: got {got}, expected {want}, off by more than {tolerance:e}")]
    Value {
        /// The worst element.
        index: usize,
        /// The value of the result.
        got: f64,
        /// The value of the reference.
        want: f64,
        /// The permitted error.
        tolerance: f64,
    },
}

/// The error of a passing result.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Difference {
    /// The largest absolute error.
    pub absolute: f64,
    /// The largest absolute error over the largest absolute value of the reference.
    pub relative: f64,
}

/// Returns the largest finite absolute difference. It is infinite if the lengths differ, or if only
/// one side has a NaN or infinity.
pub fn max_error(got: &[f64], want: &[f64]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    got.iter().zip(want).map(|(g, w)| error(*g, *w)).fold(0.0, f64::max)
}

fn error(got: f64, want: f64) -> f64 {
    // Equal infinities, or NaN in both.
    if got == want || (got.is_nan() && want.is_nan()) {
        return 0.0;
    }
    let error = (got - want).abs();
    if error.is_nan() { f64::INFINITY } else { error }
}

/// Compares `got` with `want`, element by element.
///
/// ```
/// use wgpu_attention::reference::compare::{Tolerance, compare};
/// let tolerance = Tolerance { absolute: 1e-6 };
/// assert!(compare(&[1.0f32], &[1.0], tolerance).is_ok());
/// assert!(compare(&[f32::NAN], &[1.0], tolerance).is_err());
/// ```
///
/// # Errors
/// The worst mismatch.
pub fn compare<T: Copy + Into<f64>>(
    got: &[T],
    want: &[f64],
    tolerance: Tolerance,
) -> Result<Difference, Mismatch> {
    if got.len() != want.len() {
        return Err(Mismatch::Length { expected: want.len(), got: got.len() });
    }
    let mut worst = (0, 0.0);
    for (index, (g, w)) in got.iter().zip(want).enumerate() {
        let e = error((*g).into(), *w);
        if e > worst.1 {
            worst = (index, e);
        }
    }
    let (index, absolute) = worst;
    // A NaN or infinite tolerance, from such a naive result, permits nothing.
    if absolute == 0.0 || (tolerance.absolute.is_finite() && absolute <= tolerance.absolute) {
        let scale = want.iter().filter(|w| w.is_finite()).fold(0.0, |m: f64, w| m.max(w.abs()));
        return Ok(Difference { absolute, relative: if scale > 0.0 { absolute / scale } else { absolute } });
    }
    Err(Mismatch::Value { index, got: got[index].into(), want: want[index], tolerance: tolerance.absolute })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tolerance_of_infinity_or_nan_lets_an_error_pass() {
        for absolute in [f64::INFINITY, f64::NAN] {
            assert!(compare(&[1.0], &[2.0], Tolerance { absolute }).is_err());
        }
        let overflown = Tolerance::from_naive(&[f64::NAN], &[1.0], 1.0, EPSILON_F32);
        assert!(compare(&[2.0], &[1.0], overflown).is_err());
    }
}
