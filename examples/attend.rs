//! The shortest use of this crate: slices in, `Vec` out, compared with the CPU reference.
//!
//! `cargo run --release --example attend`

use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::{Gpu, Mask, Shape};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = Gpu::new()?;
    println!("{}", gpu.device().adapter_info().name);

    let shape = Shape::new(1, 8, 128, 64); // batch, heads, length, head_dim
    let n = shape.q().iter().product();
    let noise = |seed: f32| (0..n).map(|i| (i as f32 * seed).sin()).collect::<Vec<f32>>();
    let (q, k, v) = (noise(0.37), noise(0.73), noise(1.19));

    let out = gpu.attend(&q, &k, &v, shape, Mask::causal())?;

    let causal = Options::new().mask(Mask::causal());
    let truth = reference::attention::<f64>(&widen(&q), &widen(&k), &widen(&v), shape, &causal)?;
    let got: Vec<f64> = widen(&out);
    println!("largest error against f64: {:.1e}", reference::compare::max_error(&got, &truth.out));
    Ok(())
}
