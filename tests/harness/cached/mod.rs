//! A cache on a device beside a plain model of it: every token that each sequence was given, in a
//! `Vec`.

mod bed;
mod model;
pub mod rotation;
#[cfg(not(target_arch = "wasm32"))]
mod rows;

pub use bed::{Ask, Bed};
pub use model::{Count, Data, Kind, Sequence};
#[cfg(not(target_arch = "wasm32"))]
pub use rows::Places;
