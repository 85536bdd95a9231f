//! Stacks of encoder and decoder layers, and their gradients, compared with PyTorch's numbers and
//! the reference.

mod backward;
pub mod by_layer;
pub mod data;
mod decoder;
mod decoder_backward;
mod decoder_data;
mod encoder;
mod few_rows;
mod judge;
mod quantised;
mod steps;

pub use decoder_data::NAMES as DECODERS;
pub use encoder::{D2L, NAMES};

pub const FAMILY: &str = "encoder";
