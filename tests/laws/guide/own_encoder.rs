use wgpu_attention::{Attention, Config, DType, Error, Forward, Mask, Scratch, TensorView, wgpu};

/// Records causal attention of `[1, 8, 512, 64]` tensors into the encoder of the application.
pub fn attend(
    device: &wgpu::Device,
    encoder: &mut wgpu::CommandEncoder,
    [q, k, v, out]: [&wgpu::Buffer; 4],
) -> Result<(), Error> {
    let attention = Attention::new(device, Config::new(8, 64))?; // heads, head_dim
    let view = |buffer| TensorView::new(buffer, DType::F32, [1, 8, 512, 64]);
    let call = Forward::new(view(q), view(k), view(v), view(out)).mask(Mask::causal());
    let mut scratch = Scratch::new(device, attention.scratch_size(&call)?)?;
    attention.forward(encoder, &call, &mut scratch)
}
