//! The transport of bytes between ranks. The trait [`Wire`] has two implementations, and the
//! courier is a separate thread that serves a wire.

mod courier;
#[cfg(feature = "mpi")]
mod over_mpi;
mod threads;

pub(crate) use courier::Courier;
#[cfg(feature = "mpi")]
pub use over_mpi::{MpiWire, give_up};
pub use threads::ThreadWire;

/// A message that is sent or received completely, with its memory.
#[derive(Debug)]
pub struct Done {
    /// The id that the message was started with.
    pub id: u64,
    /// The bytes that were received or sent.
    pub bytes: Vec<u8>,
}

/// Moves bytes between ranks. Implement it to use a transport other than MPI or threads.
///
/// Messages of one tag from one rank to another must arrive in the order in which they were sent.
/// A single thread uses a wire: the courier's, not the thread that creates the wire.
pub trait Wire: Send + 'static {
    /// This rank's number.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn ranks(&self) -> usize;

    /// Starts to send a message.
    ///
    /// # Errors
    /// The transport failed; the text is the reason.
    fn send(&mut self, id: u64, to: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String>;

    /// Starts to receive a message of the length of `bytes`.
    ///
    /// # Errors
    /// The transport failed; the text is the reason.
    fn receive(&mut self, id: u64, from: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String>;

    /// Makes progress on all messages without waiting, and adds completed messages to `done`.
    ///
    /// # Errors
    /// The transport failed; the text is the reason.
    fn progress(&mut self, done: &mut Vec<Done>) -> Result<(), String>;

    /// Drops all messages in flight. No other call follows.
    fn close(&mut self);
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Tag {
    /// Signs of life.
    Control,
    /// The parameters of a call.
    Header,
    /// Keys and values that travel round the ring.
    Keys,
    /// Partial gradients of keys and values that travel round the ring.
    Gradients,
    /// Complete gradients of keys and values, sent to their owner.
    Home,
    /// Shares of heads or tokens, for Ulysses.
    Exchange,
    /// A timeline.
    Report,
}
