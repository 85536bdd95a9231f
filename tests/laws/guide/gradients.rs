use wgpu_attention::{Attention, Backward, Error, Forward, Gpu, Mask, Scratch, TensorView};

/// Causal attention and the gradients of its inputs. `lse` is F32 `[batch, heads, q_len, 1]`, and
/// `d_out` is the gradient of the loss with respect to `out`.
pub fn train(
    gpu: &Gpu,
    attention: &Attention,
    [q, k, v, out, lse]: [TensorView; 5],
    [d_out, d_q, d_k, d_v]: [TensorView; 4],
) -> Result<(), Error> {
    let forward = Forward::new(q, k, v, out).lse(lse).mask(Mask::causal());
    let backward = Backward::new(forward, d_out).d_q(d_q).d_k(d_k).d_v(d_v);
    let size = attention.scratch_size(&forward)?.max(attention.backward_scratch_size(&backward)?);
    let mut scratch = Scratch::new(gpu.device(), size)?;
    gpu.submit(|encoder| attention.forward(encoder, &forward, &mut scratch))?;
    // The application computes `d_out` from `out` here.
    gpu.submit(|encoder| attention.backward(encoder, &backward, &mut scratch))
}
