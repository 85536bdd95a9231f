//! Code that tests, benches and tools share.

pub mod allocations;
pub mod wgsl;
