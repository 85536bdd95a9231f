//! A tensor as a file stores it, and its numbers.

use half::{bf16, f16};

use crate::error::Error;
use crate::storage::Storage;

/// A tensor's entry in a file's table: name, shape and type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The tensor's name in the file.
    pub name: String,
    /// The dimensions, the outermost first: `[out_features, in_features]` for a linear layer.
    pub shape: Vec<usize>,
    /// The number format of the elements.
    pub storage: Storage,
}

/// A tensor's bytes as stored: dense, the last dimension contiguous, with no guaranteed alignment.
#[derive(Clone, Copy, Debug)]
pub struct TensorData<'a> {
    pub(crate) name: &'a str,
    pub(crate) shape: &'a [usize],
    pub(crate) storage: Storage,
    pub(crate) bytes: &'a [u8],
}

impl<'a> TensorData<'a> {
    /// The caller guarantees that the length of `bytes` matches `info`.
    pub(crate) fn new(info: &'a TensorInfo, bytes: &'a [u8]) -> Result<Self, Error> {
        let TensorInfo { name, shape, storage } = info;
        if storage.block().is_none() {
            return Err(Error::Type {
                name: name.clone(),
                got: *storage,
                needed_for: "reading it",
                expected: "F32, F16, BF16, Q8_0, Q4_0 or Q4_1",
            });
        }
        Ok(TensorData { name, shape, storage: *storage, bytes })
    }

    /// The tensor's name in the file.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The dimensions, the outermost first.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// The number format of the elements.
    pub fn storage(&self) -> Storage {
        self.storage
    }

    /// The elements' bytes, little-endian.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The number of elements in the tensor's shape.
    pub fn count(&self) -> usize {
        // The file's reader has checked that the product does not overflow.
        self.shape.iter().product()
    }

    /// The number of elements in `bytes`. A chunk has fewer than the shape.
    fn elements(&self) -> usize {
        self.storage.block().map_or(0, |(elements, bytes)| self.bytes.len() / bytes * elements)
    }

    /// Returns an error if the shape is not `expected`.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn expect_shape(self, expected: &[usize]) -> Result<Self, Error> {
        if self.shape == expected {
            return Ok(self);
        }
        Err(self.wrong_shape(format!("{expected:?}")))
    }

    pub(crate) fn wrong_shape(&self, expected: String) -> Error {
        Error::Shape { name: self.name.to_owned(), got: self.shape.to_vec(), expected }
    }

    /// Splits the tensor into chunks of `elements`, which must be a multiple of the block size.
    pub(crate) fn pieces(self, elements: usize) -> impl Iterator<Item = TensorData<'a>> {
        // A tensor of an unsupported type has no bytes.
        let (block, bytes) = self.storage.block().unwrap_or((1, 1));
        self.bytes.chunks(elements / block * bytes).map(move |bytes| TensorData { bytes, ..self })
    }

    /// The slice at `index` of the outermost dimension: a row of a matrix, a token of an embedding
    /// table.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is no such slice, or if the slice does not consist of whole
    /// blocks.
    pub fn at(self, index: usize) -> Result<Self, Error> {
        let none = || self.wrong_shape(format!("a part {index} along the first dimension, in whole blocks"));
        let (outer, shape) = self.shape.split_first().ok_or_else(none)?;
        let bytes = self.storage.bytes(shape).ok_or_else(none)?;
        if index >= *outer {
            return Err(none());
        }
        let start = index.checked_mul(bytes).ok_or_else(none)?;
        let bytes = self.bytes.get(start..).and_then(|rest| rest.get(..bytes)).ok_or_else(none)?;
        Ok(TensorData { shape, bytes, ..self })
    }

    /// The elements as f32. F32, F16 and BF16 convert exactly. Q8_0, Q4_0 and Q4_1 round the
    /// product, and Q4_1 also rounds the sum.
    #[doc(alias = "dequantize")]
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.elements());
        match self.storage {
            Storage::F32 => values.extend(chunks(self.bytes).map(f32::from_le_bytes)),
            Storage::F16 => values.extend(chunks(self.bytes).map(|b| f16::from_le_bytes(b).to_f32())),
            Storage::BF16 => values.extend(chunks(self.bytes).map(|b| bf16::from_le_bytes(b).to_f32())),
            Storage::Q8_0 => {
                for [d0, d1, quants @ ..] in chunks::<34>(self.bytes) {
                    let d = f16::from_le_bytes([d0, d1]).to_f32();
                    values.extend(quants.map(|q| d * f32::from(q.cast_signed())));
                }
            }
            Storage::Q4_0 => {
                for [d0, d1, quants @ ..] in chunks::<18>(self.bytes) {
                    let d = f16::from_le_bytes([d0, d1]).to_f32();
                    values.extend(halves(quants).map(|q| d * (f32::from(q) - 8.0)));
                }
            }
            Storage::Q4_1 => {
                for [d0, d1, m0, m1, quants @ ..] in chunks::<20>(self.bytes) {
                    let (d, m) =
                        (f16::from_le_bytes([d0, d1]).to_f32(), f16::from_le_bytes([m0, m1]).to_f32());
                    values.extend(halves(quants).map(|q| d * f32::from(q) + m));
                }
            }
            // Readers return no bytes of unsupported types.
            Storage::Other(_) => {}
        }
        values
    }
}

fn chunks<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks().0.iter().copied()
}

/// The lower four bits of all bytes, then the upper four bits.
fn halves(bytes: [u8; 16]) -> impl Iterator<Item = u8> {
    bytes.into_iter().map(|b| b & 15).chain(bytes.into_iter().map(|b| b >> 4))
}

/// Returns the name that shares most bytes with `wanted` at both ends, if these are more than
/// half of `wanted`.
pub(crate) fn nearest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Option<String> {
    let shared = |name: &str| {
        let head = wanted.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
        let tail = wanted.bytes().rev().zip(name.bytes().rev()).take_while(|(a, b)| a == b).count();
        head + tail
    };
    // On a tie, take the first by name, so that the message does not depend on a map's order.
    let best = names.max_by(|a, b| shared(a).cmp(&shared(b)).then(b.cmp(a)))?;
    (2 * shared(best) > wanted.len()).then(|| best.to_owned())
}
