//! The configuration of attention.

use super::check_options;
use crate::device::{DeviceFacts, Family};
use crate::kernel::KernelOptions;
use crate::tensor::dtype::FLOAT;
use crate::tensor::{DType, Error, Shape};

/// What is fixed when an [`Attention`](super::Attention) is made.
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
    /// `heads` query heads of `head_dim` channels; f32, scale `1 / √head_dim`, as many key/value
    /// heads.
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

    /// For calls of `shape`; f32, scale `1 / √head_dim`.
    pub fn of(shape: &Shape) -> Self {
        Config::new(shape.heads, shape.head_dim).kv_heads(shape.kv_heads).value_dim(shape.value_dim)
    }

    /// `[heads, kv_heads, head_dim, value_dim]`.
    pub(crate) fn dims(&self) -> [usize; 4] {
        [self.heads, self.kv_heads, self.head_dim, self.value_dim]
    }

    /// Query heads, where they are another number than [`new`](Self::new) was given: a device's
    /// share of a layer's, beside its share of
    /// [`kv_heads`](Self::kv_heads).
    pub fn heads(mut self, heads: usize) -> Self {
        self.heads = heads;
        self
    }

    /// Key/value heads, a divisor of `heads`: query head `h` uses `h / (heads / kv_heads)`. One is
    /// multi-query (Shazeer 2019, "Fast transformer decoding"), several are grouped-query attention
    /// (Ainslie et al. 2023).
    ///
    /// There is no `enable_gqa` to set: k and v simply have fewer heads than q.
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

    /// How it is computed, not what; see [`KernelOptions`].
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Features and limits to request of `adapter`: what this configuration needs, the largest
    /// buffers there are, which decide how long sequences may be, workgroup memory for large tiles,
    /// and subgroups. Everything else is wgpu's default: add what the rest of the application
    /// needs. A feature the adapter lacks is left out: without `SHADER_F16` kernels pack F16
    /// tensors in words. Matrix units are left to the application: their feature is an experimental
    /// one of wgpu's, which takes its consent (see
    /// [`Pipelines::with_adapter`](crate::Pipelines::with_adapter)).
    pub fn required(&self, adapter: &wgpu::Adapter) -> (wgpu::Features, wgpu::Limits) {
        let halves = self.dtype == DType::F16 || self.kernel_options.f16_operands;
        let wanted = if halves { wgpu::Features::SHADER_F16 } else { wgpu::Features::empty() };
        let best = adapter.limits();
        let limits = wgpu::Limits {
            max_buffer_size: best.max_buffer_size,
            max_storage_buffer_binding_size: best.max_storage_buffer_binding_size,
            max_storage_buffers_per_shader_stage: best.max_storage_buffers_per_shader_stage,
            // What the largest tiles take.
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
            Err(Error::PutAside { family: Family::BF16Tensors })
        }
        DType::BF16 => Ok(()),
        DType::F16 if device.lacks(Family::F16Tensors) => Err(Error::PutAside { family: Family::F16Tensors }),
        DType::F16 => Ok(()),
        got => Err(Error::Type { tensor: "config", expected: FLOAT.into(), got }),
    }
}
