//! Attention over sequences longer than one device, on [`wgpu_attention`]: every rank holds a share
//! of queries, keys and values in the buffers of its own device, and messages carry the rest. See
//! [`RingAttention`].
//!
//! Messages go over a [`Wire`]: an MPI (with the feature `mpi`), or channels between threads of one
//! process ([`ThreadWire`]), on which the tests of everything else run too.

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
