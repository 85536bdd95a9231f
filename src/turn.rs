//! One thread at a time on OpenGL.
//!
//! wgpu has one lock for all calls of an OpenGL context. Its backend holds the lock while a kernel is compiled or a
//! submission runs, and panics in every other thread that waits for more than one second (Windows) or six seconds.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

static OPENGL: Mutex<()> = Mutex::new(());

thread_local! {
    /// How many turns this thread has.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// A thread's turn to call wgpu, until it is dropped.
pub(crate) struct Turn {
    /// Held by the thread's first turn.
    held: Option<MutexGuard<'static, ()>>,
    counts: bool,
}

/// True if the device is one of OpenGL.
pub(crate) fn is_opengl(device: &wgpu::Device) -> bool {
    device.adapter_info().backend == wgpu::Backend::Gl
}

/// Waits until no other thread of this library calls OpenGL. On other backends the turn is nothing.
pub(crate) fn turn(device: &wgpu::Device) -> Turn {
    if !is_opengl(device) {
        return Turn { held: None, counts: false };
    }
    let depth = DEPTH.replace(DEPTH.get() + 1);
    Turn { held: (depth == 0).then(|| OPENGL.lock().unwrap_or_else(PoisonError::into_inner)), counts: true }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.counts {
            DEPTH.set(DEPTH.get() - 1);
        }
        self.held = None;
    }
}
