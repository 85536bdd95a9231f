use wgpu_attention::{Attention, DType, Error, Forward, Gpu, Mask, Scratch, TensorView};

/// Causal attention of prompts that are padded on the left, `[batch, heads, length, head_dim]`.
/// `padding` has the number of padding rows of each prompt.
pub fn attend(
    gpu: &Gpu,
    attention: &Attention,
    [q, k, v, out]: [TensorView; 4],
    padding: &[usize],
) -> Result<(), Error> {
    let [batch, _, length, _] = q.shape();
    let seen: Vec<bool> = padding.iter().flat_map(|n| (0..length).map(move |key| key >= *n)).collect();
    let seen = gpu.upload_bools(&seen)?;
    let seen = TensorView::new(&seen, DType::Bool, [batch, 1, 1, length]);
    let call = Forward::new(q, k, v, out).mask(Mask::causal().key_padding_mask(seen));
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch))
}
