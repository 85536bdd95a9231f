//! Numbers to compute with, and what is said of the results.

use half::f16;

use crate::error::Error;
use crate::gpu::Gpu;
use crate::problem::Shape;
use crate::reference::compare::{Mismatch, Tolerance, compare};
use crate::reference::widen;
use crate::tensor::count;

/// How much of the permitted error there is, or what is wrong.
pub(crate) type Outcome = Result<f64, Mismatch>;

/// Numbers in [−1, 1), the same every time.
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

/// Compares `got` with `want` and gives the share of the permitted error. `naive` is what plain loops in f32 compute.
pub(crate) fn judge(got: &[f32], want: &[f64], naive: &[f32], epsilon: f64) -> Outcome {
    let magnitude = want.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
    let tolerance = Tolerance::from_naive(&widen::<f64>(naive), want, magnitude, epsilon);
    compare(got, want, tolerance).map(|difference| difference.absolute / tolerance.absolute)
}

pub(crate) fn to_halves(x: &[f32]) -> Vec<f16> {
    x.iter().map(|x| f16::from_f32(*x)).collect()
}

pub(crate) fn from_halves(x: &[f16]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

/// f16 in u16, as buffers have it.
pub(crate) fn bits(x: &[f16]) -> Vec<u16> {
    x.iter().map(|x| x.to_bits()).collect()
}

pub(crate) async fn halves_of(gpu: &Gpu, buffer: &wgpu::Buffer, n: usize) -> Result<Vec<f32>, Error> {
    let got: Vec<u16> = gpu.download_async(buffer, n).await?;
    Ok(got.into_iter().map(|x| f16::from_bits(x).to_f32()).collect())
}
