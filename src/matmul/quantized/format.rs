//! Storage formats of quantised matrices.

use crate::tensor::Error;

/// The storage format of a matrix's weights: blocks of 32 weights along a row, as in ggml and GGUF
/// files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuantizedFormat {
    /// 20 bytes: `d` and `m` in f16, then 16 bytes. The lower four bits of byte `j` are weight `j`,
    /// the upper four bits weight `j + 16`. A weight is `d · q + m`, with q from 0 to 15.
    Q4_1,
    /// 34 bytes: `d` in f16, then 32 signed bytes. A weight is `d · q`.
    Q8_0,
}

impl QuantizedFormat {
    /// All formats.
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

    /// Returns the bytes of a row of `weights` weights.
    ///
    /// # Errors
    /// `weights` is 0, or not a multiple of a block.
    pub fn row_bytes(self, weights: usize) -> Result<usize, Error> {
        if weights == 0 {
            return Err(Error::ZeroSize { tensor: "weight", axis: "in (columns)" });
        }
        if !weights.is_multiple_of(Self::BLOCK) {
            let (what, by) = ("the row length of a quantised matrix", "the weights of a block");
            return Err(Error::NotDivisible { what, value: weights, by, divisor: Self::BLOCK });
        }
        Ok((weights / Self::BLOCK).saturating_mul(self.block_bytes()))
    }
}
