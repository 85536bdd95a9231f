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

/// The memory of the tensors.
#[derive(Clone, Copy, PartialEq)]
enum Placement {
    /// A buffer for each tensor.
    Separate,
    /// One buffer for all tensors, which lie one after the other.
    One,
    /// One buffer for all tensors. Queries, keys and values are columns of the same rows, as after
    /// a fused projection.
    Columns,
}

/// The first columns of q, k and v, more than 256 bytes apart, and the width of their rows.
const COLUMNS: [usize; 3] = [296, 0, 144];
const WIDTH: usize = 328;

/// Returns the offset and the strides of a tensor in its buffer, in elements of `bytes`.
fn layout(n: usize, placement: Placement, bytes: usize) -> (usize, [usize; 4]) {
    let [_, heads, length, dim] = shapes()[n];
    let dense = [heads * length * dim, length * dim, dim, 1];
    // Bindings begin at multiples of 256 bytes at most.
    let place = |shape: [usize; 4]| (4 * shape.iter().product::<usize>()).next_multiple_of(256);
    let rows = shapes()[1][0] * shapes()[1][2];
    match (placement, COLUMNS.get(n)) {
        (Placement::Separate, _) => (0, dense),
        (Placement::Columns, Some(column)) => (*column, [shapes()[1][2] * WIDTH, dim, WIDTH, 1]),
        (Placement::Columns, None) => {
            let others: usize = shapes()[3..n].iter().copied().map(place).sum();
            (((4 * rows * WIDTH).next_multiple_of(256) + others) / bytes, dense)
        }
        (Placement::One, _) => (shapes()[..n].iter().copied().map(place).sum::<usize>() / bytes, dense),
    }
}

/// Returns the outputs' bits.
async fn outputs(
    profile: &Profile,
    path: Algorithm,
    dtype: DType,
    placement: Placement,
) -> Result<Vec<Vec<u32>>, Error> {
    let gpu = &profile.gpu;
    let shapes = shapes();
    let of = |n: usize| if n == 5 { DType::F32 } else { dtype };
    let place = |n: usize| layout(n, placement, of(n).bytes());
    let bytes = |n: usize| {
        let (offset, strides) = place(n);
        let last: usize = shapes[n].iter().zip(strides).map(|(len, stride)| (len - 1) * stride).sum();
        ((offset + last + 1) * of(n).bytes()).next_multiple_of(4)
    };
    let all = gpu.buffer((0..9).map(bytes).max().unwrap_or(4))?;
    let mut buffers = Vec::new();
    for n in 0..9 {
        buffers.push(if placement == Placement::Separate { gpu.buffer(bytes(n))? } else { all.clone() });
    }
    let mut memory = vec![0u8; all.size() as usize];
    for n in 0..INPUTS {
        let (offset, strides) = place(n);
        for (index, x) in noise(shapes[n].iter().product(), 0.3 + n as f32).into_iter().enumerate() {
            let mut rest = index;
            let mut at = offset;
            for axis in (0..4).rev() {
                at += rest % shapes[n][axis] * strides[axis];
                rest /= shapes[n][axis];
            }
            let at = at * dtype.bytes();
            match dtype {
                DType::F32 => memory[at..at + 4].copy_from_slice(&x.to_le_bytes()),
                _ => memory[at..at + 2].copy_from_slice(&half::bf16::from_f32(x).to_le_bytes()),
            }
        }
        if placement == Placement::Separate {
            gpu.queue().write_buffer(&buffers[n], 0, &memory[..bytes(n)]);
        }
    }
    if placement != Placement::Separate {
        gpu.queue().write_buffer(&all, 0, &memory);
    }
    let view = |n: usize| {
        let (offset, strides) = place(n);
        TensorView::new(&buffers[n], of(n), shapes[n]).with_strides(strides).with_offset(offset)
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
        let count = shapes[n].iter().product::<usize>() * of(n).bytes() / 4;
        let first = place(n).0 * of(n).bytes() / 4;
        let bits: Vec<u32> = gpu.download_async(&buffers[n], first + count).await?;
        outputs.push(bits[first..].to_vec());
    }
    Ok(outputs)
}

/// Returns 0 if all placements give the same bits.
pub async fn same_bits(profile: &Profile, path: Algorithm, dtype: DType) -> Result<f64, String> {
    let run = async |placement| outputs(profile, path, dtype, placement).await.map_err(|e| e.to_string());
    let separate = run(Placement::Separate).await?;
    if separate.iter().any(|bits| bits.iter().all(|word| *word == 0)) {
        return Err("an output was not written".into());
    }
    for placement in [Placement::One, Placement::Columns] {
        if run(placement).await? != separate {
            return Err("other bits with all tensors in one buffer".into());
        }
    }
    Ok(0.0)
}
