//! Reads safetensors files, alone or several with an index, as Hugging Face's hub stores them.

use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path, PathBuf};

use safetensors::{Dtype, SafeTensors as File};
use serde_json::Value;

use crate::Tensors;
use crate::error::Error;
use crate::mapped::Mapped;
use crate::storage::Storage;
use crate::tensor::{TensorData, TensorInfo, nearest};

/// The names of the files in a folder.
const ALONE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Open safetensors files.
///
/// ```no_run
/// use wgpu_attention_models::Safetensors;
/// let weights = Safetensors::open("all-MiniLM-L6-v2")?; // a folder, a file or an index
/// let words = weights.tensor("embeddings.word_embeddings.weight")?;
/// println!("{:?} in {}", words.shape(), words.storage());
/// # Ok::<(), wgpu_attention_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Safetensors {
    path: PathBuf,
    files: Vec<Mapped>,
    tensors: Vec<TensorInfo>,
    /// File, first byte and length.
    ranges: Vec<(usize, usize, usize)>,
    by_name: HashMap<String, usize>,
}

impl Safetensors {
    /// Maps the files at `path` into memory. `path` is a safetensors file, an index of several
    /// (`*.index.json`), or a folder with `model.safetensors` or `model.safetensors.index.json`.
    /// The files must not change while they are open.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Malformed`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let index = path.join(INDEX);
        if path.is_dir() && index.exists() {
            return Self::open_index(&index);
        }
        if path.is_dir() {
            return Self::open_file(&path.join(ALONE));
        }
        if path.extension().is_some_and(|e| e == "json") {
            Self::open_index(path)
        } else {
            Self::open_file(path)
        }
    }

    /// Parses a file's bytes in memory; errors use `name` as its path.
    ///
    /// # Errors
    /// [`Error::Malformed`].
    pub fn from_bytes(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Result<Self, Error> {
        let name = name.into();
        let mut this = Self::empty(name.clone());
        this.add(Mapped::owned(name, bytes), &|_| true)?;
        Ok(this)
    }

    fn empty(path: PathBuf) -> Self {
        let (files, tensors, ranges) = Default::default();
        Safetensors { path, files, tensors, ranges, by_name: HashMap::new() }
    }

    fn open_file(path: &Path) -> Result<Self, Error> {
        let mut this = Self::empty(path.to_path_buf());
        this.add(Mapped::open(path)?, &|_| true)?;
        Ok(this)
    }

    fn open_index(path: &Path) -> Result<Self, Error> {
        let text = Mapped::open(path)?;
        let failed = |what| Error::Malformed { path: path.to_path_buf(), format: "index", what };
        let index: Value = serde_json::from_slice(&text).map_err(|e| failed(e.to_string()))?;
        let names = index.get("weight_map").and_then(Value::as_object);
        let names = names.ok_or_else(|| failed("the object `weight_map` is missing".into()))?;
        let mut files: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, file) in names {
            let file =
                file.as_str().ok_or_else(|| failed(format!("the file of `{name}` is not a string")))?;
            // An index is untrusted: it may only name files in its folder.
            let mut parts = Path::new(file).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
                return Err(failed(format!(
                    "`{name}` is in `{file}`, which is not a file in the folder of the index"
                )));
            }
            files.entry(file).or_default().push(name);
        }
        let mut this = Self::empty(path.to_path_buf());
        let folder = path.parent().unwrap_or(Path::new(""));
        for (file, tensors) in &files {
            // Skip tensors that the index does not list, or lists in another file.
            let listed = |name: &str| names.get(name).and_then(Value::as_str) == Some(file);
            this.add(Mapped::open(&folder.join(file))?, &listed)?;
            if let Some(name) = tensors.iter().find(|name| !this.by_name.contains_key(**name)) {
                return Err(failed(format!(
                    "`{name}` is missing in `{file}`, although the index names this file"
                )));
            }
        }
        Ok(this)
    }

    fn add(&mut self, file: Mapped, listed: &dyn Fn(&str) -> bool) -> Result<(), Error> {
        // The `safetensors` crate compares every length with the file's.
        let (header, metadata) = File::read_metadata(&file).map_err(|e| Error::Malformed {
            path: file.path.clone(),
            format: "safetensors",
            what: e.to_string(),
        })?;
        let data = size_of::<u64>() + header;
        let mut tensors: Vec<_> = metadata.tensors().into_iter().filter(|(name, _)| listed(name)).collect();
        tensors.sort_by(|(a, one), (b, other)| one.data_offsets.cmp(&other.data_offsets).then(a.cmp(b)));
        for (name, info) in tensors {
            let (start, end) = info.data_offsets;
            self.by_name.insert(name.clone(), self.tensors.len());
            self.ranges.push((self.files.len(), data + start, end - start));
            let storage = storage(info.dtype);
            self.tensors.push(TensorInfo { name, shape: info.shape.clone(), storage });
        }
        self.files.push(file);
        Ok(())
    }

    /// The file, or the index of several.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names, shapes and types of all tensors, in the files' order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// True if the files have a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// A tensor's bytes.
    ///
    /// # Errors
    /// [`Error::Missing`]; [`Error::Type`] for an unsupported type.
    pub fn tensor(&self, name: &str) -> Result<TensorData<'_>, Error> {
        let n = *self.by_name.get(name).ok_or_else(|| {
            let near = nearest(name, self.tensors.iter().map(|tensor| tensor.name.as_str()));
            Error::Missing { name: name.to_owned(), path: self.path.clone(), near }
        })?;
        let (file, start, len) = self.ranges[n];
        TensorData::new(&self.tensors[n], &self.files[file][start..start + len])
    }
}

impl Tensors for Safetensors {
    fn path(&self) -> &Path {
        Safetensors::path(self)
    }

    fn tensors(&self) -> &[TensorInfo] {
        Safetensors::tensors(self)
    }

    fn contains(&self, name: &str) -> bool {
        Safetensors::contains(self, name)
    }

    fn tensor(&self, name: &str) -> Result<TensorData<'_>, Error> {
        Safetensors::tensor(self, name)
    }
}

fn storage(dtype: Dtype) -> Storage {
    match dtype {
        Dtype::F32 => Storage::F32,
        Dtype::F16 => Storage::F16,
        Dtype::BF16 => Storage::BF16,
        Dtype::BOOL => Storage::Other("BOOL"),
        Dtype::U8 => Storage::Other("U8"),
        Dtype::I8 => Storage::Other("I8"),
        Dtype::U16 => Storage::Other("U16"),
        Dtype::I16 => Storage::Other("I16"),
        Dtype::U32 => Storage::Other("U32"),
        Dtype::I32 => Storage::Other("I32"),
        Dtype::U64 => Storage::Other("U64"),
        Dtype::I64 => Storage::Other("I64"),
        Dtype::F64 => Storage::Other("F64"),
        Dtype::F8_E4M3 => Storage::Other("F8_E4M3"),
        Dtype::F8_E5M2 => Storage::Other("F8_E5M2"),
        _ => Storage::Other("a type of few bits"),
    }
}
