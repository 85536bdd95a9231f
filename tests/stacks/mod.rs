//! Stacks of encoder and decoder layers against PyTorch's numbers and the reference; the encoder's gradients too.

mod backward;
mod data;
mod decoder;
mod encoder;

pub use decoder::NAMES as DECODERS;
pub use encoder::{D2L, NAMES};

pub const FAMILY: &str = "encoder";
