//! By how many tokens sequences move.

use super::CacheConfig;
use super::dispatch::Moves;
use super::kernels::cache_advance::Counts;
use super::sequences::Move;
use crate::device::DeviceFacts;
use crate::tensor::{CallTensors, DType, Error, TensorView};

/// By how many tokens each sequence moves.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Tokens<'a> {
    /// All by as many.
    All(usize),
    /// Each by its own number, one per sequence. New numbers are uploaded each time.
    Each(&'a [usize]),
    /// By numbers in device memory, U32 `[batch, 1, 1, 1]`, of which none counts for more than
    /// `most`: what an application knows only there, as how many drafts were accepted. A sequence
    /// without room for its rows gets none of them.
    Device {
        /// The numbers.
        counts: TensorView<'a>,
        /// Bound on each.
        most: usize,
    },
}

impl<'a> Tokens<'a> {
    /// The largest number there may be.
    pub(crate) fn most(&self) -> usize {
        match self {
            Tokens::All(n) => *n,
            Tokens::Each(counts) => counts.iter().copied().max().unwrap_or(0),
            Tokens::Device { most, .. } => *most,
        }
    }

    /// Bounds on the number of a sequence.
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

    /// Refuses moves by nothing, a bound that no sequence reaches, and numbers other than one for
    /// each sequence.
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
            let expected = "at most what a sequence may have";
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

    /// As the kernel that moves lengths takes them.
    pub(super) fn moves(&self, back: bool) -> Moves<'a> {
        let (counts, given) = match self {
            Tokens::All(_) => (Counts::All, None),
            Tokens::Each(_) => (Counts::Each, None),
            Tokens::Device { counts, .. } => (Counts::Device, Some(*counts)),
        };
        Moves { counts, given, most: self.most(), back }
    }
}
