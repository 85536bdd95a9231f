//! Messages of the driver's validation while tests run. With `WGPU_VALIDATION=1` wgpu turns on the
//! Khronos validation layer, or OpenGL's debug output, and logs the messages.

use std::cell::{Cell, RefCell};
use std::sync::{LazyLock, Once};

/// Messages that are not a fault of this crate: parts of their text, and the reason for the
/// exception.
const EXPLAINED: [(&[&str], &str); 2] = [
    (
        &["VUID-RuntimeSpirv-OpTypeCooperativeMatrixKHR-10163", "rows: 16, cols: 16", "[0] MSize = 8"],
        OTHER_FRAGMENTS,
    ),
    (
        &["VUID-RuntimeSpirv-OpCooperativeMatrixMulAddKHR-10060", "rows: 16, cols: 16", "[0] MSize = 8"],
        OTHER_FRAGMENTS,
    ),
];
const OTHER_FRAGMENTS: &str =
    "lavapipe lists fragments of 8 × 8 alone and computes those of 16 × 16 too, which tests use on purpose";

thread_local! {
    static MESSAGES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static WANTED: Cell<bool> = const { Cell::new(false) };
}

/// True if the driver's validation is on.
pub fn on() -> bool {
    static ON: LazyLock<bool> = LazyLock::new(|| {
        // wgpu reads the environment in the same way.
        wgpu::InstanceFlags::empty().with_env().contains(wgpu::InstanceFlags::VALIDATION)
    });
    *ON
}

/// Starts to collect messages if the validation is on. Call it before wgpu makes an instance, which
/// reads the log level.
pub fn listen() {
    if on() && log::set_logger(&Listener).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
}

/// Returns an error with the messages of this thread since the last call.
pub fn check() -> Result<(), String> {
    let messages = MESSAGES.take();
    if messages.is_empty() { Ok(()) } else { Err(format!("validation: {}", messages.join("\n"))) }
}

/// Returns the messages that `what` provokes on purpose.
pub fn provoked(what: impl FnOnce()) -> Vec<String> {
    let before = MESSAGES.take();
    WANTED.set(true);
    what();
    WANTED.set(false);
    MESSAGES.replace(before)
}

struct Listener;

impl log::Log for Listener {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() <= log::Level::Warn && metadata.target().starts_with("wgpu_hal")
    }

    fn log(&self, record: &log::Record) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let message = record.args().to_string();
        // The lines after a message name the affected objects.
        if message.starts_with('\t') {
            return;
        }
        if let Some(n) =
            EXPLAINED.iter().position(|(words, _)| words.iter().all(|word| message.contains(word)))
        {
            static SAID: [Once; EXPLAINED.len()] = [const { Once::new() }; EXPLAINED.len()];
            let (words, why) = EXPLAINED[n];
            SAID[n].call_once(|| super::say(&format!("validation: {} is let through: {why}", words[0])));
            return;
        }
        if !WANTED.get() {
            // Reports messages of threads and tests that read nothing back.
            let thread = std::thread::current();
            super::say(&format!(
                "unexplained validation message in {}: {message}",
                thread.name().unwrap_or("?")
            ));
        }
        MESSAGES.with_borrow_mut(|messages| messages.push(message));
    }

    fn flush(&self) {}
}
