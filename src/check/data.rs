//! Input numbers, and the comparison of results.

use half::{bf16, f16};

use crate::gpu::Gpu;
use crate::reference::compare::{EPSILON_F16, EPSILON_F32, Mismatch, Tolerance, compare};
use crate::tensor::{DType, Error, Shape, count, widen};

/// Lengths and channels that fill no tile; two heads share keys and values.
pub(super) const PREFILL: Shape =
    Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 37, kv_len: 53, head_dim: 12, value_dim: 20 };
/// Few rows or queries. Software drivers take seconds to compile products of many rows.
pub(super) const FEW: usize = 3;

/// The share of the permitted error, or the mismatch.
pub(crate) type Outcome = Result<f64, Mismatch>;

/// Returns numbers in [−1, 1), the same at every call.
pub(crate) fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let next = || {
        // xorshift32 (Marsaglia 2003).
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// q, k and v.
pub(crate) fn inputs(shape: &Shape) -> [Vec<f32>; 3] {
    [(shape.q(), 1), (shape.k(), 2), (shape.v(), 3)].map(|(shape, seed)| noise(count(shape), seed))
}

/// Compares `got` with `want` and returns the share of the permitted error. `naive` is the result
/// of plain loops in f32.
pub(crate) fn judge(got: &[f32], want: &[f64], naive: &[f32], dtype: DType) -> Outcome {
    let (naive, epsilon) = match dtype {
        // Matrix units round more than the result does.
        DType::F16 => (naive.to_vec(), EPSILON_F16),
        DType::BF16 => (from_bits(&to_bits(naive, dtype), dtype), EPSILON_F32),
        _ => (naive.to_vec(), EPSILON_F32),
    };
    let magnitude = want.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
    let tolerance = Tolerance::from_naive(&widen::<f64>(&naive), want, magnitude, epsilon);
    share_of(got, want, tolerance)
}

fn share_of(got: &[f32], want: &[f64], tolerance: Tolerance) -> Outcome {
    compare(got, want, tolerance).map(|difference| difference.absolute / tolerance.absolute)
}

/// Compares a gradient of F32 as [`judge`] does; its tensors have type `dtype`. `terms`: the sums
/// of absolute values, from plain loops.
pub(crate) fn judge_gradient(
    got: &[f32],
    want: &[f64],
    naive: &[f32],
    terms: &[f32],
    dtype: DType,
) -> Outcome {
    let magnitude = terms.iter().fold(0.0, |m: f64, x| m.max(f64::from(*x)));
    // Matrix units multiply f16.
    let epsilon = if dtype == DType::F16 { EPSILON_F16 } else { EPSILON_F32 };
    let tolerance = Tolerance::gradient(&widen::<f64>(naive), want, magnitude, epsilon);
    share_of(got, want, tolerance)
}

/// Returns the bits as buffers of F16 or BF16 hold them.
pub(crate) fn to_bits(x: &[f32], dtype: DType) -> Vec<u16> {
    let bits = |x: &f32| match dtype {
        DType::BF16 => bf16::from_f32(*x).to_bits(),
        _ => f16::from_f32(*x).to_bits(),
    };
    x.iter().map(bits).collect()
}

pub(crate) fn from_bits(x: &[u16], dtype: DType) -> Vec<f32> {
    let value = |x: &u16| match dtype {
        DType::BF16 => bf16::from_bits(*x).to_f32(),
        _ => f16::from_bits(*x).to_f32(),
    };
    x.iter().map(value).collect()
}

pub(crate) async fn halves_of(
    gpu: &Gpu,
    dtype: DType,
    buffer: &wgpu::Buffer,
    n: usize,
) -> Result<Vec<f32>, Error> {
    let got: Vec<u16> = gpu.download_async(buffer, n).await?;
    Ok(from_bits(&got, dtype))
}
