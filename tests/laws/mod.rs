//! Tests that concern all operators: errors, recording, numbers, memory, kernel texts, and the test
//! suite itself.

pub mod checks;
pub mod contract;
pub mod errors;
pub mod executor;
pub mod floors;
pub mod fxc;
pub mod gpu;
pub mod gradients;
pub mod guide;
pub mod harness_fails;
pub mod limits;
pub mod many_sequences;
pub mod meaning;
pub mod numbers;
pub mod property;
pub mod property_layers;
pub mod range_ends;
pub mod recording;
pub mod reports;
pub mod requirements;
pub mod threads;
pub mod tint;
pub mod tuning;
pub mod validation;
pub mod vectors_used;
