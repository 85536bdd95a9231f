//! GGUF, llama.cpp's file format: metadata, a table of tensors, the tensors' bytes.
//!
//! Layout: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Existing crates do not
//! compare every length with the file's, or do not map the file; this reader does both.

mod reader;
mod value;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use self::reader::Reader;
pub use self::value::{Array, Value};
use crate::Tensors;
use crate::error::Error;
use crate::mapped::Mapped;
use crate::storage::Storage;
use crate::tensor::{TensorData, TensorInfo, nearest};

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// GGML's maximum.
const MOST_DIMENSIONS: u32 = 4;
/// Bytes of the smallest entry of the metadata, and of the table of tensors. With them, the
/// reader rejects a count that is too large before it allocates memory.
const SMALLEST_ENTRY: u64 = 8 + 4 + 1;
const SMALLEST_TENSOR: u64 = 8 + 4 + 8 + 4 + 8;

/// An open GGUF file, version 2 or 3, little-endian.
///
/// ```no_run
/// use wgpu_attention_models::Gguf;
/// let file = Gguf::open("model-q8_0.gguf")?;
/// let layers = file.u64("llama.block_count")?;
/// let query = file.tensor("blk.0.attn_q.weight")?;
/// println!("{layers} layers, queries {:?} in {}", query.shape(), query.storage());
/// # Ok::<(), wgpu_attention_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Gguf {
    file: Mapped,
    metadata: BTreeMap<String, Value>,
    tensors: Vec<TensorInfo>,
    /// First byte and length in the file; `None` for unsupported types.
    ranges: Vec<Option<(usize, usize)>>,
    by_name: HashMap<String, usize>,
}

impl Gguf {
    /// Maps the file and reads its metadata and its table of tensors. The file must not change
    /// while it is open.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Malformed`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::parse(Mapped::open(path.as_ref())?)
    }

    /// Parses a file's bytes in memory; errors use `name` as its path.
    ///
    /// # Errors
    /// [`Error::Malformed`].
    pub fn from_bytes(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Result<Self, Error> {
        Self::parse(Mapped::owned(name, bytes))
    }

    fn parse(file: Mapped) -> Result<Self, Error> {
        let read = read(&file);
        let (metadata, tensors, ranges) =
            read.map_err(|what| Error::Malformed { path: file.path.clone(), format: "GGUF", what })?;
        let by_name = tensors.iter().enumerate().map(|(n, tensor)| (tensor.name.clone(), n)).collect();
        Ok(Gguf { file, metadata, tensors, ranges, by_name })
    }

    /// The value of a metadata key, if the file has the key.
    pub fn metadata(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// All metadata, by key.
    pub fn all_metadata(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.metadata.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// A whole number of any width that is not negative.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn u64(&self, key: &str) -> Result<u64, Error> {
        self.typed(key, "whole number", Value::as_u64)
    }

    /// A float of either width.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn f64(&self, key: &str) -> Result<f64, Error> {
        self.typed(key, "float", Value::as_f64)
    }

    /// A boolean.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn bool(&self, key: &str) -> Result<bool, Error> {
        self.typed(key, "boolean", Value::as_bool)
    }

    /// A string.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn str(&self, key: &str) -> Result<&str, Error> {
        self.typed(key, "string", Value::as_str)
    }

    /// An array of strings: a vocabulary's tokens.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn strings(&self, key: &str) -> Result<&[String], Error> {
        self.typed(key, "array of strings", Value::as_strings)
    }

    /// An array.
    ///
    /// # Errors
    /// [`Error::Metadata`].
    pub fn array(&self, key: &str) -> Result<&Array, Error> {
        self.typed(key, "array", Value::as_array)
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        get: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, Error> {
        let value = self.metadata.get(key);
        value.and_then(get).ok_or_else(|| Error::Metadata {
            path: self.file.path.clone(),
            key: key.to_owned(),
            expected,
            found: value.map(Value::type_name),
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Names, shapes and types of all tensors, in the file's order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// True if the file has a tensor of this name.
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
            Error::Missing { name: name.to_owned(), path: self.file.path.clone(), near }
        })?;
        // Unsupported types have no range.
        let (start, len) = self.ranges[n].unwrap_or_default();
        TensorData::new(&self.tensors[n], &self.file[start..start + len])
    }
}

impl Tensors for Gguf {
    fn path(&self) -> &Path {
        Gguf::path(self)
    }

    fn tensors(&self) -> &[TensorInfo] {
        Gguf::tensors(self)
    }

    fn contains(&self, name: &str) -> bool {
        Gguf::contains(self, name)
    }

    fn tensor(&self, name: &str) -> Result<TensorData<'_>, Error> {
        Gguf::tensor(self, name)
    }
}

type Read = (BTreeMap<String, Value>, Vec<TensorInfo>, Vec<Option<(usize, usize)>>);

/// Reads everything except the tensors' bytes; the error describes the fault.
fn read(bytes: &[u8]) -> Result<Read, String> {
    if bytes.get(..4) != Some(MAGIC) {
        return Err("it does not begin with `GGUF`".into());
    }
    let mut reader = Reader::new(bytes, 4);
    let version = reader.u32("the version")?;
    if version.swap_bytes() < 16 {
        return Err("it is big-endian, but only little-endian files are supported".into());
    }
    if !(2..=3).contains(&version) {
        return Err(format!("it has version {version}, but only 2 and 3 are supported"));
    }
    let tensor_count = reader.count("the number of tensors", SMALLEST_TENSOR)?;
    let entries = reader.count("the number of metadata entries", SMALLEST_ENTRY)?;

    let mut metadata = BTreeMap::new();
    for n in 0..entries {
        let key = reader.string(&format!("key {n} of the metadata"))?;
        let value = Value::read(&mut reader, &key)?;
        if metadata.contains_key(&key) {
            return Err(format!("the metadata has `{key}` twice"));
        }
        metadata.insert(key, value);
    }
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(value) => value
            .as_u64()
            .filter(|a| a.is_power_of_two() && *a <= 1 << 20)
            .ok_or("`general.alignment` must be a power of two up to 2^20")?,
    };

    let mut tensors = Vec::new();
    let mut offsets = Vec::new();
    let mut names = std::collections::HashSet::new();
    for n in 0..tensor_count {
        let name = reader.string(&format!("the name of tensor {n}"))?;
        if !names.insert(name.clone()) {
            return Err(format!("two tensors have the name `{name}`"));
        }
        let dimensions = reader.u32(&name)?;
        if dimensions > MOST_DIMENSIONS {
            return Err(format!(
                "`{name}` has {dimensions} dimensions, but at most {MOST_DIMENSIONS} are supported"
            ));
        }
        // The file stores the innermost dimension first.
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let size = reader.u64(&name)?;
            shape.push(usize::try_from(size).map_err(|_| format!("`{name}` has a dimension of {size}"))?);
        }
        shape.reverse();
        let storage = storage(reader.u32(&name)?);
        offsets.push(reader.u64(&name)?);
        tensors.push(TensorInfo { name, shape, storage });
    }

    // A file without tensors may end without the padding.
    let data = (reader.at() as u64).next_multiple_of(alignment);
    let ranges = tensors.iter().zip(offsets).map(|(tensor, offset)| {
        let TensorInfo { name, shape, storage } = tensor;
        if !offset.is_multiple_of(alignment) {
            return Err(format!("`{name}` begins at byte {offset}, which is not a multiple of {alignment}"));
        }
        if storage.block().is_none() {
            return Ok(None);
        }
        let len = storage.bytes(shape).ok_or_else(|| {
            format!("`{name}` has a shape {shape:?} that {storage} cannot have or that no memory holds")
        })?;
        let end = data.checked_add(offset).and_then(|start| start.checked_add(len as u64));
        if end.is_none_or(|end| end > bytes.len() as u64) {
            return Err(format!(
                "`{name}` needs {len} bytes from byte {offset} of the tensors, which begin at byte {data}; the file has {}",
                bytes.len()
            ));
        }
        Ok(Some(((data + offset) as usize, len)))
    });
    let ranges = ranges.collect::<Result<_, _>>()?;
    Ok((metadata, tensors, ranges))
}

/// GGML's types by their numbers, including types that GGML has removed.
fn storage(id: u32) -> Storage {
    const NAMES: [&str; 40] = [
        "F32",
        "F16",
        "Q4_0",
        "Q4_1",
        "Q4_2",
        "Q4_3",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q8_1",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "Q8_K",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ3_XXS",
        "IQ1_S",
        "IQ4_NL",
        "IQ3_S",
        "IQ2_S",
        "IQ4_XS",
        "I8",
        "I16",
        "I32",
        "I64",
        "F64",
        "IQ1_M",
        "BF16",
        "Q4_0_4_4",
        "Q4_0_4_8",
        "Q4_0_8_8",
        "TQ1_0",
        "TQ2_0",
        "IQ4_NL_4_4",
        "IQ4_NL_4_8",
        "IQ4_NL_8_8",
        "MXFP4",
    ];
    match id {
        0 => Storage::F32,
        1 => Storage::F16,
        2 => Storage::Q4_0,
        3 => Storage::Q4_1,
        8 => Storage::Q8_0,
        30 => Storage::BF16,
        other => Storage::Other(NAMES.get(other as usize).copied().unwrap_or("an unknown type")),
    }
}
