//! Quantisation and dequantisation of weights.

use half::f16;

use super::format::QuantizedFormat;
use crate::tensor::{Error, Real, expect_length};

/// Returns the weights of whole blocks. Each weight is exact in f32.
///
/// # Errors
/// The bytes are not whole blocks.
pub fn dequantize<R: Real>(format: QuantizedFormat, bytes: &[u8]) -> Result<Vec<R>, Error> {
    let size = format.block_bytes();
    expect_length("blocks", bytes, bytes.len().next_multiple_of(size))?;
    let half = |block: &[u8], n: usize| f16::from_le_bytes([block[n], block[n + 1]]).to_f64();
    let mut weights = Vec::with_capacity(bytes.len() / size * QuantizedFormat::BLOCK);
    for block in bytes.chunks_exact(size) {
        match format {
            QuantizedFormat::Q4_1 => {
                let (d, m) = (half(block, 0), half(block, 2));
                let halves =
                    [0, 4].into_iter().flat_map(|shift| block[4..].iter().map(move |q| q >> shift & 15));
                weights.extend(halves.map(|q| R::of(d * f64::from(q) + m)));
            }
            QuantizedFormat::Q8_0 => {
                let d = half(block, 0);
                weights.extend(block[2..].iter().map(|q| R::of(d * f64::from(*q as i8))));
            }
        }
    }
    Ok(weights)
}

/// Returns the blocks that are nearest to the weights. Q4_1 divides the range of a block's weights
/// into 15 steps. Q8_0 divides the largest absolute value of a block by 127.
///
/// # Errors
/// The weights are not whole blocks.
pub fn quantize(format: QuantizedFormat, weights: &[f32]) -> Result<Vec<u8>, Error> {
    expect_length("weights", weights, weights.len().next_multiple_of(QuantizedFormat::BLOCK))?;
    let mut bytes = Vec::with_capacity(weights.len() / QuantizedFormat::BLOCK * format.block_bytes());
    let half = |x: f32| f16::from_f32(x);
    // The number of steps from zero. A step of zero gives zero steps.
    let steps = |x: f32, step: f16| if step == f16::ZERO { 0.0 } else { (x / step.to_f32()).round() };
    for block in weights.chunks_exact(QuantizedFormat::BLOCK) {
        match format {
            QuantizedFormat::Q4_1 => {
                let least = block.iter().copied().fold(f32::INFINITY, f32::min);
                let most = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let (d, m) = (half((most - least) / 15.0), half(least));
                let q = |x: f32| steps(x - m.to_f32(), d).clamp(0.0, 15.0) as u8;
                bytes.extend(d.to_le_bytes().into_iter().chain(m.to_le_bytes()));
                bytes.extend(block[..16].iter().zip(&block[16..]).map(|(low, high)| q(*low) | q(*high) << 4));
            }
            QuantizedFormat::Q8_0 => {
                let most = block.iter().fold(0f32, |most, x| most.max(x.abs()));
                let d = half(most / 127.0);
                bytes.extend(d.to_le_bytes());
                bytes.extend(block.iter().map(|x| steps(*x, d).clamp(-127.0, 127.0) as i8 as u8));
            }
        }
    }
    Ok(bytes)
}
