//! Attention among the pixels of an image, with custom score and mask functions. They are a preset
//! mask, a learned table, and a custom mask. Each is compared with the CPU reference and drawn.
//!
//! `scripts/gpu cargo run --release --example flex -- [flex.svg]`

#[path = "flex/picture.rs"]
mod picture;

use picture::{Picture, noise};
use wgpu_attention::mask::*;
use wgpu_attention::reference::compare::max_error;
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::*;

const SIDE: usize = 24;

/// A learned bias for each head and each offset in rows and columns.
const STEPS: &str = "fn score_mod(score: f32, at: At) -> f32 {
    let step = vec2<u32>(24u + at.key / 24u - at.query / 24u, 24u + at.key % 24u - at.query % 24u);
    return score + table_at(0u, at.head, step.x, step.y);
}";

/// Axial attention: even heads see the query's row, odd heads its column.
const AXES: &str = "fn mask_mod(at: At) -> bool {
    return select(at.query % 24u == at.key % 24u, at.query / 24u == at.key / 24u, at.head % 2u == 0u);
}";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (gpu, shape) = (Gpu::new()?, Shape::new(1, 2, SIDE * SIDE, 32));
    let near = presets::natten([SIDE; 2], [7, 7], [1, 1])?;
    let axes = MaskMod::new(AXES)?;
    let sees = |at: &At| match at.head % 2 {
        0 => at.query / 24 == at.key / 24,
        _ => at.query % 24 == at.key % 24,
    };
    let table = noise([1, 2, 48, 48], 4);
    let captured = gpu.upload(&table)?;
    let captured = TensorView::new(&captured, DType::F32, [1, 2, 48, 48]);
    let steps = ScoreMod::capturing(STEPS, &[Captured::float("table")])?.with(&[captured]);
    let score = |score: f64, at: &At| {
        let [down, right] = [24 + at.key / 24 - at.query / 24, 24 + at.key % 24 - at.query % 24];
        score + f64::from(table[((at.head * 48 + down) * 48 + right) as usize])
    };

    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(2, 32))?;
    let [q, k, v] = [1, 2, 3].map(|seed| noise(shape.q(), seed));
    let [q64, k64, v64] = [&q, &k, &v].map(|x| widen::<f64>(x));
    let (q, k, v) = (gpu.upload(&q)?, gpu.upload(&k)?, gpu.upload(&v)?);
    let (out, weights) = (gpu.buffer(4 * q64.len())?, gpu.buffer(4 * 2 * SIDE.pow(4))?);
    let mut picture = Picture::new(SIDE);
    for (name, device, host) in [
        ("natten", Mask::none().mask_mod(&near), Mask::none().mask_fn(near.mask_fn())),
        ("a learned table", Mask::none().score_mod(steps), Mask::none().score_fn(&score)),
        ("axes", Mask::none().mask_mod(axes), Mask::none().mask_fn(&sees)),
    ] {
        gpu.compare_masks(&device, &host, shape, 1e-5)?;
        let [q, k, v, out_view] = [&q, &k, &v, &out].map(|x| TensorView::new(x, DType::F32, shape.q()));
        let weights_view = TensorView::new(&weights, DType::F32, shape.weights());
        let call = Forward::new(q, k, v, out_view).mask(device).weights(weights_view);
        let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
        gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch))?;
        let got: Vec<f32> = gpu.download(&out, q64.len())?;
        let want = reference::attention(&q64, &k64, &v64, shape, &Options::new().mask(host))?;
        let error = max_error(&widen::<f64>(&got), &want.out);
        println!("{name}: off by {error:.1e}");
        assert!(error < 1e-5, "{name}: device and reference differ");
        picture.row(2, &gpu.download(&weights, 2 * SIDE.pow(4))?)?;
    }
    Ok(picture.save(&std::env::args().nth(1).unwrap_or("flex.svg".to_string()))?)
}
