//! The code that all tests share: devices, data in memory, cases with expected results, runs and
//! their comparison.
#![allow(dead_code)]
#![cfg_attr(target_arch = "wasm32", allow(unused_imports))]

pub mod attentional;
pub mod backward;
pub mod cached;
pub mod case;
pub mod classify;
#[cfg_attr(target_arch = "wasm32", path = "../browser/device.rs")]
pub mod device;
pub mod faults;
pub mod gradients;
pub mod indexer;
pub mod layer;
pub mod layer_backward;
pub mod layer_options;
pub mod layer_weights;
pub mod linear;
pub mod linformer;
#[cfg(not(target_arch = "wasm32"))]
pub mod listed;
pub mod local;
pub mod lsh;
pub mod meaning;
pub mod memory;
pub mod merge;
pub mod mods;
pub mod native;
pub mod operator_setup;
pub mod placed_mods;
pub mod positions;
mod process;
pub mod profile;
pub mod random;
pub mod recurrent;
pub mod report;
pub mod rest;
pub mod rotary;
pub mod row_stages;
pub mod run;
pub mod selected;
pub mod stacks;
#[cfg(not(target_arch = "wasm32"))]
pub mod validation;
#[cfg(not(target_arch = "wasm32"))]
pub mod vectors;

#[cfg(not(target_arch = "wasm32"))]
pub use cached::Places;
pub use cached::{Ask, Bed, Count, Data, Kind};
pub use case::{Case, DropoutData, Expected, HostData, Judged, Rules, Weights};
pub use device::{Profile, defaults, full, matrices, profiles};
#[cfg(not(target_arch = "wasm32"))]
pub use device::{planned_by_name, with_registers};
pub use memory::{Image, Place, Values, stored};
pub use operator_setup::OperatorSetup;
pub use process::resident;
pub use random::Rng;
pub use report::Report;
pub use rest::{due, rest, runs_in_turn};
#[cfg(not(target_arch = "wasm32"))]
pub use run::run;
pub use run::{FORMS, Layout, Setup};
#[cfg(not(target_arch = "wasm32"))]
pub use vectors::Vector;

/// The float types that tensors may have.
pub const FLOATS: &[wgpu_attention::DType] =
    &[wgpu_attention::DType::F32, wgpu_attention::DType::F16, wgpu_attention::DType::BF16];

/// Writes to standard error directly, because the test runner hides the `eprintln!` of passing
/// tests.
pub fn say(line: &str) {
    use std::io::Write;
    let _ = std::io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// Ends a test that takes long on a software driver, unless its turn is in this run: see
/// [`rest`](mod@rest).
#[cfg(not(target_arch = "wasm32"))]
macro_rules! in_turn {
    () => {
        fn here() {}
        let name = std::any::type_name_of_val(&here).trim_end_matches("::here");
        if !$crate::harness::runs_in_turn(name) {
            return $crate::harness::say(&format!("{name}: in another share of WGPU_ATTENTION_TEST_ALL"));
        }
    };
}
#[cfg(not(target_arch = "wasm32"))]
pub(crate) use in_turn;

/// Returns the repository's folder. Cargo sets its path, at run time too. If you run this binary
/// without cargo, set `CARGO_MANIFEST_DIR`.
pub fn root() -> std::path::PathBuf {
    let tests = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    std::path::Path::new(&tests).join("..")
}
