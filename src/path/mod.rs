//! Sequences of kernels: from checked tensors to calls.

pub(crate) mod additive_backward;
pub(crate) mod ask_mask;
pub(crate) mod backward;
mod backward_problem;
pub(crate) mod cache;
pub(crate) mod classify;
mod dispatches;
pub(crate) mod embedding;
pub(crate) mod fused;
pub(crate) mod linear;
pub(crate) mod linformer;
pub(crate) mod local;
pub(crate) mod logits;
pub(crate) mod lsh;
pub(crate) mod mean_pool;
pub(crate) mod norm;
pub(crate) mod pointwise;
mod problem;
pub(crate) mod project;
pub(crate) mod project_backward;
pub(crate) mod quantized;
pub(crate) mod radix_sort;
mod score_gradients;
pub(crate) mod staged;

pub(crate) use backward_problem::{AddedGradients, BackwardProblem};
pub(crate) use dispatches::{Dispatches, fits, in_scratch};
pub(crate) use problem::{Extras, Keys, Problem};

use crate::device::DeviceFacts;
use crate::error::Error;
use crate::plan::{self, Choice, Outline};
use crate::scratch::{Scratch, ScratchSize, Slot};

/// The path that computes a problem, and what it needs.
#[derive(Clone, Copy)]
pub(crate) struct Chosen(Choice);

/// Chooses the path of a problem.
pub(crate) fn choose(outline: &Outline, device: &DeviceFacts) -> Result<Chosen, Error> {
    plan::choose(outline, device).map(Chosen)
}

/// Chooses the path of a problem: as it was measured where `scratch` has room for that, else by the rules.
///
/// # Errors
/// A scratch that is too small.
pub(crate) fn choose_within(
    outline: &Outline,
    device: &DeviceFacts,
    scratch: &Scratch,
) -> Result<Chosen, Error> {
    let chosen = |device: &DeviceFacts| {
        let chosen = choose(outline, device)?;
        scratch.check(chosen.scratch_size()).map(|()| chosen)
    };
    within(device, chosen)
}

/// What `plan` makes of the device, or of the device without tuning where the scratch is too small for that.
///
/// # Errors
/// Those of `plan`, by the rules.
pub(crate) fn within<T>(
    device: &DeviceFacts,
    plan: impl Fn(&DeviceFacts) -> Result<T, Error>,
) -> Result<T, Error> {
    match plan(device) {
        Err(Error::ScratchTooSmall { .. }) if device.tuned.is_some() => {
            let [ruled, whole] = device.without_tuning();
            plan(&ruled).or_else(|error| plan(&whole).map_err(|_| error))
        }
        planned => planned,
    }
}

impl Chosen {
    /// The part of the scratch that it takes, of those that hold scores or partial sums.
    pub fn memory<'a>(&self, scratch: &'a Scratch) -> Result<Option<&'a wgpu::Buffer>, Error> {
        let needed = self.scratch_size();
        let used = [Slot::Scores, Slot::Partials].into_iter().find(|slot| needed.has(*slot));
        used.map(|slot| scratch.buffer(slot)).transpose()
    }

    /// The temporary memory it takes.
    pub fn scratch_size(&self) -> ScratchSize {
        let (slot, bytes) = match self.0 {
            Choice::Fused(plan) => (Slot::Partials, plan.partial_bytes()),
            Choice::Staged { score_bytes } => (Slot::Scores, score_bytes),
        };
        ScratchSize::default().with(slot, bytes)
    }
}

/// The dispatches of `problem`. `memory` is the scratch's part for scores or partial sums, if it has one.
pub(crate) fn dispatches<'a>(
    problem: &Problem<'a>,
    chosen: Chosen,
    memory: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    match chosen.0 {
        Choice::Fused(plan) => fused::dispatches(problem, &plan, memory, device),
        Choice::Staged { .. } => staged::dispatches(problem, memory, device),
    }
}
