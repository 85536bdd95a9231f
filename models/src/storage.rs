//! How files store numbers.

use std::fmt;

/// How a file stores a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Storage {
    /// 32-bit float.
    F32,
    /// 16-bit float.
    F16,
    /// bfloat16.
    BF16,
    /// GGML's blocks of 32: a 16-bit float d, then 32 signed bytes q. An element is d · q.
    Q8_0,
    /// GGML's blocks of 32: a 16-bit float d, then 16 bytes, whose lower halves are elements 0 to
    /// 15 and whose upper halves are 16 to 31. An element is d · (q − 8).
    Q4_0,
    /// GGML's blocks of 32: 16-bit floats d and m, then 16 bytes as in [`Q4_0`](Self::Q4_0). An
    /// element is d · q + m.
    Q4_1,
    /// A type that is listed and not read, by the name that the format gives it.
    Other(&'static str),
}

impl Storage {
    /// Elements of a block and its bytes: 1 and its size for plain types, `None` for those that are
    /// not read.
    pub const fn block(self) -> Option<(usize, usize)> {
        match self {
            Storage::F32 => Some((1, 4)),
            Storage::F16 | Storage::BF16 => Some((1, 2)),
            Storage::Q8_0 => Some((32, 34)),
            Storage::Q4_0 => Some((32, 18)),
            Storage::Q4_1 => Some((32, 20)),
            Storage::Other(_) => None,
        }
    }

    /// Bytes of dense rows of this `shape`, outermost first. `None` where the type is not read,
    /// where the innermost dimension is no multiple of a block, or where the product exceeds what
    /// can be addressed.
    pub(crate) fn bytes(self, shape: &[usize]) -> Option<usize> {
        let (elements, bytes) = self.block()?;
        let inner = shape.last().copied().unwrap_or(1);
        if !inner.is_multiple_of(elements) {
            return None;
        }
        let count = shape.iter().try_fold(1usize, |count, n| count.checked_mul(*n))?;
        (count / elements).checked_mul(bytes)
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Storage::Other(name) => f.write_str(name),
            known => write!(f, "{known:?}"),
        }
    }
}
