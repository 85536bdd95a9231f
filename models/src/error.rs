//! Errors about a model's files, each with a remedy.

use std::path::PathBuf;

use crate::storage::Storage;

/// The reason why a model's weights could not be read or uploaded.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be opened, read or mapped.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A file does not follow its format: it is cut off, damaged or in another format.
    #[error("{} is not a valid {format} file: {what}; check that the download is complete and of this format", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// `GGUF`, `safetensors` or `index`.
        format: &'static str,
        /// The fault and its place.
        what: String,
    },
    /// The file has no tensor of this name.
    #[error("no tensor `{name}` in {}{}", path.display(), also(near))]
    Missing {
        /// The tensor.
        name: String,
        /// The file, or the index of several.
        path: PathBuf,
        /// A similar name that the file has.
        near: Option<String>,
    },
    /// A tensor's shape differs from the shape that the model needs.
    #[error(
        "`{name}` has shape {got:?}, but the model needs {expected}; check that the file belongs to this model"
    )]
    Shape {
        /// The tensor.
        name: String,
        /// The shape in the file.
        got: Vec<usize>,
        /// The shape that the model needs.
        expected: String,
    },
    /// A tensor's elements are stored in an unsupported type.
    #[error("`{name}` is stored as {got}, but {needed_for} takes {expected}; convert the file")]
    Type {
        /// The tensor.
        name: String,
        /// The type in the file.
        got: Storage,
        /// The purpose that the tensor was requested for.
        needed_for: &'static str,
        /// The supported types.
        expected: &'static str,
    },
    /// A metadata key is missing or has a value of another type.
    #[error("the metadata of {} has no {expected} `{key}`{}", path.display(), has(key, found))]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The requested type.
        expected: &'static str,
        /// The type in the file, if the key exists.
        found: Option<&'static str>,
    },
    /// A tensor exceeds the size limits of this device's buffers.
    #[error(
        "`{name}` needs {bytes} bytes, but the device allows {limit} (`{limit_name}`); request a higher limit or use a smaller model"
    )]
    TooLarge {
        /// The tensor.
        name: String,
        /// Bytes that the tensor needs.
        bytes: u64,
        /// Bytes that the device allows.
        limit: u64,
        /// The limit's name in `wgpu::Limits`.
        limit_name: &'static str,
    },
    /// The device could not create a buffer.
    #[error(transparent)]
    Device(#[from] wgpu_attention::Error),
}

fn also(near: &Option<String>) -> String {
    near.as_ref().map_or(String::new(), |near| format!("; the closest name is `{near}`"))
}

fn has(key: &str, found: &Option<&'static str>) -> String {
    found.map_or(String::new(), |found| format!("; `{key}` is {found}"))
}
