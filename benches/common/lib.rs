//! What benches share.

pub mod bed;
pub mod ceilings;
pub mod copy;
pub mod device;
pub mod doctor;
pub mod kernel;
pub mod layer;
pub mod problem;
pub mod product;
pub mod rows;
pub mod settings;
pub mod share;
pub mod timer;
pub mod tuning;
