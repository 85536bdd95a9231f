//! Projections.

pub mod projection;
pub mod projection_backward;
pub mod quantized;
