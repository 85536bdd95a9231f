//! What all tests share: devices, data in memory, cases with their truth, runs and their judgement.
#![allow(dead_code)]

pub mod cached;
pub mod case;
pub mod device;
pub mod layer;
pub mod listed;
pub mod memory;
pub mod random;
pub mod run;
pub mod vectors;
pub mod wgsl;

pub use cached::{Ask, Bed, Count, Data, Kind};
pub use case::{Case, Drop, Expected, Judged, Part, Rules, Weights};
pub use device::{Profile, defaults, full, matrices, profiles};
pub use memory::{Image, Place, Values, stored};
pub use random::Rng;
pub use run::{Layout, Report, Setup, TILINGS, run};
pub use vectors::Vector;

/// To standard error itself: the test runner hides what passing tests print with `eprintln!`.
pub fn say(line: &str) {
    use std::io::Write;
    let _ = std::io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}
