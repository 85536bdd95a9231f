//! The configuration of additive attention.

use crate::attention::Config;
use crate::kernel::KernelOptions;
use crate::tensor::DType;

/// What is fixed when an [`AdditiveAttention`](super::AdditiveAttention) is made.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct AdditiveConfig(pub(super) Config);

impl AdditiveConfig {
    /// `heads` heads of queries, projected to `hidden` units; f32, as many key/value heads, values
    /// of `hidden` channels.
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

    /// How it is computed, not what. There is no use for matrix units:
    /// [`MatrixUnits::Always`](crate::tuning::MatrixUnits::Always) is refused.
    pub fn kernel_options(self, kernel_options: KernelOptions) -> Self {
        AdditiveConfig(self.0.kernel_options(kernel_options))
    }

    /// Features and limits to request of `adapter`, as
    /// [`Config::required`](crate::Config::required) says.
    pub fn required(&self, adapter: &wgpu::Adapter) -> (wgpu::Features, wgpu::Limits) {
        self.0.required(adapter)
    }
}
