//! Code that the benches share. On wasm32 it has only the parts that the doctor uses, which do not
//! block.

#[cfg(not(target_arch = "wasm32"))]
pub mod bed;
pub mod ceilings;
pub mod copy;
pub mod device;
pub mod doctor;
#[cfg(not(target_arch = "wasm32"))]
pub mod gradients;
pub mod kernel;
#[cfg(not(target_arch = "wasm32"))]
pub mod layer;
pub mod problem;
#[cfg(not(target_arch = "wasm32"))]
pub mod product;
pub mod rows;
pub mod settings;
pub mod share;
pub mod timer;
#[cfg(not(target_arch = "wasm32"))]
pub mod tuning;
