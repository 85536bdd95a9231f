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

/// Converts a slice of f32 to the arithmetic of the reference, exactly.
pub fn widen<R: Real>(x: &[f32]) -> Vec<R> {
    x.iter().map(|x| R::of(f64::from(*x))).collect()
}

/// Requires a slice of `expected` elements.
pub(crate) fn expect_length<T>(tensor: &'static str, x: &[T], expected: usize) -> Result<(), crate::Error> {
    if x.len() == expected { Ok(()) } else { Err(crate::Error::Length { tensor, expected, got: x.len() }) }
}
