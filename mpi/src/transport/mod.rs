//! What moves bytes between ranks: a [`Wire`], of which there are two, and the courier that serves
//! it in a thread of its own.

mod courier;
#[cfg(feature = "mpi")]
mod over_mpi;
mod threads;

pub(crate) use courier::Courier;
#[cfg(feature = "mpi")]
pub use over_mpi::{MpiWire, give_up};
pub use threads::ThreadWire;

/// A message that has ended, with the memory that it was in.
#[derive(Debug)]
pub struct Done {
    /// As it was begun with.
    pub id: u64,
    /// What came, or what was sent.
    pub bytes: Vec<u8>,
}

/// Moves bytes between ranks. Messages of one tag from one rank to another arrive in the order in
/// which they were sent. One thread uses it, not the one that made it.
pub trait Wire: Send + 'static {
    /// This rank.
    fn rank(&self) -> usize;

    /// How many there are.
    fn ranks(&self) -> usize;

    /// Begins to send.
    ///
    /// # Errors
    /// In words.
    fn send(&mut self, id: u64, to: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String>;

    /// Begins to receive a message that is as long as `bytes`.
    ///
    /// # Errors
    /// In words.
    fn receive(&mut self, id: u64, from: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String>;

    /// Moves messages on, without waiting, and adds to `done` what has ended.
    ///
    /// # Errors
    /// In words.
    fn progress(&mut self, done: &mut Vec<Done>) -> Result<(), String>;

    /// Nothing follows: drops what was begun.
    fn close(&mut self);
}

/// What messages are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Tag {
    /// Signs of life.
    Control,
    /// What a call is.
    Header,
    /// Keys and values on their way.
    Keys,
    /// Gradients of keys and values on their way.
    Gradients,
    /// The same, complete.
    Home,
    /// Shares of heads for shares of tokens.
    Exchange,
    /// What was measured.
    Report,
}
