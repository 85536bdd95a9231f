//! Rotary, sinusoidal and learned positions: against other people's numbers, and the GPU against
//! the reference.

mod additions;
mod backward;
mod edges;
mod refusals;
mod rotations;
mod vectors;

pub use vectors::{D2L, FAMILY, ONNX, ROPE, SINUSOID};

use wgpu_attention::{Error, Gpu, Scratch, ScratchSize};

fn scratch(gpu: &Gpu) -> Scratch {
    Scratch::new(gpu.device(), ScratchSize::default()).expect("no memory to speak of")
}

fn says(error: Error, words: &[&str]) {
    let message = error.to_string();
    assert!(words.iter().all(|w| message.contains(w)), "{words:?} not in {message:?}");
}
