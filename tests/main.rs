//! The tests of the crate, in one binary. Run as `scripts/gpu cargo test --release`.

mod harness;

mod biases;
mod block_maps;
mod caches;
mod contract;
mod d2l;
mod errors;
mod flex;
mod floors;
mod fused;
mod gpu;
mod harness_fails;
mod key_splits;
mod masks;
mod masks_sparse;
mod matrix;
mod meaning;
mod merge;
mod mha;
mod minilm;
mod numbers;
mod onnx;
mod packed;
mod patterns;
mod positions;
mod projection;
mod property;
mod property_layers;
mod recording;
mod sdpa;
mod small;
mod stages;
mod validation;
mod vectors_used;
mod work_limit;
