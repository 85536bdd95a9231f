//! Attention over sequences of different lengths in one call, without padding. The sequences are
//! packed one after the other, with a causal mask and grouped heads.
//!
//! `scripts/gpu cargo run --release --example ragged_batch`

use std::time::Instant;

use wgpu_attention::reference::compare::max_error;
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::{Attention, Config, DType, Forward, Gpu, Mask, Scratch, Shape, TensorView};

const LENGTHS: [usize; 5] = [7, 200, 1, 64, 130];
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = Gpu::new()?;
    println!("{}", gpu.device().adapter_info().name);

    // One tensor [1, heads, tokens, dim] holds all tokens of all sequences.
    let tokens: usize = LENGTHS.iter().sum();
    let shape = Shape { kv_heads: KV_HEADS, ..Shape::new(1, HEADS, tokens, DIM) };
    let noise = |n: usize, seed: usize| -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0).collect()
    };
    let size = |s: [usize; 4]| s.iter().product::<usize>();
    let q = noise(size(shape.q()), 1);
    let k = noise(size(shape.k()), 2);
    let v = noise(size(shape.v()), 3);

    // The first token of each sequence, and the end of the last.
    let mut starts = vec![0u32];
    for length in LENGTHS {
        starts.push(starts[starts.len() - 1] + length as u32);
    }
    let buffers = [gpu.upload(&q)?, gpu.upload(&k)?, gpu.upload(&v)?];
    let starts_buffer = gpu.upload(&starts)?;
    let out = gpu.buffer(q.len() * 4)?;
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    let starts_view = TensorView::vector(&starts_buffer, DType::U32, starts.len());

    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(HEADS, DIM).kv_heads(KV_HEADS))?;
    let call = Forward::new(
        view(&buffers[0], shape.q()),
        view(&buffers[1], shape.k()),
        view(&buffers[2], shape.v()),
        view(&out, shape.out()),
    )
    .mask(Mask::causal().packed(starts_view, starts_view));
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch))?;
    let got: Vec<f32> = gpu.download(&out, q.len())?;

    let start = Instant::now();
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch))?;
    gpu.device().poll(wgpu_attention::wgpu::PollType::wait_indefinitely())?;
    println!("{} sequences, {tokens} tokens: {:.2?} in one dispatch", LENGTHS.len(), start.elapsed());

    // Check that each sequence has the same result as alone.
    for (length, start) in LENGTHS.into_iter().zip(&starts) {
        let tokens_of = |x: &[f32]| -> Vec<f64> {
            x.chunks_exact(tokens * DIM)
                .flat_map(|head| widen::<f64>(&head[*start as usize * DIM..][..length * DIM]))
                .collect()
        };
        let alone = Shape { q_len: length, kv_len: length, ..shape };
        let causal = Options::new().mask(Mask::causal());
        let want = reference::attention(&tokens_of(&q), &tokens_of(&k), &tokens_of(&v), alone, &causal)?;
        let error = max_error(&tokens_of(&got), &want.out);
        println!("{length:4} tokens: off by {error:.1e} from the reference of the sequence alone");
        if error.is_nan() || error > 1e-5 {
            return Err(format!("a sequence of {length} tokens is off by {error:e}").into());
        }
    }
    Ok(())
}
