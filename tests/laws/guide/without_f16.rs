use wgpu_attention::{Attention, Config, DType, Error, Forward, Gpu, Mask, Scratch, Shape, TensorView};

/// Causal attention of f16 numbers, given by their bits. The device needs no `SHADER_F16`.
pub fn attend(gpu: &Gpu, [q, k, v]: [&[u16]; 3], shape: Shape) -> Result<Vec<u16>, Error> {
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::of(&shape).dtype(DType::F16))?;
    let [q, k, v] = [gpu.upload(q)?, gpu.upload(k)?, gpu.upload(v)?];
    let elements = shape.out().iter().product();
    let out = gpu.buffer(2 * elements)?;
    let view = |buffer, shape| TensorView::new(buffer, DType::F16, shape);
    let [q, k, v] = [view(&q, shape.q()), view(&k, shape.k()), view(&v, shape.v())];
    let call = Forward::new(q, k, v, view(&out, shape.out())).mask(Mask::causal());
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch))?;
    gpu.download(&out, elements)
}
