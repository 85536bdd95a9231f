//! Expected results of other libraries and models: ONNX, PyTorch, d2l, real models.

pub mod d2l;
pub mod minilm;
pub mod onnx;
pub mod sdpa;
pub mod smollm2;
