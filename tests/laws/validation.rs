//! An active validation layer is really present, and its messages reach the harness.

#![cfg(any(windows, target_os = "linux"))]

use wgpu::hal::api::Vulkan;

use crate::harness::{full, say, validation};

/// True if the layer is on. Otherwise it prints a note.
fn is_on(test: &str) -> bool {
    let backend = full().gpu.device().adapter_info().backend;
    let why = match () {
        () if !validation::on() => "WGPU_VALIDATION=1 is not set",
        () if backend != wgpu::Backend::Vulkan => "the Khronos validation layer is for Vulkan alone",
        () => return true,
    };
    say(&format!("validation, {test}: skipped, {why}"));
    false
}

/// Checks that `what` provokes a message with `word`.
fn assert_provokes(word: &str, what: impl FnOnce()) {
    let messages = validation::provoked(what);
    assert!(messages.iter().any(|m| m.contains(word)), "no {word} in {messages:?}: is the layer loaded?");
    validation::check().expect("what is provoked is not reported as well");
}

#[test]
fn a_buffer_without_bytes_is_noticed() {
    if is_on("a buffer without bytes") {
        assert_provokes("VUID-VkBufferCreateInfo-size-00912", || {
            // SAFETY: the layer reports an error. Software drivers then make an empty buffer, which
            // is destroyed.
            unsafe {
                let device = full().gpu.device().as_hal::<Vulkan>().expect("a Vulkan device");
                let raw = device.raw_device();
                if let Ok(buffer) = raw.create_buffer(&Default::default(), None) {
                    raw.destroy_buffer(buffer, None);
                }
            }
        });
    }
}

#[test]
fn a_missing_barrier_is_noticed() {
    if is_on("a missing barrier") {
        let device = full().gpu.device();
        let usage = wgpu::BufferUsages::COPY_DST;
        let descriptor = wgpu::BufferDescriptor { label: None, size: 64, usage, mapped_at_creation: false };
        let buffer = device.create_buffer(&descriptor);
        let mut encoder = device.create_command_encoder(&Default::default());
        assert_provokes("SYNC-HAZARD-WRITE-AFTER-WRITE", || {
            // SAFETY: two writes of the same bytes in a command buffer that is never submitted.
            unsafe {
                let device = device.as_hal::<Vulkan>().expect("a Vulkan device");
                let buffer = buffer.as_hal::<Vulkan>().expect("a Vulkan buffer");
                encoder.as_hal_mut::<Vulkan, _, _>(|encoder| {
                    let commands = encoder.expect("a Vulkan encoder").raw_handle();
                    for data in [1, 2] {
                        device.raw_device().cmd_fill_buffer(commands, buffer.raw_handle(), 0, 64, data);
                    }
                });
            }
        });
    }
}
