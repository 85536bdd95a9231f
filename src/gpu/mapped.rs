//! Waits for the device.

use futures_channel::oneshot;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::kernel::guard::guarded;
use crate::tensor::Error;

#[cfg(not(target_arch = "wasm32"))]
use crate::device::opengl::{is_opengl, lock_opengl};

/// Maps all of `staging` for reading, after the device has finished `submission` and all earlier
/// work.
///
/// # Errors
/// [`Error::DeviceLost`].
pub(super) async fn mapped(
    device: &wgpu::Device,
    staging: &wgpu::Buffer,
    submission: wgpu::SubmissionIndex,
) -> Result<(), Error> {
    let (sender, receiver) = oneshot::channel();
    let is_mapped = Arc::new(AtomicBool::new(false));
    let flag = is_mapped.clone();
    guarded(device, "a read-back", || {
        staging.map_async(wgpu::MapMode::Read, .., move |result| {
            flag.store(true, Ordering::Relaxed);
            // The receiver is gone only if the caller dropped the future.
            let _ = sender.send(result);
        });
    })?;
    done(device, Some(submission), is_mapped).await?;
    let lost = |e: &dyn std::fmt::Display| Error::DeviceLost(e.to_string());
    receiver.await.map_err(|e| lost(&e))?.map_err(|e| lost(&e))
}

/// Browsers poll by themselves.
#[cfg(target_arch = "wasm32")]
pub(super) async fn done(
    _: &wgpu::Device,
    _: Option<wgpu::SubmissionIndex>,
    _: Arc<AtomicBool>,
) -> Result<(), Error> {
    Ok(())
}

/// Waits until the device has finished `submission`, or everything submitted so far. A thread
/// waits, so that the future's executor is not blocked. On OpenGL it waits until `is_done` is true
/// or the queue is empty.
#[cfg(not(target_arch = "wasm32"))]
pub(super) async fn done(
    device: &wgpu::Device,
    submission: Option<wgpu::SubmissionIndex>,
    is_done: Arc<AtomicBool>,
) -> Result<(), Error> {
    let lost = |e: wgpu::PollError| Error::DeviceLost(e.to_string());
    let poll = |device: &wgpu::Device| {
        let _guard = lock_opengl(device);
        device.poll(wgpu::PollType::Poll)
    };
    if poll(device).map_err(lost)?.is_queue_empty() {
        return Ok(());
    }
    let wait = move |device: &wgpu::Device, submission_index| {
        if !is_opengl(device) {
            // No timeout: wgpu 30 panics if a timeout ends while another thread finds the queue
            // empty.
            return device.poll(wgpu::PollType::Wait { submission_index, timeout: None });
        }
        // `PollType::Wait` would hold the lock of OpenGL.
        loop {
            let status = poll(device)?;
            if status.is_queue_empty() || is_done.load(Ordering::Relaxed) {
                return Ok(status);
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    };
    let (sender, receiver) = oneshot::channel();
    let (of_thread, first, waits) = (device.clone(), submission.clone(), wait.clone());
    let thread = std::thread::Builder::new().name("wgpu-attention read-back".into()).spawn(move || {
        let _ = sender.send(waits(&of_thread, first));
    });
    match thread {
        Ok(_) => match receiver.await {
            Ok(result) => result.map(drop).map_err(lost),
            Err(e) => Err(Error::DeviceLost(e.to_string())),
        },
        // The system has no further thread.
        Err(_) => wait(device, submission).map(drop).map_err(lost),
    }
}
