//! The configuration of a norm: LayerNorm or RMSNorm.

use crate::tensor::Error;

/// The configuration of a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct NormConfig {
    pub(crate) centred: bool,
    pub(crate) eps: f64,
}

impl NormConfig {
    /// LayerNorm (Ba, Kiros and Hinton 2016): `(x − mean) / √(variance + eps)`. The variance is
    /// divided by the number of features; `eps` is 10⁻⁵.
    pub fn layer() -> Self {
        NormConfig { centred: true, eps: 1e-5 }
    }

    /// RMSNorm (Zhang and Sennrich 2019): `x / √(mean of x² + eps)`; `eps` is 10⁻⁶.
    pub fn rms() -> Self {
        NormConfig { centred: false, eps: 1e-6 }
    }

    /// Sets the number that is added to the variance, 0 or above. It is rounded to f32. A smaller
    /// one than the smallest normal number becomes that number, except 0.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let eps = self.eps as f32;
        if eps.is_finite() && eps >= 0.0 {
            return Ok(());
        }
        Err(Error::Option { option: "eps", value: self.eps, expected: "finite in f32 and not below 0" })
    }
}
