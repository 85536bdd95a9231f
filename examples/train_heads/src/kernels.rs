//! Kernels that this example adds to the crate: embedding, loss and AdamW.

use training::{Kernel, Sizes};
use wgpu_attention::wgpu;

use crate::parameters::{Places, WIDTH};
use crate::task::{BATCH, LENGTH, VOCABULARY};

pub const ROWS: usize = BATCH * LENGTH;
/// The factor of the learning rate for the biases by distance. They need a higher rate, because a
/// score depends on one bias, but on two whole rows of matrices.
pub const BIAS_RATE: f32 = 16.0;

pub fn kernel(device: &wgpu::Device, label: &str, wgsl: &str, places: &Places) -> Kernel {
    let sizes =
        Sizes { rows: ROWS, width: WIDTH, vocabulary: VOCABULARY, faster: (places.biases(), BIAS_RATE) };
    let embed = format!("const EMBED = {}u;\n", places.embed.first);
    Kernel::new(device, label, wgsl, &sizes, &embed)
}
