//! A forward call of a stack.

use super::layer_call::LayerCalls;
use super::memory::MemoryCall;
use crate::cache::Cache;
use crate::layers::multi_head::MultiHeadForward;
use crate::tensor::{Error, TensorView};

/// One forward call of a stack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StackForward<'a> {
    pub x: TensorView<'a>,
    pub out: TensorView<'a>,
    pub layers: LayerCalls<'a>,
    /// The memory of a decoder.
    pub memory: Option<MemoryCall<'a>>,
    pub cache: Option<&'a Cache>,
    /// The tensor for the outputs of the layers.
    pub hidden: Option<TensorView<'a>>,
    /// The tensor for the weights of self-attention.
    pub weights: Option<TensorView<'a>>,
}

impl<'a> StackForward<'a> {
    pub fn new(x: TensorView<'a>, out: TensorView<'a>, memory: Option<MemoryCall<'a>>) -> Self {
        let layers = LayerCalls::default();
        StackForward { x, out, layers, memory, cache: None, hidden: None, weights: None }
    }

    /// Refuses a cache whose last advance does not match the rows of `x`.
    pub fn check_advanced(&self) -> Result<(), Error> {
        let Some(cache) = self.cache else { return Ok(()) };
        cache.check_recorded()?;
        if cache.advanced() != self.x.shape()[2] {
            let why = "advance the cache by the number of rows of `x`, then record the call";
            let what = "rows of `x` that differ from the cache's last advance";
            return Err(Error::Unsupported { what, why });
        }
        Ok(())
    }

    /// The self-attention of `x` in layer `n`, into `out`.
    pub fn attention(&self, n: usize, [x, out]: [TensorView<'a>; 2]) -> MultiHeadForward<'a> {
        let batch = self.x.shape()[0];
        let weights = self.weights.map(|weights| weights.slice(0, n.saturating_mul(batch), batch));
        self.layers.attention(n, x, out).weights(weights)
    }
}
