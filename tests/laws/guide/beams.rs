use wgpu_attention::cache::{Append, Tokens};
use wgpu_attention::{Attention, Cache, Error, Forward, Gpu, Mask, Scratch, TensorView};

/// One step of a beam search. Beam `n` goes on from beam `parents[n]`, with one new token. The
/// beams are the sequences of the cache. `k` and `v` belong to the new tokens.
pub fn step(
    gpu: &Gpu,
    attention: &Attention,
    cache: &mut Cache,
    scratch: &mut Scratch,
    parents: &[usize],
    [q, k, v, out]: [TensorView; 4],
) -> Result<(), Error> {
    gpu.submit(|encoder| {
        cache.reorder(encoder, parents)?;
        cache.advance(encoder, Tokens::All(1))?;
        cache.append(encoder, 0, &Append::new(k, v))?;
        let call = Forward::with_cache(q, &*cache, out).mask(Mask::causal());
        scratch.ensure(gpu.device(), attention.scratch_size(&call)?)?;
        attention.forward(encoder, &call, scratch)
    })
}
