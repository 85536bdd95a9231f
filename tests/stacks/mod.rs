//! Stacks of encoder layers against PyTorch's numbers and the reference, forward and backward.

mod backward;
mod data;
mod encoder;

pub use encoder::{D2L, NAMES};

pub const FAMILY: &str = "encoder";
