//! Ring.
mod error;
pub mod schedule;
pub use error::Error;
pub use schedule::SequenceMask;
