//! Attention for wgpu.
mod attention;
mod dropout;
mod error;
mod gpu;
mod kernel;
mod kernels;
mod mask;
mod multi_head;
mod path;
mod pipelines;
mod plan;
mod problem;
mod record;
pub mod reference;
mod scratch;
mod tensor;

pub use attention::{Attention, Config, Forward};
pub use dropout::Dropout;
pub use error::Error;
pub use gpu::Gpu;
pub use mask::{Alignment, DeviceMask, HostMask, HostTensor, Mask};
pub use multi_head::{LayerForward, LayerWeights, Linear, MultiHeadAttention};
pub use plan::Tiling;
pub use problem::{LayerConfig, Shape};
pub use record::Pipelines;
pub use scratch::{Scratch, ScratchSize};
pub use tensor::{DType, TensorView};
