//! The configuration of local attention.

use crate::attention::{check_dtype, check_options};
use crate::device::DeviceFacts;
use crate::tensor::{DType, Error, Shape};

/// The largest half window. No key of a tensor is farther away.
const MOST_HALF_WINDOW: usize = 1 << 29;

/// The configuration of a [`LocalAttention`](super::LocalAttention), fixed at its creation.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct LocalConfig {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) dtype: DType,
    pub(crate) half_window: usize,
    pub(crate) sigma: Option<f64>,
    pub(crate) scale: f64,
}

impl LocalConfig {
    /// Configures `heads` heads of `head_dim` channels. A window is centred on the key that is
    /// nearest to a position. It has `half_window` keys (Luong's D, at most 2^29) on each side. The
    /// defaults: f32, scale 1, σ = D / 2.
    pub fn new(heads: usize, head_dim: usize, half_window: usize) -> Self {
        LocalConfig {
            heads,
            kv_heads: heads,
            head_dim,
            value_dim: head_dim,
            dtype: DType::F32,
            half_window,
            sigma: Some(half_window as f64 / 2.0),
            scale: 1.0,
        }
    }

    /// Key/value heads, a divisor of `heads`: query head `h` uses `h / (heads / kv_heads)`.
    pub fn kv_heads(mut self, kv_heads: usize) -> Self {
        self.kv_heads = kv_heads;
        self
    }

    /// Channels of values and of the output, `head_dim` unless set.
    pub fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self
    }

    /// Element type of q, k, v and out: F32, F16 or BF16. Sums are always f32.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// The standard deviation of the Gaussian, in keys, above 0. `None` omits the Gaussian, for
    /// local-m attention around any positions.
    pub fn sigma(mut self, sigma: impl Into<Option<f64>>) -> Self {
        self.sigma = sigma.into();
        self
    }

    /// The factor of scores, rounded to f32.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = scale;
        self
    }

    pub(super) fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let LocalConfig { heads, kv_heads, head_dim, value_dim, half_window, .. } = *self;
        Shape { batch: 1, heads, kv_heads, q_len: 1, kv_len: 1, head_dim, value_dim }.check()?;
        check_dtype(self.dtype, device)?;
        if half_window > MOST_HALF_WINDOW {
            let (value, expected) = (half_window as f64, "at most 2^29");
            return Err(Error::Option { option: "half_window", value, expected });
        }
        let usable = |sigma: f64| {
            sigma > 0.0 && (sigma as f32).is_normal() && {
                let narrow = 1.0 / (sigma * sigma);
                (narrow as f32).is_normal()
            }
        };
        if let Some(value) = self.sigma.filter(|sigma| !usable(*sigma)) {
            let expected = "above 0 with `1 / sigma²` a normal f32; use `None` for no Gaussian";
            return Err(Error::Option { option: "sigma", value, expected });
        }
        check_options(Some(self.scale), None)
    }
}
