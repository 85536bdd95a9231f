//! Weights of published models, from their files into the buffers that [`wgpu_attention`] reads.
//!
//! [`Safetensors`] reads safetensors files, alone or with an index; [`Gguf`] reads GGUF. Both are [`Tensors`]: tensors by name. Files are
//! mapped into memory, not read: a tensor's bytes are paged in where they are looked at. [`upload`] and [`upload_f32`] copy a tensor to the
//! device, as stored or as f32; [`AttentionTensors`] finds an attention layer's weights by the names that `transformers` or llama.cpp
//! give them. Whatever is in a file, the answer is an [`Error`] or a value, never a panic.
//!
//! ```no_run
//! use wgpu_attention::{Gpu, MultiHeadAttention};
//! use wgpu_attention_models::{AttentionTensors, Naming, Safetensors};
//!
//! let gpu = Gpu::new()?;
//! let weights = Safetensors::open("all-MiniLM-L6-v2")?;
//! let tensors = AttentionTensors::new(&weights, Naming::Bert, 0)?;
//! let buffers = tensors.upload(&gpu)?;
//! let layer = MultiHeadAttention::with_pipelines(gpu.pipelines(), tensors.config(12)?, &buffers.view()?)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![warn(missing_docs)]

mod attention;
mod error;
mod gguf;
mod mapped;
mod safetensors;
mod storage;
mod tensor;
mod upload;

use std::path::Path;

pub use self::attention::{AttentionBuffers, AttentionTensors, LinearBuffers, LinearTensors, Naming};
pub use self::error::Error;
pub use self::gguf::{Array, Gguf, Value};
pub use self::safetensors::Safetensors;
pub use self::storage::Storage;
pub use self::tensor::{TensorData, TensorInfo};
pub use self::upload::{DeviceTensor, upload, upload_f32};

/// Tensors by name, whatever file they are in.
pub trait Tensors {
    /// The file, or the index of several.
    fn path(&self) -> &Path;

    /// What the file says of its tensors, in its order.
    fn tensors(&self) -> &[TensorInfo];

    /// Whether there is a tensor of this name.
    fn contains(&self, name: &str) -> bool;

    /// A tensor's bytes.
    ///
    /// # Errors
    /// [`Error::Missing`]; [`Error::Type`] for a type that is only listed.
    fn tensor(&self, name: &str) -> Result<TensorData<'_>, Error>;
}
