//! Sequences of kernels: from checked tensors to calls.

pub(crate) mod backward;
pub(crate) mod backward_problem;
pub(crate) mod fused;
mod problem;
pub(crate) mod score_gradients;
pub(crate) mod staged;

pub(crate) use backward_problem::{AddedGradients, BackwardProblem};
pub(crate) use problem::{Extras, Keys, Problem};

use super::plan::{self, Choice, Outline};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Scratch, ScratchSize, Slot};
use crate::tensor::Error;

/// The chosen path of a problem.
#[derive(Clone, Copy)]
pub(crate) struct Chosen(Choice);

/// Chooses the path of a problem.
pub(crate) fn choose(outline: &Outline, device: &DeviceFacts) -> Result<Chosen, Error> {
    plan::choose(outline, device).map(Chosen)
}

/// Chooses the path of a problem: the measured one if `scratch` has room for it, else the rules'.
///
/// # Errors
/// Returns an error if the scratch is too small.
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

/// Returns the result of `plan` for the device. If the scratch is too small, it plans for the
/// device without tuning instead.
///
/// # Errors
/// The errors of `plan` without tuning.
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
    /// The part of the scratch that this path uses for scores or partial sums.
    pub fn memory<'a>(&self, scratch: &'a Scratch) -> Result<Option<&'a wgpu::Buffer>, Error> {
        let needed = self.scratch_size();
        let used = [Slot::Scores, Slot::Partials].into_iter().find(|slot| needed.has(*slot));
        used.map(|slot| scratch.buffer(slot)).transpose()
    }

    /// The temporary memory that this path needs.
    pub fn scratch_size(&self) -> ScratchSize {
        let (slot, bytes) = match self.0 {
            Choice::Fused(plan) => (Slot::Partials, plan.partial_bytes()),
            Choice::Staged { score_bytes } => (Slot::Scores, score_bytes),
        };
        ScratchSize::default().with(slot, bytes)
    }
}

/// Returns the dispatches of `problem`. `memory` is the scratch's part for scores or partial sums,
/// if it has one.
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
