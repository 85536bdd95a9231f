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

/// wgpu keeps a lock while it waits, which other threads need to destroy buffers.
#[cfg(not(target_arch = "wasm32"))]
const LONGEST_WAIT: std::time::Duration = std::time::Duration::from_millis(2);

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
    let wait = |device: wgpu::Device, submission: Option<wgpu::SubmissionIndex>| {
        loop {
            // Without a submission each round would wait for what others have submitted meanwhile.
            let timeout = submission.is_some().then_some(LONGEST_WAIT);
            match device.poll(wgpu::PollType::Wait { submission_index: submission.clone(), timeout }) {
                Err(wgpu::PollError::Timeout) => {}
                result => return result,
            }
        }
    };
    let (sender, receiver) = oneshot::channel();
    let of_thread = (device.clone(), submission.clone());
    let thread = std::thread::Builder::new().name("wgpu-attention read-back".into()).spawn(move || {
        let _ = sender.send(wait(of_thread.0, of_thread.1));
    });
    match thread {
        Ok(_) => match receiver.await {
            Ok(result) => result.map(drop).map_err(lost),
            Err(e) => Err(Error::DeviceLost(e.to_string())),
        },
        // A system without another thread.
        Err(_) => wait(device.clone(), submission).map(drop).map_err(lost),
    }
}
