//! The arithmetic of the reference.

/// The arithmetic of the reference: `f64` for exact results, `f32` to measure the rounding of a
/// plain f32 computation.
pub trait Real: num_traits::Float + Send + Sync + 'static {
    /// Returns the nearest value.
    fn of(x: f64) -> Self;
    /// Converts to f64, exactly.
    fn f64(self) -> f64;
}

impl Real for f64 {
    fn of(x: f64) -> Self {
        x
    }
    fn f64(self) -> f64 {
        self
    }
}

impl Real for f32 {
    fn of(x: f64) -> Self {
        x as f32
    }
    fn f64(self) -> f64 {
        f64::from(self)
    }
}

/// Rounds the `eps` of a norm to f32. Devices may read a subnormal number as 0, and a row of zeros
/// would become `0 · ∞`. So a number above 0 becomes at least the smallest normal one.
pub(crate) fn eps_in_f32(eps: f64) -> f32 {
    if eps > 0.0 { (eps as f32).max(f32::MIN_POSITIVE) } else { eps as f32 }
}

/// Converts a slice of f32 to the arithmetic of the reference, exactly.
pub fn widen<R: Real>(x: &[f32]) -> Vec<R> {
    x.iter().map(|x| R::of(f64::from(*x))).collect()
}

/// Requires a slice of `expected` elements.
pub(crate) fn expect_length<T>(tensor: &'static str, x: &[T], expected: usize) -> Result<(), crate::Error> {
    if x.len() == expected { Ok(()) } else { Err(crate::Error::Length { tensor, expected, got: x.len() }) }
}
