//! The computed weights and their picture, without a window.

use std::error::Error;

use canvas::heat;
use wgpu_attention::mask::{At, HostMask, ScoreMod};
use wgpu_attention::reference::compare::{Tolerance, compare};
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::{Gpu, Mask, Shape, presets};

use crate::choices::Sizes;
use crate::heat::{Heat, Map};
use crate::masked::{Functions, Masked, Score, inputs};

const SIZES: Sizes = Sizes { q_len: 40, kv_len: 56, heads: 3, head_dim: 16 };
const HEAD: usize = 2;
const TOLERANCE: Tolerance = Tolerance { absolute: 1e-5 };

/// Computes the weights, and the picture of one head as RGBA.
fn on_device(gpu: &Gpu, functions: &Functions) -> Result<(Vec<f32>, Vec<u8>), Box<dyn Error>> {
    let Sizes { q_len, kv_len, heads, .. } = SIZES;
    let (mut masked, mut heat) = (Masked::new(gpu, SIZES)?, Heat::new(gpu)?);
    // A row of pixels in a copy has a multiple of 256 bytes.
    let row = (4 * kv_len).next_multiple_of(256);
    let pixels = gpu.buffer(q_len * row)?;
    gpu.submit(|encoder| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        masked.record(&mut pass, functions)?;
        drop(pass);
        heat.record(encoder, &masked.weights, Map::new(HEAD, [q_len, kv_len]));
        let layout =
            wgpu::TexelCopyBufferLayout { offset: 0, bytes_per_row: Some(row as u32), rows_per_image: None };
        encoder.copy_texture_to_buffer(
            heat.texture.as_image_copy(),
            wgpu::TexelCopyBufferInfo { buffer: &pixels, layout },
            heat.texture.size(),
        );
        Ok(())
    })?;
    let weights = gpu.download(&masked.weights, heads * q_len * kv_len)?;
    let rows: Vec<u8> = gpu.download(&pixels, q_len * row)?;
    Ok((weights, rows.chunks_exact(row).flat_map(|row| &row[..4 * kv_len]).copied().collect()))
}

fn by_reference(mask: HostMask) -> Result<Vec<f64>, Box<dyn Error>> {
    let Sizes { q_len, kv_len, heads, head_dim } = SIZES;
    let shape = Shape { q_len, ..Shape::new(1, heads, kv_len, head_dim) };
    let [q, k, v] = inputs(SIZES).map(|x| widen::<f64>(&x));
    let options = Options::new().mask(mask).weights(true);
    Ok(reference::attention(&q, &k, &v, shape, &options)?.weights.unwrap_or_default())
}

/// Compares the picture with the colours of `weights`, `[q_len, kv_len]`.
fn compare_colours(picture: &[u8], weights: &[f64]) {
    let largest = weights.iter().copied().fold(0.0, f64::max);
    assert_eq!(picture.len(), 4 * weights.len());
    for (n, (pixel, weight)) in picture.chunks_exact(4).zip(weights).enumerate() {
        let want = heat((weight / largest) as f32);
        let is_near = pixel.iter().zip(want).all(|(got, want)| got.abs_diff(want) <= 3);
        assert!(is_near && pixel[3] == 255, "pixel {n}: {pixel:?}, expected {want:?}");
    }
}

#[test]
fn preset_weights_match_reference() -> Result<(), Box<dyn Error>> {
    let gpu = Gpu::new()?;
    let (mask, score) = (presets::sliding(9)?, presets::softcap(2.0)?);
    let host = Mask::none().mask_fn(mask.mask_fn()).score_fn(score.score_fn());
    let want = by_reference(host)?;
    let functions = Functions::new(&gpu, Some(mask.clone()), Score::Preset(score.clone(), ()))?;
    let (weights, picture) = on_device(&gpu, &functions)?;
    compare(&weights, &want, TOLERANCE)?;
    let one = SIZES.q_len * SIZES.kv_len;
    compare_colours(&picture, &want[HEAD * one..][..one]);
    Ok(())
}

#[test]
fn typed_weights_match_reference() -> Result<(), Box<dyn Error>> {
    let gpu = Gpu::new()?;
    let text = "fn score_mod(score: f32, at: At) -> f32 {
        return score - 0.25 * f32(at.head) * f32(abs(at.position - i32(at.key)));
    }";
    let closure = |score: f64, at: &At| {
        score - 0.25 * f64::from(at.head) * f64::from((at.position - at.key as i32).abs())
    };
    let want = by_reference(Mask::none().score_fn(&closure))?;
    let functions = Functions::new(&gpu, None, Score::Typed(ScoreMod::new(text)?))?;
    let (weights, picture) = on_device(&gpu, &functions)?;
    compare(&weights, &want, TOLERANCE)?;
    let one = SIZES.q_len * SIZES.kv_len;
    compare_colours(&picture, &want[HEAD * one..][..one]);
    Ok(())
}
