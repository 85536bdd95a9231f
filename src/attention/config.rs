//! The configuration of attention.

use super::check_options;
use crate::device::{DeviceFacts, Family};
use crate::kernel::KernelOptions;
use crate::tensor::dtype::FLOAT;
use crate::tensor::{DType, Error, Shape};

/// The properties of an [`Attention`](super::Attention) that all its calls share.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct Config {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) dtype: DType,
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) kernel_options: KernelOptions,
}

impl Config {
    /// `heads` query heads of `head_dim` channels, and as many key/value heads. The type is f32,
    /// the scale `1 / √head_dim`.
    pub fn new(heads: usize, head_dim: usize) -> Self {
        Config {
            heads,
            kv_heads: heads,
            head_dim,
            value_dim: head_dim,
            dtype: DType::F32,
            scale: None,
            softcap: None,
            kernel_options: KernelOptions::default(),
        }
    }

    /// The configuration of calls of `shape`: f32, scale `1 / √head_dim`.
    pub fn of(shape: &Shape) -> Self {
        Config::new(shape.heads, shape.head_dim).kv_heads(shape.kv_heads).value_dim(shape.value_dim)
    }

    /// `[heads, kv_heads, head_dim, value_dim]`.
    pub(crate) fn dims(&self) -> [usize; 4] {
        [self.heads, self.kv_heads, self.head_dim, self.value_dim]
    }

    /// Sets the number of query heads, if it differs from the argument of [`new`](Self::new). For
    /// example, a device has a share of a layer's heads, and a share of its
    /// [`kv_heads`](Self::kv_heads).
    pub fn heads(mut self, heads: usize) -> Self {
        self.heads = heads;
        self
    }

    /// Sets the number of key/value heads, a divisor of `heads`. Query head `h` uses key/value head
    /// `h / (heads / kv_heads)`. One head is multi-query attention (Shazeer 2019, "Fast transformer
    /// decoding"). Several are grouped-query attention (Ainslie et al. 2023).
    ///
    /// There is no `enable_gqa` option: k and v simply have fewer heads than q.
    #[doc(alias = "enable_gqa")]
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

    /// Factor of `q·k` instead of `1 / √head_dim`, rounded to f32.
    pub fn scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.scale = scale.into();
        self
    }

    /// Bounds the scores: `softcap · tanh(score / softcap)` (Gemma 2, 2024), rounded to f32.
    pub fn softcap(mut self, softcap: impl Into<Option<f64>>) -> Self {
        self.softcap = softcap.into();
        self
    }

    /// Sets the [`KernelOptions`]. They select kernels and do not change the operation.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Returns the features and limits of `adapter` to request for this configuration. They include
    /// the largest buffers, which limit the length of sequences, workgroup memory for large tiles,
    /// and subgroups. All other limits are wgpu's defaults; add the limits that your application
    /// needs.
    ///
    /// The result leaves out features that the adapter lacks. Without `SHADER_F16`, kernels pack
    /// F16 tensors in words. The result also leaves out matrix units: their feature is experimental
    /// in wgpu, so the application must request it. See
    /// [`Pipelines::with_adapter`](crate::Pipelines::with_adapter).
    pub fn required(&self, adapter: &wgpu::Adapter) -> (wgpu::Features, wgpu::Limits) {
        let halves = self.dtype == DType::F16 || self.kernel_options.f16_operands;
        let wanted = if halves { wgpu::Features::SHADER_F16 } else { wgpu::Features::empty() };
        let best = adapter.limits();
        let limits = wgpu::Limits {
            max_buffer_size: best.max_buffer_size,
            max_storage_buffer_binding_size: best.max_storage_buffer_binding_size,
            max_storage_buffers_per_shader_stage: best.max_storage_buffers_per_shader_stage,
            // The memory of the largest tiles.
            max_compute_workgroup_storage_size: best.max_compute_workgroup_storage_size.min(49152),
            ..wgpu::Limits::default()
        };
        ((wanted | wgpu::Features::SUBGROUP) & adapter.features(), limits)
    }

    pub(crate) fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let Config { heads, kv_heads, head_dim, value_dim, .. } = *self;
        Shape { batch: 1, heads, kv_heads, q_len: 1, kv_len: 1, head_dim, value_dim }.check()?;
        check_dtype(self.dtype, device)?;
        check_options(self.scale, self.softcap)
    }
}

pub(crate) fn check_dtype(dtype: DType, device: &DeviceFacts) -> Result<(), Error> {
    match dtype {
        DType::F32 => Ok(()),
        DType::BF16 if device.lacks(Family::BF16Tensors) => {
            Err(Error::Disabled { family: Family::BF16Tensors })
        }
        DType::BF16 => Ok(()),
        DType::F16 if device.lacks(Family::F16Tensors) => Err(Error::Disabled { family: Family::F16Tensors }),
        DType::F16 => Ok(()),
        got => Err(Error::Type { tensor: "config", expected: FLOAT.into(), got }),
    }
}
