//! Loads weights of published models from files into the buffers that [`wgpu_attention`] reads.
//!
//! - [`Safetensors`] reads safetensors files, alone or with an index. [`Gguf`] reads GGUF files.
//!   Both implement [`Tensors`], which finds tensors by name.
//! - [`upload`] copies a tensor to the device as stored, [`upload_f32`] as f32.
//! - [`AttentionTensors`] finds an attention layer's weights by their names in `transformers` or
//!   llama.cpp.
//!
//! Files are mapped into memory: the operating system loads a tensor's bytes at their first use.
//! A damaged file gives an [`Error`], never a panic.
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

/// Access to tensors by name, in a file of any format.
pub trait Tensors {
    /// The file, or the index of several.
    fn path(&self) -> &Path;

    /// Names, shapes and types of all tensors, in the file's order.
    fn tensors(&self) -> &[TensorInfo];

    /// True if there is a tensor of this name.
    fn contains(&self, name: &str) -> bool;

    /// A tensor's bytes.
    ///
    /// # Errors
    /// [`Error::Missing`]; [`Error::Type`] for an unsupported type.
    fn tensor(&self, name: &str) -> Result<TensorData<'_>, Error>;
}
