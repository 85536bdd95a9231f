//! The shape of a projection's weight.

use crate::tensor::Error;

/// The shape of one projection: `features → heads × dim`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SideShape {
    pub heads: usize,
    pub dim: usize,
    pub features: usize,
    pub narrow: bool,
}

impl SideShape {
    /// Features that one head reads.
    pub fn read(&self) -> usize {
        if self.narrow { self.features / self.heads } else { self.features }
    }

    /// Refuses widths that are not a multiple of the heads of a narrow projection.
    pub fn check(&self, what: &'static str) -> Result<(), Error> {
        if self.narrow && !self.features.is_multiple_of(self.heads) {
            let SideShape { heads: divisor, features: value, .. } = *self;
            return Err(Error::NotDivisible { what, value, by: "heads", divisor });
        }
        Ok(())
    }

    /// `[1, heads, dim, read]` if narrow, `[1, 1, heads · dim, features]` otherwise.
    pub fn weight(&self) -> [usize; 4] {
        if self.narrow {
            [1, self.heads, self.dim, self.read()]
        } else {
            [1, 1, self.heads.saturating_mul(self.dim), self.features]
        }
    }
}
