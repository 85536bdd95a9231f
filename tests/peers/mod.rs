//! Truth from others: ONNX, PyTorch, d2l, models.

pub mod d2l;
pub mod minilm;
pub mod onnx;
pub mod sdpa;
pub mod smollm2;
