//! The errors of this crate, on this rank or on another.

/// The reason why a call failed. An error that concerns all ranks reaches all of them, with the
/// number of the rank at fault.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// The sequence has fewer tokens than the schedule has chunks.
    #[error("a sequence of {length} tokens cannot be split into {pieces} parts; use fewer ranks")]
    TooShort {
        /// Tokens of the sequence.
        length: usize,
        /// Chunks that the schedule needs.
        pieces: usize,
    },
    /// The documents do not cover the sequence.
    #[error("the starts of documents must ascend from 0 to {length}, the length of the sequence")]
    Documents {
        /// Tokens of the sequence.
        length: usize,
    },
    /// A rank's call differs from rank 0's.
    #[error(
        "rank {rank}: {what} is {got}, but on rank 0 it is {expected}; all ranks must make the same call"
    )]
    Mismatch {
        /// The rank that differs.
        rank: usize,
        /// The argument that differs.
        what: &'static str,
        /// Rank 0's value.
        expected: String,
        /// The rank's value.
        got: String,
    },
    /// A rank's arguments are invalid, so no rank began the call.
    #[error("rank {rank}: {reason}")]
    Refused {
        /// The rank with the error.
        rank: usize,
        /// The error's message.
        reason: String,
    },
    /// A rank no longer sends signs of life.
    #[error("rank {rank}: no message for {seconds:.1} s; the process or its machine has failed")]
    Lost {
        /// The silent rank.
        rank: usize,
        /// Seconds since its last message.
        seconds: f32,
    },
    /// A rank ended normally while another rank still needed it.
    #[error("rank {rank}: it has ended, but this rank waits for it")]
    Left {
        /// The rank that ended.
        rank: usize,
    },
    /// A rank had an error during a call and reported it to the other ranks.
    #[error("rank {rank} has stopped: {reason}")]
    GaveUp {
        /// The rank with the error.
        rank: usize,
        /// The error's message.
        reason: String,
    },
    /// The application initialised MPI with too little thread support.
    #[error(
        "rank {rank}: MPI was initialised with thread support {got}, but `MPI_THREAD_MULTIPLE` is needed; \
         call `mpi::initialize_with_threading(Threading::Multiple)`"
    )]
    Threads {
        /// The rank with too little support.
        rank: usize,
        /// The rank's level of thread support.
        got: String,
    },
    /// The transport failed.
    #[error("rank {rank}: the transport failed: {reason}")]
    Transport {
        /// This rank, or the rank at the other end.
        rank: usize,
        /// The transport's message.
        reason: String,
    },
    /// The device or the library returned an error.
    #[error("{0}")]
    Device(String),
}

impl From<wgpu_attention::Error> for Error {
    fn from(error: wgpu_attention::Error) -> Self {
        Error::Device(error.to_string())
    }
}
