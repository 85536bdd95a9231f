//! Weights of published models, from their files into the buffers that [`wgpu_attention`] reads.

#![warn(missing_docs)]
