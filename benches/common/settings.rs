//! Settings of a bench.

use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(target_arch = "wasm32"))]
use std::time::Duration;

#[cfg(not(target_arch = "wasm32"))]
use criterion::Criterion;

static QUICK: AtomicBool = AtomicBool::new(false);

/// Sets `--quick` on targets without a command line.
pub fn be_quick() {
    QUICK.store(true, Ordering::Relaxed);
}

/// True if a bench only has to show that it works: with `--quick` or `WGPU_ATTENTION_BENCH_QUICK`.
pub fn quick() -> bool {
    QUICK.load(Ordering::Relaxed)
        || std::env::args().any(|argument| argument == "--quick")
        || std::env::var_os("WGPU_ATTENTION_BENCH_QUICK").is_some_and(|value| value != "0")
}

/// True if the bench uses a Vulkan device without robust access: with `WGPU_ATTENTION_UNCHECKED`.
pub fn unchecked() -> bool {
    cfg!(any(windows, target_os = "linux"))
        && std::env::var_os("WGPU_ATTENTION_UNCHECKED").is_some_and(|value| value != "0")
}

/// Returns the argument after `key` on the command line.
pub fn argument(key: &str) -> Option<String> {
    std::env::args().skip_while(|argument| argument != key).nth(1)
}

/// Returns criterion, configured for passes that take milliseconds.
#[cfg(not(target_arch = "wasm32"))]
pub fn criterion() -> Criterion {
    let (samples, warm_up, measurement) = if quick() { (10, 1, 50) } else { (20, 500, 2000) };
    let criterion = Criterion::default()
        .without_plots()
        .sample_size(samples)
        .warm_up_time(Duration::from_millis(warm_up))
        .measurement_time(Duration::from_millis(measurement));
    // A program that was started by hand has no target folder for its records.
    if ["CRITERION_HOME", "CARGO_TARGET_DIR", "CARGO"].iter().any(|name| std::env::var_os(name).is_some()) {
        return criterion;
    }
    criterion.output_directory(&std::env::temp_dir().join("wgpu-attention-criterion"))
}
