//! A cache on a device, compared with a plain model of it: a `Vec` of every token of each sequence.

mod bed;
mod model;
pub mod rotation;
#[cfg(not(target_arch = "wasm32"))]
mod rows;

pub use bed::{Ask, Bed};
pub use model::{Count, Data, Kind, Sequence};
#[cfg(not(target_arch = "wasm32"))]
pub use rows::Places;
