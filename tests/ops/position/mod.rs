//! Rotary, sinusoidal and learned positions. Other libraries' numbers check the reference, which
//! checks the GPU.

mod additions;
mod backward;
mod edges;
mod refusals;
mod rotations;
mod sections;
mod vectors;

pub use sections::{AXES_FAMILY, AXES_NAMES};
pub use vectors::{D2L, FAMILY, ONNX, ROPE, SINUSOID};

use wgpu_attention::{Error, Gpu, Scratch, ScratchSize};

fn scratch(gpu: &Gpu) -> Scratch {
    Scratch::new(gpu.device(), ScratchSize::default()).expect("no memory to speak of")
}

fn says(error: Error, words: &[&str]) {
    let message = error.to_string();
    assert!(words.iter().all(|w| message.contains(w)), "{words:?} not in {message:?}");
}
