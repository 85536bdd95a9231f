//! One thread at a time on OpenGL.
//!
//! wgpu has one lock for all calls of an OpenGL context. Its backend holds the lock while it
//! compiles a kernel or executes a submission. Another thread that waits longer than six seconds
//! (one second on Windows) panics.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

static LOCK: Mutex<()> = Mutex::new(());

thread_local! {
    /// The number of guards that this thread has.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Excludes the other threads of this library from OpenGL until it is dropped. A thread may have
/// several.
pub(crate) struct OpenGlGuard {
    /// The first guard of a thread holds the lock.
    _lock: Option<MutexGuard<'static, ()>>,
}

/// True if the backend of `device` is OpenGL.
pub(crate) fn is_opengl(device: &wgpu::Device) -> bool {
    device.adapter_info().backend == wgpu::Backend::Gl
}

/// Waits until no other thread of this library calls OpenGL. Other backends need no guard.
pub(crate) fn lock_opengl(device: &wgpu::Device) -> Option<OpenGlGuard> {
    is_opengl(device).then(|| {
        let depth = DEPTH.replace(DEPTH.get() + 1);
        OpenGlGuard { _lock: (depth == 0).then(|| LOCK.lock().unwrap_or_else(PoisonError::into_inner)) }
    })
}

impl Drop for OpenGlGuard {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}
