//! Attention and its gradients with all tensors in one buffer. WebGPU forbids writable bindings
//! that overlap, and a buffer that one dispatch binds as read-only and as writable.

use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{
    Attention, Backward, Config, DType, Error, Forward, KernelOptions, Mask, Scratch, TensorView,
};

use super::attention::SHAPE;
use crate::harness::Profile;
use crate::harness::random::noise;

/// q, k, v, d_out, out, lse, d_q, d_k, d_v.
fn shapes() -> [[usize; 4]; 9] {
    let s = SHAPE;
    [s.q(), s.k(), s.v(), s.out(), s.out(), s.lse(), s.q(), s.k(), s.v()]
}

const INPUTS: usize = 4;

/// Returns the outputs' bits, from a buffer for each tensor or from one buffer for all tensors.
async fn outputs(
    profile: &Profile,
    path: Algorithm,
    dtype: DType,
    is_one: bool,
) -> Result<Vec<Vec<u32>>, Error> {
    let gpu = &profile.gpu;
    // Bindings begin at multiples of 256 bytes at most.
    let words = |shape: [usize; 4]| (4 * shape.iter().product::<usize>()).next_multiple_of(256) / 4;
    let shapes = shapes();
    let mut firsts = [0; 9];
    if is_one {
        (1..9).for_each(|n| firsts[n] = firsts[n - 1] + words(shapes[n - 1]));
    }
    let all = gpu.buffer(4 * shapes.into_iter().map(words).sum::<usize>())?;
    let mut buffers = Vec::new();
    for shape in shapes {
        buffers.push(if is_one { all.clone() } else { gpu.buffer(4 * words(shape))? });
    }
    for n in 0..INPUTS {
        let data = noise(words(shapes[n]), 0.3 + n as f32);
        let words: Vec<u32> = match dtype {
            DType::F32 => data.iter().map(|x| x.to_bits()).collect(),
            // Two elements in a word; those behind the tensor's last are not read.
            _ => data.iter().map(|x| u32::from(half::bf16::from_f32(*x).to_bits()) * 0x1_0001).collect(),
        };
        gpu.queue().write_buffer(&buffers[n], 4 * firsts[n] as u64, bytemuck::cast_slice(&words));
    }
    let view = |n: usize| {
        let dtype = if n == 5 { DType::F32 } else { dtype };
        TensorView::new(&buffers[n], dtype, shapes[n]).with_offset(firsts[n] * 4 / dtype.bytes())
    };
    let options = KernelOptions::new().algorithm(path);
    let attention =
        Attention::with_pipelines(gpu.pipelines(), Config::of(&SHAPE).dtype(dtype).kernel_options(options))?;
    let call = Forward::new(view(0), view(1), view(2), view(4)).mask(Mask::causal()).lse(view(5));
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch))?;
    let back = Backward::new(call, view(3)).d_q(view(6)).d_k(view(7)).d_v(view(8));
    let mut scratch = Scratch::new(gpu.device(), attention.backward_scratch_size(&back)?)?;
    gpu.submit(|encoder| attention.backward(encoder, &back, &mut scratch))?;
    let mut outputs = Vec::new();
    for n in INPUTS..9 {
        let count = shapes[n].iter().product::<usize>() * view(n).dtype().bytes() / 4;
        let bits: Vec<u32> = gpu.download_async(&buffers[n], firsts[n] + count).await?;
        outputs.push(bits[firsts[n]..].to_vec());
    }
    Ok(outputs)
}

/// Returns 0 if both placements give the same bits.
pub async fn same_bits(profile: &Profile, path: Algorithm, dtype: DType) -> Result<f64, String> {
    let separate = outputs(profile, path, dtype, false).await.map_err(|e| e.to_string())?;
    let one = outputs(profile, path, dtype, true).await.map_err(|e| e.to_string())?;
    if separate.iter().any(|bits| bits.iter().all(|word| *word == 0)) {
        return Err("an output was not written".into());
    }
    if separate == one { Ok(0.0) } else { Err("other bits with all tensors in one buffer".into()) }
}
