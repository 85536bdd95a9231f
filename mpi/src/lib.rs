//! Attention over sequences that do not fit one device, built on [`wgpu_attention`]. Start with
//! [`RingAttention`].
//!
//! Every rank holds a share of queries, keys and values in its device's buffers. The ranks
//! exchange keys and values, or heads, as messages over a [`Wire`]. A wire is an MPI (with the
//! feature `mpi`), or channels between threads of one process ([`ThreadWire`]). Most tests run on
//! threads.

#![warn(missing_docs)]

mod error;
mod header;
pub mod plan;
mod ring;
pub mod schedule;
mod staging;
pub mod timeline;
mod transport;

pub use error::Error;
pub use ring::{RingAttention, RingBackward, RingForward};
pub use schedule::{Schedule, SequenceMask, Shares};
pub use timeline::Timeline;
pub use transport::{Done, ThreadWire, Wire};
#[cfg(feature = "mpi")]
pub use transport::{MpiWire, give_up};
