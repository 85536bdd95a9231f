//! A file's bytes.

use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};

#[cfg(not(target_arch = "wasm32"))]
use memmap2::Mmap;

use crate::error::Error;

/// Bytes of a mapped file, or bytes that are already in memory.
#[derive(Debug)]
pub(crate) enum Bytes {
    #[cfg(not(target_arch = "wasm32"))]
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    #[cfg(not(target_arch = "wasm32"))]
    fn of(file: File) -> std::io::Result<Self> {
        // SAFETY: the documentation of the public functions that map a file forbids changing the
        // file while it is mapped. The memory is only read as bytes, and every byte value is valid.
        unsafe { Mmap::map(&file) }.map(Bytes::Mapped)
    }

    #[cfg(target_arch = "wasm32")]
    fn of(mut file: File) -> std::io::Result<Self> {
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut file, &mut bytes)?;
        Ok(Bytes::Owned(bytes))
    }
}

/// Bytes, and the file's name for error messages.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub path: PathBuf,
    bytes: Bytes,
}

impl Mapped {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::File { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(failed)?;
        // Some systems open a folder, and mapping it then fails with an unhelpful message.
        if file.metadata().map_err(failed)?.is_dir() {
            return Err(failed(std::io::ErrorKind::IsADirectory.into()));
        }
        Ok(Mapped { path: path.to_path_buf(), bytes: Bytes::of(file).map_err(failed)? })
    }

    pub(crate) fn owned(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Self {
        Mapped { path: name.into(), bytes: Bytes::Owned(bytes) }
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            #[cfg(not(target_arch = "wasm32"))]
            Bytes::Mapped(mapped) => mapped,
            Bytes::Owned(bytes) => bytes,
        }
    }
}
