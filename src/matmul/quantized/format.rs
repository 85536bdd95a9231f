//! How quantised matrices are stored.

use crate::tensor::Error;

/// How the weights of a matrix are stored, in blocks of 32 along a row, as ggml has them and GGUF
/// files hold them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuantizedFormat {
    /// 20 bytes: `d` and `m` in f16, 16 bytes; the lower half of byte `j` is weight `j`, the upper
    /// half weight `j + 16`. A weight is `d · q + m`, q from 0 to 15.
    Q4_1,
    /// 34 bytes: `d` in f16, 32 signed bytes. A weight is `d · q`.
    Q8_0,
}

impl QuantizedFormat {
    /// Every format.
    pub const ALL: [QuantizedFormat; 2] = [QuantizedFormat::Q4_1, QuantizedFormat::Q8_0];

    /// Weights of a block.
    pub const BLOCK: usize = 32;

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            QuantizedFormat::Q4_1 => 20,
            QuantizedFormat::Q8_0 => 34,
        }
    }

    /// Bytes of a row of so many weights.
    ///
    /// # Errors
    /// No weights, or not whole blocks of them.
    pub fn row_bytes(self, weights: usize) -> Result<usize, Error> {
        if weights == 0 {
            return Err(Error::ZeroSize { tensor: "weight", axis: "in (columns)" });
        }
        if !weights.is_multiple_of(Self::BLOCK) {
            let (what, by) = ("a quantised row of", "the weights of a block,");
            return Err(Error::NotDivisible { what, value: weights, by, divisor: Self::BLOCK });
        }
        Ok((weights / Self::BLOCK).saturating_mul(self.block_bytes()))
    }
}
