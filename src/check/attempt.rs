//! One attempt at a problem, and the first attempts at all problems in parallel.

#[cfg(not(target_arch = "wasm32"))]
use std::collections::BTreeMap;
#[cfg(not(target_arch = "wasm32"))]
use std::sync::{Mutex, PoisonError};

use super::problems::Problem;
use crate::device::Families;
use crate::gpu::Gpu;
use crate::kernel::Pipelines;
use crate::tensor::Error;

#[cfg(not(target_arch = "wasm32"))]
use crate::kernel::pipelines::lock;

/// The result of an attempt.
pub(super) enum Attempt {
    Right(f64),
    Wrong(String),
    /// Plans have no kernels for the problem.
    Refused,
}

/// Solves `problem` with plans that avoid `disabled`, and returns the families that they used.
pub(super) async fn attempt(
    pipelines: &Pipelines,
    queue: &wgpu::Queue,
    problem: Problem,
    disabled: Families,
) -> Result<(Families, Attempt), Error> {
    let gpu = Gpu::with_pipelines(queue.clone(), pipelines.without(disabled));
    let attempt = match problem.run(&gpu).await {
        Ok(Ok(share)) => Attempt::Right(share),
        Ok(Err(mismatch)) => Attempt::Wrong(mismatch.to_string()),
        Err(e @ (Error::DeviceLost(_) | Error::OutOfMemory { .. })) => return Err(e),
        Err(e @ (Error::Refused { .. } | Error::Mod { .. })) => Attempt::Wrong(e.to_string()),
        Err(_) => Attempt::Refused,
    };
    Ok((gpu.pipelines().used(), attempt))
}

/// Attempts the problems of [`Problem::all`] that concern the device. It uses as many threads as
/// the machine has cores, because most of the time goes into the driver's compiler. Problems that
/// fail, or that were not attempted, have no entry.
#[cfg(not(target_arch = "wasm32"))]
pub(super) fn first_attempts(
    pipelines: &Pipelines,
    queue: &wgpu::Queue,
    disabled: Families,
) -> BTreeMap<usize, (Families, Attempt)> {
    let facts = pipelines.facts();
    let concerns = Problem::all().enumerate().filter(|(_, problem)| problem.concerns(&facts));
    let waiting = Mutex::new(concerns);
    let found = Mutex::new(BTreeMap::new());
    let work = || {
        loop {
            let Some((n, problem)) = lock(&waiting).next() else { return };
            if let Ok(tried) = pollster::block_on(attempt(pipelines, queue, problem, disabled)) {
                lock(&found).insert(n, tried);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(Problem::all().count());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            // If the system has no further thread, the other threads or the check itself do its
            // work.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
    });
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}
