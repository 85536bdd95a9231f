use wgpu_attention::cache::Tokens;
use wgpu_attention::layers::EncoderForward;
use wgpu_attention::position::{Rope, RowPositions};
use wgpu_attention::{Cache, Error, Gpu, Mask, Scratch, TensorView, TransformerEncoder};

/// Runs the next rows of left-padded sequences through the layers of a Llama. `seen` is Bool
/// `[batch, 1, 1, capacity]`: false for padding, the same in every step. `positions` is U32
/// `[batch, 1, rows, 1]`: a row's index in the sequence less the padding, 0 for padding.
pub fn step(
    gpu: &Gpu,
    (stack, rope): (&TransformerEncoder, &Rope),
    cache: &mut Cache,
    scratch: &mut Scratch,
    [x, y]: [TensorView; 2],
    [seen, positions]: [TensorView; 2],
) -> Result<(), Error> {
    gpu.submit(|encoder| {
        cache.advance(encoder, Tokens::All(x.shape()[2]))?;
        let call = EncoderForward::new(x, y)
            .mask(Mask::causal().key_padding_mask(seen))
            .rotary(rope, RowPositions::Tensor(positions))
            .cache(&*cache);
        scratch.ensure(gpu.device(), stack.scratch_size(&call)?)?;
        stack.forward(encoder, &call, scratch)
    })
}
