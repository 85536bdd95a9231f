//! The number formats of files.

use std::fmt;

/// The number format of a tensor's elements in a file.
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
    /// GGML's blocks of 32: a 16-bit float d, then 16 bytes. The lower four bits of the bytes are
    /// elements 0 to 15, the upper four bits are 16 to 31. An element is d · (q − 8).
    Q4_0,
    /// GGML's blocks of 32: 16-bit floats d and m, then 16 bytes as in [`Q4_0`](Self::Q4_0). An
    /// element is d · q + m.
    Q4_1,
    /// An unsupported type, with its name in the format. Its tensors are listed but not read.
    Other(&'static str),
}

impl Storage {
    /// Elements and bytes of a block. For a plain type, a block is one element. `None` for
    /// unsupported types.
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

    /// Bytes of dense rows of this `shape`, outermost dimension first.
    ///
    /// `None` if the type is unsupported or the innermost dimension is no multiple of a block.
    /// `None` also if the product overflows.
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
