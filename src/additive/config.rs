//! The configuration of additive attention.

use crate::attention::Config;
use crate::kernel::KernelOptions;
use crate::tensor::DType;

/// The configuration of an [`AdditiveAttention`](super::AdditiveAttention), fixed at its creation.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct AdditiveConfig(pub(super) Config);

impl AdditiveConfig {
    /// Configures `heads` heads of queries, projected to `hidden` units. The defaults: f32, as many
    /// key/value heads, and values of `hidden` channels.
    pub fn new(heads: usize, hidden: usize) -> Self {
        AdditiveConfig(Config::new(heads, hidden).scale(1.0))
    }

    /// Key/value heads, a divisor of `heads`: query head `h` uses `h / (heads / kv_heads)`.
    pub fn kv_heads(self, kv_heads: usize) -> Self {
        AdditiveConfig(self.0.kv_heads(kv_heads))
    }

    /// Channels of values and of the output, `hidden` unless set.
    pub fn value_dim(self, value_dim: usize) -> Self {
        AdditiveConfig(self.0.value_dim(value_dim))
    }

    /// Element type of q, k, v and out: F32, F16 or BF16. Sums are always f32.
    pub fn dtype(self, dtype: DType) -> Self {
        AdditiveConfig(self.0.dtype(dtype))
    }

    /// Sets the options that select kernels. They do not change the operation. Additive scores
    /// cannot use matrix units, so [`MatrixUnits::Always`](crate::tuning::MatrixUnits::Always) is
    /// an error.
    pub fn kernel_options(self, kernel_options: KernelOptions) -> Self {
        AdditiveConfig(self.0.kernel_options(kernel_options))
    }

    /// Returns the features and limits to request of `adapter`, as
    /// [`Config::required`](crate::Config::required) does.
    pub fn required(&self, adapter: &wgpu::Adapter) -> (wgpu::Features, wgpu::Limits) {
        self.0.required(adapter)
    }
}
