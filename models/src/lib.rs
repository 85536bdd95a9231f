//! Weights of published models, from their files into the buffers that [`wgpu_attention`] reads.
//!
//! [`Gguf`] reads GGUF files. Files are mapped into memory, not read: a tensor's bytes are paged in where they are looked at.
//! Whatever is in a file, the answer is an [`Error`] or a value, never a panic.

#![warn(missing_docs)]

mod error;
mod gguf;
mod mapped;
mod tensor;

pub use self::error::Error;
pub use self::gguf::{Array, Gguf, Value};
pub use self::tensor::{Storage, TensorData, TensorInfo};
