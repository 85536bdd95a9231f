//! Waiting for the device.

use futures_channel::oneshot;

use crate::error::Error;
use crate::guard::guarded;

/// Maps all of `staging` for reading, when the device has done `submission` and everything before it.
///
/// # Errors
/// [`Error::DeviceLost`].
pub(super) async fn mapped(
    device: &wgpu::Device,
    staging: &wgpu::Buffer,
    submission: wgpu::SubmissionIndex,
) -> Result<(), Error> {
    let (sender, receiver) = oneshot::channel();
    guarded(device, "a read-back", || {
        staging.map_async(wgpu::MapMode::Read, .., |result| {
            // The receiver is gone only if the caller dropped the future.
            let _ = sender.send(result);
        });
    })?;
    done(device, Some(submission)).await?;
    let lost = |e: &dyn std::fmt::Display| Error::DeviceLost(e.to_string());
    receiver.await.map_err(|e| lost(&e))?.map_err(|e| lost(&e))
}

/// Browsers poll by themselves.
#[cfg(target_arch = "wasm32")]
pub(super) async fn done(_: &wgpu::Device, _: Option<wgpu::SubmissionIndex>) -> Result<(), Error> {
    Ok(())
}

/// Waits until the device has done `submission`, or all that was submitted so far. A thread does, so that the executor of the future
/// is not blocked.
#[cfg(not(target_arch = "wasm32"))]
pub(super) async fn done(
    device: &wgpu::Device,
    submission: Option<wgpu::SubmissionIndex>,
) -> Result<(), Error> {
    let lost = |e: wgpu::PollError| Error::DeviceLost(e.to_string());
    if device.poll(wgpu::PollType::Poll).map_err(lost)?.is_queue_empty() {
        return Ok(());
    }
    // Without a timeout: wgpu 30 panics if one runs out while another thread finds the queue empty.
    let wait = |device: &wgpu::Device, submission_index| {
        device.poll(wgpu::PollType::Wait { submission_index, timeout: None })
    };
    let (sender, receiver) = oneshot::channel();
    let (of_thread, first) = (device.clone(), submission.clone());
    let thread = std::thread::Builder::new().name("wgpu-attention read-back".into()).spawn(move || {
        let _ = sender.send(wait(&of_thread, first));
    });
    match thread {
        Ok(_) => match receiver.await {
            Ok(result) => result.map(drop).map_err(lost),
            Err(e) => Err(Error::DeviceLost(e.to_string())),
        },
        // A system without another thread.
        Err(_) => wait(device, submission).map(drop).map_err(lost),
    }
}
