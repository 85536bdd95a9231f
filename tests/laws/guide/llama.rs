use wgpu_attention::cache::Tokens;
use wgpu_attention::layers::{EncoderForward, MultiHeadConfig, NormOrder, TransformerLayerConfig};
use wgpu_attention::matmul::Activation;
use wgpu_attention::position::{Rope, RowPositions};
use wgpu_attention::rows::NormConfig;
use wgpu_attention::{Cache, Error, Gpu, Mask, Scratch, TensorView, TransformerEncoder};

/// The layers of Llama: RMSNorm, grouped heads, SwiGLU. Their stack ends with a norm.
pub fn layers(width: usize, heads: usize, kv_heads: usize, hidden: usize) -> TransformerLayerConfig {
    TransformerLayerConfig::new(MultiHeadConfig::new(width, heads).kv_heads(kv_heads), hidden)
        .activation(Activation::Silu)
        .gated(true)
        .norm(NormConfig::rms().eps(1e-5))
        .order(NormOrder::Pre)
}

/// Runs the next rows of every sequence through the layers: a prompt or one token each. `x` has
/// their embeddings, `x` and `y` are `[batch, 1, rows, width]`.
pub fn step(
    gpu: &Gpu,
    stack: &TransformerEncoder,
    rope: &Rope,
    cache: &mut Cache,
    scratch: &mut Scratch,
    [x, y]: [TensorView; 2],
) -> Result<(), Error> {
    gpu.submit(|encoder| {
        cache.advance(encoder, Tokens::All(x.shape()[2]))?;
        let at = RowPositions::Tensor(cache.starts());
        let call = EncoderForward::new(x, y).mask(Mask::causal()).rotary(rope, at).cache(&*cache);
        scratch.ensure(gpu.device(), stack.scratch_size(&call)?)?;
        stack.forward(encoder, &call, scratch)
    })
}
