//! The number of tokens by which sequences move.

use super::CacheConfig;
use super::dispatch::Moves;
use super::kernels::cache_advance::Counts;
use super::sequences::Move;
use crate::device::DeviceFacts;
use crate::tensor::{CallTensors, DType, Error, TensorView};

/// The number of tokens by which each sequence moves.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Tokens<'a> {
    /// The same number for all sequences.
    All(usize),
    /// A number for each sequence. The numbers are uploaded with each call.
    Each(&'a [usize]),
    /// Numbers in device memory, U32 `[batch, 1, 1, 1]`. Numbers above `most` count as `most`. Use
    /// it if only the device knows the numbers, as for accepted drafts. A sequence without room for
    /// all its rows gets no rows.
    Device {
        /// The tensor of the numbers.
        counts: TensorView<'a>,
        /// The upper bound of each number.
        most: usize,
    },
}

impl<'a> Tokens<'a> {
    /// The largest possible number.
    pub(crate) fn most(&self) -> usize {
        match self {
            Tokens::All(n) => *n,
            Tokens::Each(counts) => counts.iter().copied().max().unwrap_or(0),
            Tokens::Device { most, .. } => *most,
        }
    }

    /// The bounds of the number of a sequence.
    pub(super) fn of(&self, sequence: usize) -> Move {
        match self {
            Tokens::All(n) => Move { least: *n, most: *n },
            Tokens::Each(counts) => {
                let n = counts.get(sequence).copied().unwrap_or(0);
                Move { least: n, most: n }
            }
            Tokens::Device { most, .. } => Move { least: 0, most: *most },
        }
    }

    /// Refuses moves by zero tokens and a bound that no sequence reaches. It also refuses another
    /// number of entries than sequences.
    pub(super) fn check(
        &self,
        config: &CacheConfig,
        lengths: TensorView,
        device: &DeviceFacts,
    ) -> Result<(), Error> {
        if self.most() == 0 {
            return Err(Error::ZeroSize { tensor: "cache", axis: "rows" });
        }
        if let Tokens::Device { most, .. } = self
            && *most > config.longest()
        {
            let expected = "at most the largest length of a sequence";
            return Err(Error::Option { option: "most", value: *most as f64, expected });
        }
        match self {
            Tokens::Each(counts) if counts.len() != config.batch => {
                Err(Error::Length { tensor: "rows", expected: config.batch, got: counts.len() })
            }
            Tokens::Device { counts, .. } => {
                let mut tensors = CallTensors::new(device);
                tensors.read("counts", *counts, DType::U32, [config.batch, 1, 1, 1])?;
                tensors.write_checked([("cache", lengths)]);
                tensors.finish()
            }
            _ => Ok(()),
        }
    }

    /// Returns the arguments of the kernel that moves lengths.
    pub(super) fn moves(&self, back: bool) -> Moves<'a> {
        let (counts, given) = match self {
            Tokens::All(_) => (Counts::All, None),
            Tokens::Each(_) => (Counts::Each, None),
            Tokens::Device { counts, .. } => (Counts::Device, Some(*counts)),
        };
        Moves { counts, given, most: self.most(), back }
    }
}
