//! The share of a device's rates that a kernel reaches.

use std::fmt;

/// The units of a kernel's arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// f32 multiply-adds.
    Plain,
    /// Matrix units, with the fragments that are fastest.
    Matrix,
}

/// The least work of a kernel: its arithmetic, and each tensor moved once.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub flops: f64,
    pub bytes: f64,
}

/// A time, with the least times of arithmetic and memory, in ms.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    pub arithmetic: f64,
    pub memory: f64,
    pub ms: f64,
}

impl Share {
    /// Returns the larger floor.
    pub fn floor(&self) -> f64 {
        self.arithmetic.max(self.memory)
    }

    /// Returns the name of the larger floor.
    pub fn bound(&self) -> &'static str {
        if self.arithmetic >= self.memory { "arithmetic" } else { "memory" }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Share { arithmetic, memory, ms } = self;
        let (floor, percent) = (self.floor(), 100.0 * self.floor() / ms);
        write!(f, "{ms:.3} ms, {:.2} times the floor ({percent:.0} % of the ceiling); ", ms / floor)?;
        write!(f, "floors: arithmetic {arithmetic:.3} ms, memory {memory:.3} ms")
    }
}
