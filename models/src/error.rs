//! Everything that can be wrong with a model's files, each with what to do about it.

use std::path::PathBuf;

use crate::storage::Storage;

/// Why a model's weights could not be had.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be opened, read or mapped.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file is not what its format says: cut off, damaged or another format.
    #[error("{} is not a valid {format} file: {what}; check that the download is complete and of this format", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// `GGUF`, `safetensors` or `index`.
        format: &'static str,
        /// What is wrong, and where.
        what: String,
    },
    /// There is no tensor of this name.
    #[error("no tensor `{name}` in {}{}", path.display(), also(near))]
    Missing {
        /// The tensor.
        name: String,
        /// The file, or the index of several.
        path: PathBuf,
        /// A name that is there and looks alike.
        near: Option<String>,
    },
    /// A tensor has another shape than the model's.
    #[error(
        "`{name}` has shape {got:?}, but the model needs {expected}; check that the file belongs to this model"
    )]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        got: Vec<usize>,
        /// What the model needs.
        expected: String,
    },
    /// A tensor's elements are stored in a type that is not taken here.
    #[error("`{name}` is stored as {got}, but {needed_for} takes {expected}; convert the file")]
    Type {
        /// The tensor.
        name: String,
        /// How it is stored.
        got: Storage,
        /// For what it was wanted.
        needed_for: &'static str,
        /// What would do.
        expected: &'static str,
    },
    /// A metadata key is missing or has a value of another type.
    #[error("the metadata of {} has no {expected} `{key}`{}", path.display(), has(key, found))]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The type that was wanted.
        expected: &'static str,
        /// The type that is there, if any.
        found: Option<&'static str>,
    },
    /// A tensor does not fit into a buffer of this device.
    #[error(
        "`{name}` needs {bytes} bytes, but the device allows {limit} (`{limit_name}`); request a higher limit or use a smaller model"
    )]
    TooLarge {
        /// The tensor.
        name: String,
        /// Bytes it needs.
        bytes: u64,
        /// What the device allows.
        limit: u64,
        /// The limit's name in `wgpu::Limits`.
        limit_name: &'static str,
    },
    /// The device made no buffer.
    #[error(transparent)]
    Device(#[from] wgpu_attention::Error),
}

fn also(near: &Option<String>) -> String {
    near.as_ref().map_or(String::new(), |near| format!("; the closest name is `{near}`"))
}

fn has(key: &str, found: &Option<&'static str>) -> String {
    found.map_or(String::new(), |found| format!("; `{key}` is {found}"))
}
