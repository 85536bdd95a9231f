//! Everything that can go wrong, on this rank or on another.

/// Why a call has failed. Whatever concerns all ranks reaches all of them, with the rank at fault.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// Fewer tokens than pieces.
    #[error("a sequence of {length} tokens cannot be split into {pieces} parts; use fewer ranks")]
    TooShort {
        /// Tokens of the sequence.
        length: usize,
        /// Pieces that the schedule needs.
        pieces: usize,
    },
    /// Documents that do not cover the sequence.
    #[error("the starts of documents must ascend from 0 to {length}, the length of the sequence")]
    Documents {
        /// Tokens of the sequence.
        length: usize,
    },
    /// A rank was called with something else than rank 0.
    #[error(
        "rank {rank}: {what} is {got}, but on rank 0 it is {expected}; all ranks must make the same call"
    )]
    Mismatch {
        /// The rank that differs.
        rank: usize,
        /// In what.
        what: &'static str,
        /// Rank 0's.
        expected: String,
        /// The rank's.
        got: String,
    },
    /// A rank refused its own arguments, and so nobody has begun.
    #[error("rank {rank}: {reason}")]
    Refused {
        /// Which rank.
        rank: usize,
        /// Why.
        reason: String,
    },
    /// A rank is not heard of any more.
    #[error("rank {rank}: no message for {seconds:.1} s; the process or its machine has failed")]
    Lost {
        /// Which rank.
        rank: usize,
        /// How long.
        seconds: f32,
    },
    /// A rank has gone in order, while it was still needed.
    #[error("rank {rank}: it has ended, but this rank waits for it")]
    Left {
        /// Which rank.
        rank: usize,
    },
    /// A rank had an error in the middle of a call and told the others.
    #[error("rank {rank} has stopped: {reason}")]
    GaveUp {
        /// Which rank.
        rank: usize,
        /// Why.
        reason: String,
    },
    /// The MPI was initialised without what is needed.
    #[error(
        "rank {rank}: MPI was initialised with thread support {got}, but `MPI_THREAD_MULTIPLE` is needed; \
         call `mpi::initialize_with_threading(Threading::Multiple)`"
    )]
    Threads {
        /// The rank that has less.
        rank: usize,
        /// What it has.
        got: String,
    },
    /// The transport failed.
    #[error("rank {rank}: the transport failed: {reason}")]
    Transport {
        /// At which rank, or towards which.
        rank: usize,
        /// Why.
        reason: String,
    },
    /// What the device, or the library, has refused.
    #[error("{0}")]
    Device(String),
}

impl From<wgpu_attention::Error> for Error {
    fn from(error: wgpu_attention::Error) -> Self {
        Error::Device(error.to_string())
    }
}
