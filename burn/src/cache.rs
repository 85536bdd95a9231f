//! Caches of keys and values, for generation.

use std::sync::Arc;

use burn::tensor::Device;
use burn_cubecl::CubeDevice;
use wgpu_attention::cache::Tokens;
use wgpu_attention::{CacheConfig, ScratchSize};

use crate::device::{Shared, cube_device, shared};
use crate::error::Result;

/// Keys and values of earlier tokens, in any storage and layout of [`CacheConfig`]. Use it to
/// generate token by token.
///
/// ```no_run
/// use burn::tensor::{Device, Tensor};
/// use wgpu_attention_burn::wgpu_attention::CacheConfig;
/// use wgpu_attention_burn::{Attend, Cache, Mask};
///
/// # fn f(device: &Device, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> wgpu_attention_burn::Result<()> {
/// let mut cache = Cache::new(device, CacheConfig::new(8, 64, 4096))?;
/// // For each prompt or token, with the new rows alone:
/// cache.advance(q.dims()[2])?;
/// let out = Attend::new(q, k, v).mask(Mask::causal()).step(&cache, 0)?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Cache {
    pub(crate) inner: wgpu_attention::Cache,
    pub(crate) device: CubeDevice,
    pub(crate) shared: Arc<Shared>,
}

impl Cache {
    /// Creates an empty cache on a shared device.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`](crate::Error::UnknownDevice), and the errors of
    /// [`wgpu_attention::Cache::with_pipelines`].
    pub fn new(device: &Device, config: CacheConfig) -> Result<Self> {
        let device = cube_device(device)?;
        let shared = shared("cache", &device)?;
        let inner = wgpu_attention::Cache::with_pipelines(&shared.pipelines, config)?;
        Ok(Cache { inner, device, shared })
    }

    /// Makes room for `tokens` more tokens of every sequence. Call it once for all layers.
    ///
    /// # Errors
    /// The errors of [`wgpu_attention::Cache::advance`].
    pub fn advance(&mut self, tokens: usize) -> Result<()> {
        let Cache { inner, shared, .. } = self;
        shared.submit(ScratchSize::default(), |encoder, _| inner.advance(encoder, Tokens::All(tokens)))
    }

    /// The cache of the library, to truncate, clear or fork sequences.
    pub fn inner(&mut self) -> &mut wgpu_attention::Cache {
        &mut self.inner
    }
}
