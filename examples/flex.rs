//! Attention by functions of one's own: a named mask with its block map, a learned table, and a mask written here; each compared with
//! the CPU reference. The picture shows what three pixels of an image attend to.
//!
//! `scripts/gpu cargo run --release --example flex -- [flex.svg]`

use std::fmt::Write;

use wgpu_attention::reference::{self, Options, compare::max_error, widen};
use wgpu_attention::{
    At, Attention, Blocks, Captured, Config, DType, DeviceMask, Forward, Gpu, HostMask, MaskMod, ScoreMod,
    Scratch, Shape, TensorView, block_map::state, presets,
};

/// Of an image; a token is a pixel, row by row.
const SIDE: usize = 24;
const TOKENS: usize = SIDE * SIDE;
const HEADS: usize = 2;
const DIM: usize = 32;
/// Steps in a direction that the table tells apart.
const MOST: i64 = 4;

/// A learned bias for each head and each step down and right.
const STEPS: &str = "
    struct Uniforms { side: i32, most: i32 }
    fn score_mod(score: f32, at: At) -> f32 {
        let side = uniforms().side;
        let most = uniforms().most;
        let q = vec2<i32>(at.position / side, at.position % side);
        let k = vec2<i32>(i32(at.key) / side, i32(at.key) % side);
        let step = vec2<u32>(clamp(k - q, vec2<i32>(-most), vec2<i32>(most)) + most);
        return score + table_at(0u, at.head, step.x, step.y);
    }";

/// Axial attention: even heads see the query's row, odd ones its column.
const AXES: &str = "
    struct Uniforms { side: u32 }
    fn mask_mod(at: At) -> bool {
        let side = uniforms().side;
        if at.head % 2u == 0u { return at.query / side == at.key / side; }
        return at.query % side == at.key % side;
    }";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = Gpu::new()?;
    println!("{}", gpu.device().adapter_info().name);
    let shape = Shape::new(1, HEADS, TOKENS, DIM);
    let noise = |n: usize, seed: usize| -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0).collect()
    };
    let inputs = [1, 2, 3].map(|seed| noise(HEADS * TOKENS * DIM, seed));
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(HEADS, DIM))?;

    // A preset, with a map of 64 × 64 pairs by which hidden ones are not looked at.
    let near = presets::natten([SIDE; 2], [7, 7], [1, 1])?;
    let near_here = HostMask::none().mask_fn(near.mask_fn());
    let n = TOKENS.div_ceil(64);
    let map = gpu.buffer(4 * n * n)?;
    let blocks = Blocks::new(TensorView::new(&map, DType::U32, [1, 1, n, n]), [64; 2]);
    let near_there = DeviceMask::none().mask_mod(&near);
    gpu.submit(|encoder| attention.classify(encoder, &near_there, [1, TOKENS, TOKENS], &blocks))?;
    let states: Vec<u32> = gpu.download(&map, n * n)?;
    let hidden = states.iter().filter(|of| **of == state::HIDDEN).count();
    println!("natten: {hidden} of {} blocks are hidden", n * n);
    if states != reference::classify(&near_here, shape, [64; 2], [1; 2])? {
        return Err("the block map is not the reference's".into());
    }

    let side = 2 * MOST as usize + 1;
    let table = noise(HEADS * side * side, 4);
    let buffer = gpu.upload(&table)?;
    let view = TensorView::new(&buffer, DType::F32, [1, HEADS, side, side]);
    let steps = ScoreMod::capturing(STEPS, &[Captured::float("table")])?.with(&[view]);
    let steps = steps.uniforms(&[SIDE as u32, MOST as u32].map(u32::to_ne_bytes).concat());
    let steps_here = |score: f64, at: &At| {
        let [q, k] = [i64::from(at.position), i64::from(at.key)].map(|n| [n / SIDE as i64, n % SIDE as i64]);
        let step = [0, 1].map(|n| ((k[n] - q[n]).clamp(-MOST, MOST) + MOST) as usize);
        score + f64::from(table[(at.head as usize * side + step[0]) * side + step[1]])
    };

    let axes = MaskMod::new(AXES)?.uniforms(&(SIDE as u32).to_ne_bytes());
    let axes_here = |at: &At| {
        let of = |n: u32| if at.head.is_multiple_of(2) { n / SIDE as u32 } else { n % SIDE as u32 };
        of(at.query) == of(at.key)
    };

    let masks = [
        ("natten", near_there.blocks(blocks), near_here),
        ("learned table", DeviceMask::none().score_mod(steps), HostMask::none().score_fn(&steps_here)),
        ("axes", DeviceMask::none().mask_mod(axes), HostMask::none().mask_fn(&axes_here)),
    ];
    let [q, k, v] = &inputs;
    let wide = inputs.each_ref().map(|x| widen::<f64>(x));
    let buffers = [gpu.upload(q)?, gpu.upload(k)?, gpu.upload(v)?];
    let (out, weights) = (gpu.buffer(4 * v.len())?, gpu.buffer(4 * HEADS * TOKENS * TOKENS)?);
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    let [q, k, v] = [&buffers[0], &buffers[1], &buffers[2]].map(|buffer| view(buffer, shape.q()));
    let mut picture = String::new();
    for (row, (name, there, here)) in masks.into_iter().enumerate() {
        // With its map, too, the mask means the same.
        let apart = gpu.compare_masks(&there, &here, shape, 1e-5)?;
        // In one pass; and by stages, for the picture.
        let call = Forward::new(q, k, v, view(&out, shape.out())).mask(there);
        let mut got = Vec::new();
        for call in [call, call.weights(view(&weights, shape.weights()))] {
            let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
            gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch))?;
            got.push(widen::<f64>(&gpu.download::<f32>(&out, HEADS * TOKENS * DIM)?));
        }
        let seen: Vec<f32> = gpu.download(&weights, HEADS * TOKENS * TOKENS)?;
        let options = Options::new().mask(here).weights(true);
        let want = reference::attention(&wide[0], &wide[1], &wide[2], shape, &options)?;
        let wanted = want.weights.ok_or("weights were asked for")?;
        let errors = [
            max_error(&got[0], &want.out),
            max_error(&got[1], &want.out),
            max_error(&widen::<f64>(&seen), &wanted),
        ];
        println!(
            "{name}: the function is off by {apart:.1e}, out by {:.1e} and {:.1e}, weights by {:.1e}",
            errors[0], errors[1], errors[2]
        );
        if errors.iter().any(|error| error.is_nan() || *error > 1e-5) {
            return Err(format!("{name}: device and reference differ").into());
        }
        draw(&mut picture, row, &seen)?;
    }
    let path = std::env::args().nth(1).unwrap_or("flex.svg".to_string());
    let size = format!("width=\"{}\" height=\"{}\"", 6 * 4 * (SIDE + 2), 3 * 4 * (SIDE + 2));
    let view_box = format!("viewBox=\"0 0 {} {}\"", 6 * (SIDE + 2), 3 * (SIDE + 2));
    std::fs::write(
        &path,
        format!("<svg xmlns=\"http://www.w3.org/2000/svg\" {size} {view_box}>\n{picture}</svg>\n"),
    )?;
    println!("{path}: what three pixels of each head attend to, a row for each function");
    Ok(())
}

/// A row of images, one for each head and each of three pixels: the weights of that pixel's query.
fn draw(picture: &mut String, row: usize, weights: &[f32]) -> std::fmt::Result {
    let pixels = [[1, 2], [SIDE / 2, SIDE / 3], [SIDE - 2, SIDE - 6]];
    for (column, (head, [y, x])) in (0..HEADS).flat_map(|h| pixels.map(|pixel| (h, pixel))).enumerate() {
        let [left, top] = [column, row].map(|n| n * (SIDE + 2) + 1);
        let query = head * TOKENS + y * SIDE + x;
        let of_query = &weights[query * TOKENS..][..TOKENS];
        let most = of_query.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
        writeln!(
            picture,
            "<rect x=\"{left}\" y=\"{top}\" width=\"{SIDE}\" height=\"{SIDE}\" fill=\"#eef2f7\"/>"
        )?;
        for (n, weight) in of_query.iter().enumerate().filter(|(_, weight)| **weight > 0.002 * most) {
            let (x, y, shade) = (left + n % SIDE, top + n / SIDE, (weight / most).sqrt());
            writeln!(picture, "<path d=\"M{x} {y}h1v1h-1z\" fill=\"#1b3a5a\" opacity=\"{shade:.2}\"/>")?;
        }
        let (x, y) = (left + x, top + y);
        writeln!(
            picture,
            "<path d=\"M{x} {y}h1v1h-1z\" fill=\"none\" stroke=\"#e4572e\" stroke-width=\".3\"/>"
        )?;
    }
    Ok(())
}
