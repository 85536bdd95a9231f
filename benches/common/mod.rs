//! What benches share. Each uses a part of it.
#![allow(dead_code)]

pub mod bed;
pub mod ceilings;
pub mod copy;
pub mod device;
pub mod kernel;
pub mod layer;
pub mod problem;
pub mod product;
pub mod rows;
pub mod settings;
pub mod share;
pub mod timer;
